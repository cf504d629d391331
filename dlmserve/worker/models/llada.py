"""LLaDA (8B base and instruct, 1.5): `LLaDAModelLM`. RoPE in float32, no biases, logits not shifted.

Source: the public configuration and model file of GSAI-ML/LLaDA-8B.
"""

from dlmserve.worker.models.config import DecoderConfig, TensorNames
from dlmserve.worker.models.options import check_options

NAMES = TensorNames(
    embedding="model.transformer.wte.weight",
    final_norm="model.transformer.ln_f.weight",
    head="model.transformer.ff_out.weight",
    layer="model.transformer.blocks.{}.",
    attention_norm="attn_norm",
    q="q_proj",
    k="k_proj",
    v="v_proj",
    o="attn_out",
    mlp_norm="ff_norm",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
)
# What the architecture's config could say but no published LLaDA does: refused rather than computed wrongly.
REQUIRED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "attention_layer_norm": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "bias_for_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
}


def read_config(config: dict) -> DecoderConfig:
    """Raises CheckpointError for an option that this file does not implement."""
    check_options(config, REQUIRED, "LLaDA")
    heads = config["n_heads"]
    return DecoderConfig(
        num_layers=config["n_layers"],
        hidden_size=config["d_model"],
        num_heads=heads,
        num_kv_heads=config.get("n_kv_heads") or heads,
        head_dim=config["d_model"] // heads,
        mlp_size=config.get("mlp_hidden_size") or config["mlp_ratio"] * config["d_model"],
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        max_len=config["max_sequence_length"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        qkv_bias=False,
        rope_in_float32=True,
        shifted_logits=False,
        tied_head=bool(config.get("weight_tying")),
    )
