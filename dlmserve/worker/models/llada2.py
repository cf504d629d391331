"""LLaDA 2.0 (mini, flash): `LLaDA2MoeModelLM`. Block-causal; experts chosen by a sigmoid router within groups.

Queries, keys and values are one tensor, one below the other; half of each head rotates. The first layers are dense.
Source: the public configuration and model file of inclusionAI/LLaDA2.0-mini.
"""

from dlmserve.worker.models.config import DecoderConfig, TensorNames
from dlmserve.worker.models.moe import MoeConfig
from dlmserve.worker.models.options import check_options

NAMES = TensorNames(
    embedding="model.word_embeddings.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    qkv="attention.query_key_value",
    o="attention.dense",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    q_norm="attention.query_layernorm",
    k_norm="attention.key_layernorm",
)
REQUIRED = {
    "hidden_act": "silu",
    "rope_scaling": None,
    "use_sliding_window": False,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "score_function": "sigmoid",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
}


def read_config(config: dict) -> DecoderConfig:
    """Raises CheckpointError for an option that this file does not implement."""
    check_options(config, REQUIRED, "LLaDA 2")
    num_layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    expert_size = config["moe_intermediate_size"]
    return DecoderConfig(
        num_layers=num_layers,
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_len=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        qkv_bias=False,
        rope_in_float32=False,
        shifted_logits=False,
        tied_head=bool(config.get("tie_word_embeddings")),
        qk_norm=True,
        rotary_dim=int(head_dim * (config.get("partial_rotary_factor") or 1)),
        moe=MoeConfig(
            layers=tuple(i >= config["first_k_dense_replace"] for i in range(num_layers)),
            num_experts=config["num_experts"],
            num_chosen=config["num_experts_per_tok"],
            expert_size=expert_size,
            shared_size=expert_size * (config.get("num_shared_experts") or 0),
            sigmoid=True,
            num_groups=config.get("n_group") or 1,
            num_kept_groups=config.get("topk_group") or 1,
            scale=config.get("routed_scaling_factor") or 1.0,
        ),
    )
