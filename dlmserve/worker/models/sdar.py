"""SDAR (1.7B, 4B, 8B): `SDARForCausalLM`. Block diffusion on Qwen3: attention is block-causal, logits are not shifted.

Source: the public configuration and model file of JetLM/SDAR-4B-Chat.
"""

from dlmserve.worker.models import llada_moe
from dlmserve.worker.models.config import DecoderConfig
from dlmserve.worker.models.options import check_options, read_sizes

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
    return read_sizes(config, mlp_size=config["intermediate_size"], qk_norm=True)
