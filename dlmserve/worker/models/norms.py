"""Root-mean-square norms: of a token's hidden state, and of each attention head by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve import kernels


class RMSNorm:
    """x * rsqrt(mean(x^2) + eps) in float32, cast back, then times the weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return kernels.rms_norm(x, self.weight, self._eps)
        if x.is_cuda:  # one launch, which rounds once where the lines below round twice
            return F.rms_norm(x, x.shape[-1:], self.weight, self._eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return wide.to(x.dtype) * self.weight


class HeadNorm:
    """The same of each head by itself: x [T, H, D], one weight for all heads."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.norm = RMSNorm(weight, eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view(x.shape)
