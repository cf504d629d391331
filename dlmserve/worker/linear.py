"""Matrix products of a rank's weight slices. Knows nothing of models or of tensor parallelism, only which
tensors of the checkpoint a product's weights are made of.

On CPUs float32 weights are kept packed: in the compiled kernel's layout where that is the fastest, else in oneDNN's,
which loses to the plain product below `ONEDNN_MIN` weights. `bench/kernels.py` measures all three.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve import kernels
from dlmserve.worker.shards import Shard
from dlmserve.worker.weights import Ask, Weights

ONEDNN_MIN = 1 << 19
# The hint oneDNN wants of the rows per call; the layout it picks serves any number of rows.
_ROWS_HINT = 32


class Linear:
    """y = x W' + b for x [T, K], W [N, K], b [N] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        # One of the three; a packed copy replaces the weights.
        self._weight: Tensor | None = None
        self._onednn: Tensor | None = None
        self._packed = kernels.packed_weight(weight)
        if self._packed is None:
            if _onednn_pays(weight):
                self._onednn = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
            else:
                self._weight = weight.contiguous()

    @property
    def weight(self) -> Tensor:
        """W; a copy where it is packed."""
        if self._packed is not None:
            return self._packed.unpacked()
        if self._onednn is not None:
            return self._onednn.to_dense()
        assert self._weight is not None
        return self._weight

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed.product(x, self.bias)
        if self._onednn is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._onednn, self.bias, "none", [], "")
        return F.linear(x, self._weight, self.bias)  # type: ignore[arg-type]


class Fused:
    """A Linear whose rows are several tensors of the checkpoint, one below the other."""

    def __init__(self, weights: Weights, asks: list[Ask], biases: list[Ask] | None = None) -> None:
        self._asks, self._biases = asks, biases or []
        parts = [weights.get(ask) for ask in asks]
        self._rows = [len(part) for part in parts]
        bias = torch.cat([weights.get(ask) for ask in biases]) if biases else None
        self._linear = Linear(torch.cat(parts) if len(parts) > 1 else parts[0], bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def shards(self) -> Iterator[Shard]:
        """What it was made of, by the names that the checkpoint has."""
        linear, at = self._linear, 0  # no reference to self: the model must be able to go
        for i, (ask, count) in enumerate(zip(self._asks, self._rows, strict=True)):
            yield Shard(ask, lambda at=at, count=count: linear.weight[at : at + count])
            if self._biases:
                yield Shard(self._biases[i], lambda at=at, count=count: _bias(linear)[at : at + count])
            at += count


def _bias(linear: Linear) -> Tensor:
    assert linear.bias is not None
    return linear.bias


def _onednn_pays(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= ONEDNN_MIN
        and torch.backends.mkldnn.is_available()
    )
