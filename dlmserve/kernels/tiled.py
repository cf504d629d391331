"""The LM head through torch's own matrix product, one tile of the vocabulary at a time.

For machines where the fused kernel is missing or does not pay. Knows nothing of how a tile is reduced.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlmserve.kernels.reference import Rows, combine

# Large enough for the product to run at full speed, small enough for its logits to stay in a cache.
TILE_TOKENS = 8192
# Of a bf16 tile, which is widened first.
TILE_WEIGHTS = 1 << 23


def head_rows(
    hidden: Tensor,
    weight: Tensor,
    token_offset: int,
    banned: Sequence[int],
    bias: Tensor | None,
    logit_rows: Callable[[Tensor, int, Sequence[int]], Rows],
) -> Rows:
    """`reference.head_rows` without its [M, V] logits; `logit_rows` reduces each tile."""
    num_rows, (num_tokens, dim) = len(hidden), weight.shape
    step = TILE_TOKENS
    if weight.dtype != torch.float32:
        step = min(step, max(1, TILE_WEIGHTS // dim))
    buffer = hidden.new_empty(num_rows * min(step, num_tokens))
    parts = []
    for begin in range(0, max(num_tokens, 1), step):
        tile = weight[begin : begin + step].float().T
        logits = buffer[: num_rows * tile.shape[1]].view(num_rows, tile.shape[1])
        if bias is None:
            torch.mm(hidden, tile, out=logits)
        else:
            torch.addmm(bias[begin : begin + step], hidden, tile, out=logits)
        parts.append(logit_rows(logits, token_offset + begin, banned))
    return combine(parts)
