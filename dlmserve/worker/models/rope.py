"""Rotary position embedding (Su et al., 2021): queries and keys turn by angles that grow with their column."""

import torch
from torch import Tensor


class Rope:
    """Rotary embedding, half-split convention: pairs (j, j + D/2), angle = column * theta^(-2j/D).

    D is the head's size, or those of its first entries that rotate; the others stay as they are.
    """

    def __init__(self, size: int, theta: float, max_len: int, dtype: torch.dtype, device: str) -> None:
        """`size`: D; `dtype`: in which it rotates."""
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), 1.0 / theta**exponents)
        self._cos, self._sin = angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for columns [T]: [T, 1, D/2] each."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, H, D]."""
        half = cos.shape[-1]
        wide = x.to(cos.dtype)
        a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)
