"""One file per model family; each says how its config and its tensors are named and what is special about it."""

from dataclasses import replace

import torch

from dlmserve.checkpoint import ModelInfo, read_json
from dlmserve.worker.attention import Attention
from dlmserve.worker.models import dream, llada, llada2, llada_moe, sdar
from dlmserve.worker.models.config import DecoderConfig
from dlmserve.worker.models.decoder import Decoder
from dlmserve.worker.parallel import Group
from dlmserve.worker.weights import Weights

FAMILIES = {
    "llada": llada,
    "dream": dream,
    "llada_moe": llada_moe,
    "sdar": sdar,
    "llada2": llada2,
}


def read_config(info: ModelInfo) -> DecoderConfig:
    """Raises CheckpointError for a config whose options the family's file does not implement."""
    config = FAMILIES[info.family].read_config(read_json(info.path, "config.json", required=True))
    return replace(config, block_causal=info.block_causal)


def load_model(
    info: ModelInfo,
    weights: Weights,
    dtype: torch.dtype,
    device: str,
    group: Group,
    attention: Attention,
) -> Decoder:
    """The rank's shard of the model. Raises CheckpointError."""
    config = read_config(info)
    config = replace(config, max_len=min(config.max_len, info.max_model_len))
    return Decoder(config, FAMILIES[info.family].NAMES, weights, group, dtype, device, attention)
