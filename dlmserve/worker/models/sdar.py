"""SDAR (1.7B, 4B, 8B): `SDARForCausalLM`. Block diffusion on Qwen3: attention is block-causal, logits are not shifted.

Source: the public configuration and model file of JetLM/SDAR-4B-Chat.
"""

from dlmserve.worker.models import llada_moe
from dlmserve.worker.models.config import DecoderConfig
from dlmserve.worker.models.options import check_options

NAMES = llada_moe.NAMES
REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_scaling": None,
    "use_sliding_window": False,
}


def read_config(config: dict) -> DecoderConfig:
    """Raises CheckpointError for an option that this file does not implement."""
    check_options(config, REQUIRED, "SDAR")
    heads = config["num_attention_heads"]
    return DecoderConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
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
    )
