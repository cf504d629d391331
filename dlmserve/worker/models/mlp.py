"""SwiGLU: a layer's MLP, an expert, or the shared one; this rank's columns of it.

Knows nothing of layers or of tensor parallelism: whoever calls adds up what the ranks compute.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from dlmserve import kernels
from dlmserve.worker.linear import Fused
from dlmserve.worker.shards import Shard
from dlmserve.worker.weights import Ask, Weights


class MlpAsks(NamedTuple):
    """What an MLP is made of: gate and up [columns, d], down [d, columns]."""

    gate: Ask
    up: Ask
    down: Ask


def mlp_asks(names: tuple[str, str, str], hidden_size: int, size: int, part: tuple[int, int]) -> MlpAsks:
    """The columns `part` of an MLP of `size` columns; names of gate, up and down, without ".weight"."""
    gate, up, down = (f"{name}.weight" for name in names)
    rows = (size, hidden_size)
    return MlpAsks(Ask(gate, rows, 0, *part), Ask(up, rows, 0, *part), Ask(down, rows[::-1], 1, *part))


class Mlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, weights: Weights, asks: MlpAsks) -> None:
        self._gate_up = Fused(weights, [asks.gate, asks.up])
        self._down = Fused(weights, [asks.down])

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, d] -> [T, d], to be summed over the ranks."""
        return self._down(kernels.silu_gate(self._gate_up(x)))

    def shards(self) -> Iterator[Shard]:
        yield from self._gate_up.shards()
        yield from self._down.shards()
