"""Dream (7B base and instruct, Dream-Coder, DiffuCoder): `DreamModel`, Qwen2.5's layout without the causal mask.

Its output at column i predicts column i + 1, so a block's first column comes from the column before the block,
which only a recompute step covers: that step reveals this one column and nothing else (Fast-dLLM's rule).
"""

from dlmserve.worker.models.config import DecoderConfig, TensorNames
from dlmserve.worker.models.options import check_options, read_sizes

NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)
REQUIRED = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}


def read_config(config: dict) -> DecoderConfig:
    """Raises CheckpointError for an option that this file does not implement."""
    check_options(config, REQUIRED, "Dream")
    return read_sizes(config, mlp_size=config["intermediate_size"], qkv_bias=True, shifted_logits=True)
