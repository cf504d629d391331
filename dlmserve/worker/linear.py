"""Matrix products of a rank's weight slices. Knows nothing of models or of tensor parallelism.

On CPUs large float32 weights are kept in oneDNN's packed layout: 1.3 to 1.7 times the speed of the plain product on
a processor for which MKL is not tuned (`bench/kernels.py` measures both). Below `PACK_MIN` weights it may lose.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_MIN = 1 << 19
# The hint oneDNN wants of the rows per call; the layout it picks serves any number of rows.
_ROWS_HINT = 32


class Linear:
    """y = x W' + b for x [T, K], W [N, K], b [N] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = None
        self._weight: Tensor | None = weight.contiguous()
        if self._can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, _ROWS_HINT)
            self._weight = None  # the packed copy replaces it

    @staticmethod
    def _can_pack(weight: Tensor) -> bool:
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.numel() >= PACK_MIN
            and torch.backends.mkldnn.is_available()
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
