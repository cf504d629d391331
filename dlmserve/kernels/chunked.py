"""The LM head by torch's matrix product over some rows at a time, whose float32 logits fit the memory set aside.

Knows nothing of how logits are reduced. The weights are read once per chunk, so a chunk takes as many rows as it may.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dlmserve.kernels import tiled
from dlmserve.kernels.reference import Rows

# What the logits of one chunk may take: enough rows for the product to run at full speed, and no more than a
# small share of the device's memory.
LOGITS_BYTES = 256 << 20
MEMORY_SHARE = 64


def num_chunk_rows(num_tokens: int, memory_bytes: int) -> int:
    """How many rows of float32 logits over `num_tokens` a chunk has on a device with that much memory."""
    return _rows_within(min(LOGITS_BYTES, memory_bytes // MEMORY_SHARE), num_tokens)


def rows_at_once(num_tokens: int) -> int:
    """How many rows to ask `logits` for at a time: the same on every device, as collectives want it."""
    return _rows_within(LOGITS_BYTES, num_tokens)


def _rows_within(num_bytes: int, num_tokens: int) -> int:
    return max(1, num_bytes // (4 * max(1, num_tokens)))


def head_rows(
    hidden: Tensor,
    weight: Tensor,
    token_offset: int,
    banned: Sequence[int],
    bias: Tensor | None,
    logit_rows: Callable[[Tensor, int, Sequence[int]], Rows],
    memory_bytes: int,
) -> Rows:
    """`reference.head_rows` of hidden f32 or bf16, with logits of `num_chunk_rows` at a time.

    Logits are float32 throughout. bf16 hidden states and weights are multiplied as they are where torch can
    return the float32 sums (torch.mm with out_dtype, since 2.8); elsewhere, and for float32 hidden states, a tile
    of weights is widened at a time.
    """
    if hidden.dtype != weight.dtype or not _has_product(hidden):
        return tiled.head_rows(hidden.float(), weight, token_offset, banned, bias, logit_rows)
    chunks = hidden.split(num_chunk_rows(len(weight), memory_bytes))
    parts = [logit_rows(_with_bias(logits(chunk, weight), bias), token_offset, banned) for chunk in chunks]
    return parts[0] if len(parts) == 1 else Rows(*map(torch.cat, zip(*parts, strict=True)))


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """f32 [M, V] of hidden [M, D] x weight [V, D]^T, all rows at once. Weights are copied only to be widened."""
    if hidden.dtype != torch.float32 and hidden.dtype == weight.dtype and _has_product(hidden):
        return torch.ops.aten.mm.dtype(hidden, weight.T, torch.float32)
    return F.linear(hidden.float(), weight.float())


def _has_product(hidden: Tensor) -> bool:
    """Whether torch can multiply tensors of this type and place into float32 sums."""
    return hidden.dtype == torch.float32 or (hidden.is_cuda and hasattr(torch.ops.aten.mm, "dtype"))


def _with_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    return logits if bias is None else logits.add_(bias)
