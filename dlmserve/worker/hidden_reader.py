"""What hidden states tell of a request's end: pooled at recompute steps, read by a small network.

Owns the pooling, the network's form and its file. Knows nothing of training, and nothing of what its two numbers
are used for. They decide nothing on the instance, so only the rank that reports reads them.

Source: STAR (arXiv 2510.13668), whose predictor regresses the remaining length of an answer from the last hidden
state; here blocks and steps take the place of tokens.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from dlmserve.errors import ConfigError

log = logging.getLogger("dlmserve.rank")

HiddenOutlook = tuple[
    float, float
]  # blocks after the current one until the end, steps left in the current one
HiddenReader = Callable[[Tensor], Tensor]  # pooled f32 [n, 2d] -> outlooks f32 [n, 2]


def pool_recomputed(hidden: Tensor, lengths: Sequence[int], recomputes: Sequence[bool]) -> Tensor:
    """f32 [n, 2d] of the n requests at a recompute step: mean over its rows, and the first row.

    `hidden` [M, d]: a step's rows, which are the masked positions of each request's block; `lengths`: how many.
    """
    parts = [part for part, pooled in zip(hidden.split(list(lengths)), recomputes, strict=True) if pooled]
    return torch.stack([torch.cat((part.mean(0), part[0])) for part in parts]).float()


class HiddenNetwork:
    """2d -> 512 -> 64 -> 2 with GELU, over standardised inputs; trained on log1p of both numbers.

    tensors: mean, scale [2d]; weight_0, bias_0 .. weight_2, bias_2.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    @classmethod
    def load(cls, path: Path, hidden_size: int, device: str) -> "HiddenNetwork":
        """Raises ConfigError where there is no such file, or one for another model."""
        try:
            tensors = load_file(path, device=device)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"hidden-state predictor {path} cannot be read: {error}; train it again"
            ) from error
        size = len(tensors.get("mean", ()))
        if size != 2 * hidden_size:
            raise ConfigError(
                f"hidden-state predictor {path} takes {size} numbers; wanted {2 * hidden_size}, twice the "
                "model's width: train it on this model"
            )
        return cls({name: tensor.float() for name, tensor in tensors.items()})

    def save(self, path: Path, more: dict[str, np.ndarray]) -> None:
        """Half precision, which is finer than what the network knows; `more` goes into the file as it is."""
        tensors = {name: tensor.half().contiguous() for name, tensor in self.tensors.items()}
        path.write_bytes(save(tensors | {name: torch.from_numpy(array) for name, array in more.items()}))

    def logs(self, pooled: Tensor) -> Tensor:
        """f32 [n, 2]: log1p of the two numbers, what the network is trained for."""
        t = self.tensors
        x = (pooled - t["mean"]) / t["scale"]
        x = F.gelu(F.linear(x, t["weight_0"], t["bias_0"]))
        x = F.gelu(F.linear(x, t["weight_1"], t["bias_1"]))
        return F.linear(x, t["weight_2"], t["bias_2"])

    def __call__(self, pooled: Tensor) -> Tensor:
        """f32 [n, 2], on the device of `pooled`."""
        return self.logs(pooled).expm1().clamp(min=0.0)


def load_reader(path: str, hidden_size: int, device: str) -> HiddenReader | None:
    """None, and a warning, where the file is of no use: this node serves without what it would tell."""
    try:
        return HiddenNetwork.load(Path(path), hidden_size, device)
    except ConfigError as error:
        log.warning("%s; serving without it", error)
        return None
