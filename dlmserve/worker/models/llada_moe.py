"""LLaDA-MoE (7B-A1B base and instruct): `LLaDAMoEModelLM`. LLaDA's decoding; experts chosen by a softmax router.

Heads' queries and keys are normalised before they rotate. The weights of the chosen experts are their probabilities
among all, as they are. Its config.json says model_type "llada", as LLaDA's does: `architectures` tells them apart.
Source: the public configuration and model file of inclusionAI/LLaDA-MoE-7B-A1B.
"""

from dataclasses import replace

from dlmserve.errors import CheckpointError
from dlmserve.worker.models import dream
from dlmserve.worker.models.config import DecoderConfig
from dlmserve.worker.models.moe import MoeConfig
from dlmserve.worker.models.options import check_options, read_rotary_dim, read_sizes

NAMES = replace(dream.NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "clip_qkv": None,
    "rope_scaling": None,
    "norm_topk_prob": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "routed_scaling_factor": 1,
    "router_num_group": None,
    "router_topk_group": None,
    "shared_expert_intermediate_size": None,
}


def read_config(config: dict) -> DecoderConfig:
    """Raises CheckpointError for an option that this file does not implement."""
    check_options(config, REQUIRED, "LLaDA-MoE")
    num_layers, mixed = config["num_hidden_layers"], config["moe_layer_freq"]
    if not isinstance(mixed, list) or len(mixed) != num_layers:
        raise CheckpointError(
            f"config.json has moe_layer_freq={mixed!r}; LLaDA-MoE is served with a list for its {num_layers} layers"
        )
    return read_sizes(
        config,
        mlp_size=config["dense_intermediate_size"],
        qk_norm=bool(config.get("qk_layernorm")),
        rotary_dim=read_rotary_dim(config),
        moe=MoeConfig(
            layers=tuple(map(bool, mixed)),
            num_experts=config["num_experts"],
            num_chosen=config["num_experts_per_tok"],
            expert_size=config["expert_intermediate_size"],
        ),
    )
