"""Matrix products of a rank's weight slices. Knows nothing of models or of tensor parallelism.

On CPUs float32 weights are kept packed: in the compiled kernel's layout where that is the fastest, else in oneDNN's,
which loses to the plain product below `ONEDNN_MIN` weights. `bench/kernels.py` measures all three.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve import kernels

ONEDNN_MIN = 1 << 19
# The hint oneDNN wants of the rows per call; the layout it picks serves any number of rows.
_ROWS_HINT = 32


class Linear:
    """y = x W' + b for x [T, K], W [N, K], b [N] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        # One of the three; a packed copy replaces the weights.
        self._weight: Tensor | None = None
        self._onednn: Tensor | None = None
        self._packed = kernels.packed_weight(weight)
        if self._packed is None:
            if _onednn_pays(weight):
                self._onednn = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
            else:
                self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed.product(x, self._bias)
        if self._onednn is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._onednn, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)  # type: ignore[arg-type]


def _onednn_pays(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= ONEDNN_MIN
        and torch.backends.mkldnn.is_available()
    )
