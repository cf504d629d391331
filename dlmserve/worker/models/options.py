"""What a config.json says: sizes under the names that most families share, and options that change what is computed,
of which those that are not served are refused.
"""

from typing import Any

from dlmserve.errors import CheckpointError
from dlmserve.worker.models.config import DecoderConfig


def check_options(config: dict, served: dict[str, Any], model: str) -> None:
    """Raises CheckpointError for the first key with another value; what is absent, null or off is all the same."""
    for key, wanted in served.items():
        value = config.get(key)
        if value is not None and value != wanted and (value or wanted):
            raise CheckpointError(f"config.json has {key}={value!r}; {model} is served with {key}={wanted!r}")


def read_sizes(config: dict, **differs: Any) -> DecoderConfig:
    """A family that names its sizes as transformers' models do; `differs`: all in which it is not a plain decoder."""
    heads = config["num_attention_heads"]
    plain: dict[str, Any] = {"qkv_bias": False, "rope_in_float32": False, "shifted_logits": False}
    return DecoderConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=_head_dim(config),
        vocab_size=config["vocab_size"],
        max_len=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        tied_head=bool(config.get("tie_word_embeddings")),
        **(plain | differs),
    )


def read_rotary_dim(config: dict) -> int:
    """How many entries of a head rotate."""
    return int(_head_dim(config) * (config.get("partial_rotary_factor") or 1))


def _head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
