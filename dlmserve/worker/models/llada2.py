"""LLaDA 2.0 (mini, flash): `LLaDA2MoeModelLM`. Block-causal; experts chosen by a sigmoid router within groups.

Queries, keys and values are one tensor, one below the other; half of each head rotates. The first layers are dense.
Source: the public configuration and model file of inclusionAI/LLaDA2.0-mini.
"""

from dlmserve.worker.models.config import DecoderConfig, TensorNames
from dlmserve.worker.models.moe import MoeConfig
from dlmserve.worker.models.options import check_options, read_rotary_dim, read_sizes

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
    expert_size, num_dense = config["moe_intermediate_size"], config["first_k_dense_replace"]
    return read_sizes(
        config,
        mlp_size=config["intermediate_size"],
        qk_norm=True,
        rotary_dim=read_rotary_dim(config),
        moe=MoeConfig(
            layers=tuple(i >= num_dense for i in range(config["num_hidden_layers"])),
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
