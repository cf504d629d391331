"""Confidence, sampling, unmasking, norms and gates in plain torch: what every compiled kernel must agree with.

Knows nothing about speed, threads or processes. Compiled kernels may differ by rounding only: from the same
logits come the same tokens, ties and selections, and log-sums within about 1e-6. Works on any device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# Unmasking rules of `select`.
THRESHOLD, QUOTA, FACTOR, ALL, AT_LEAST = range(5)

_MASK32 = 0xFFFFFFFF


class Rows(NamedTuple):
    """What a row of logits comes down to, over one slice of the vocabulary or over all of it.

    logit f32 [M]: the largest finite logit among the allowed tokens; -inf where there is none.
    token i64 [M]: its global id, the lowest on a tie; -1 where there is none.
    lse f32 [M]: log of the sum of exp of *all* logits, banned ones included; -inf for an empty slice, NaN
        exactly where the row has a NaN or +inf. A log-sum and not a sum relative to `logit`: a banned logit
        may lie so far above the best allowed one that the latter overflows.
    """

    logit: Tensor
    token: Tensor
    lse: Tensor


def head_rows(
    hidden: Tensor,
    weight: Tensor,
    token_offset: int = 0,
    banned: Sequence[int] = (),
    bias: Tensor | None = None,
) -> Rows:
    """Rows of the logits hidden [M, D] x weight [V, D]^T + bias [V], in float32 throughout."""
    logits = hidden @ weight.float().T
    return logit_rows(logits if bias is None else logits + bias, token_offset, banned)


def logit_rows(logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Rows:
    """Rows of logits f32 [M, V], whose columns are the tokens from `token_offset` on."""
    return _rows(logits, _only_allowed(logits, token_offset, banned), token_offset)[1]


def top2_logits(logits: Tensor, token_offset: int = 0, banned: Sequence[int] = ()) -> Tensor:
    """f32 [M, 2]: the two largest finite logits among the allowed tokens, -inf where there is none.

    Those of the whole vocabulary are the top two of its slices' side by side.
    """
    allowed = _only_allowed(logits, token_offset, banned)
    return torch.nn.functional.pad(allowed, (0, 2), value=-torch.inf).topk(2).values.float()


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    step: Tensor,
    token_offset: int = 0,
    banned: Sequence[int] = (),
) -> tuple[Tensor, Rows]:
    """Draws a token per row from softmax(logits / temperature) over the allowed tokens; 0: the arg-max.

    Gumbel-max (Gumbel, 1954): the token of the largest score = logits / temperature + g, g = -log(-log(u)),
    where u depends on (seed, position, step, global token id) alone. So neither the batch nor the way in
    which the vocabulary is split changes the draw. Scores are computed in float64 and rounded to float32; the
    lowest id wins a tie.

    Returns score f32 [M], by which `combine` compares slices, and Rows with the drawn token's raw logit.
    """
    u = _uniform(seed, position, step, token_offset, logits.shape[1])
    warm = (temperature > 0)[:, None]
    divisor = torch.where(warm, temperature[:, None], 1.0).double()
    perturbed = (logits.double() / divisor - torch.log(-torch.log(u))).float()
    allowed = _only_allowed(logits, token_offset, banned)
    return _rows(logits, torch.where(warm & (allowed > -torch.inf), perturbed, allowed), token_offset)


def _only_allowed(logits: Tensor, token_offset: int, banned: Sequence[int]) -> Tensor:
    """The logits with -inf in place of banned tokens and of what is not finite."""
    allowed = logits.masked_fill(~logits.isfinite(), -torch.inf)
    local = [token - token_offset for token in banned if 0 <= token - token_offset < logits.shape[1]]
    if local:
        allowed[:, local] = -torch.inf
    return allowed


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, x f32 [T, d]."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def silu_gate(x: Tensor) -> Tensor:
    """silu(gate) * up, [T, d] from [T, 2 d]: gate, then up (Shazeer, 2020: SwiGLU)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rows(logits: Tensor, scores: Tensor, token_offset: int) -> tuple[Tensor, Rows]:
    num_rows, num_tokens = logits.shape
    if num_tokens == 0:
        nothing = logits.new_full((num_rows,), -torch.inf)
        return nothing, Rows(nothing, torch.full_like(nothing, -1, dtype=torch.int64), nothing)
    score, column = scores.max(-1)
    found = score > -torch.inf
    logit = torch.where(found, logits.gather(1, column[:, None])[:, 0], -torch.inf)
    lse = logits.double().logsumexp(-1).float()
    lse = torch.where((logits == torch.inf).any(-1), torch.nan, lse)
    return score, Rows(logit, torch.where(found, column + token_offset, -1), lse)


def _mix32(x: Tensor) -> Tensor:
    """lowbias32 by C. Wellons (hash prospector) on int64 tensors that hold uint32."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def _uniform(seed: Tensor, position: Tensor, step: Tensor, token_offset: int, num_tokens: int) -> Tensor:
    """float64 [M, num_tokens] in (0, 1): (n + 1/2) / 2^23 for a hash of 23 bits n, exact in float32 too.

    Two 32-bit keys a row, each a chain of hashes over (seed low, seed high, position, step), then two rounds
    a token.
    """
    key0, key1 = torch.full_like(seed, 0x243F6A88), torch.full_like(seed, 0x85A308D3)  # digits of pi
    for word in (seed & _MASK32, (seed >> 32) & _MASK32, position & _MASK32, step & _MASK32):
        key0, key1 = _mix32(key0 ^ word), _mix32(key1 ^ word)
    token = torch.arange(token_offset, token_offset + num_tokens, device=seed.device)
    bits = _mix32((_mix32(token ^ key0[:, None]) + key1[:, None]) & _MASK32)
    return ((bits >> 9) + 0.5).double() * 2.0**-23


def combine(rows: Sequence[Rows], scores: Sequence[Tensor] | None = None) -> Rows:
    """Rows of the whole vocabulary from those of its slices, given in the order of the vocabulary.

    The largest logit wins, or the largest of `scores` when sampling; the first slice on a tie.
    """
    if len(rows) == 1:
        return rows[0]
    logit, token, lse = (torch.stack(field) for field in zip(*rows, strict=True))
    ranking = logit if scores is None else torch.stack(tuple(scores))
    winner = ranking.argmax(0, keepdim=True)
    return Rows(logit.gather(0, winner)[0], token.gather(0, winner)[0], lse.logsumexp(0))


def confidence(rows: Rows) -> Tensor:
    """Softmax probability of each row's token, f32 [M]; NaN where the row's logits are not numbers."""
    return (rows.logit - rows.lse).exp()


def select(confidence: Tensor, offsets: Tensor, rule: Tensor, value: Tensor) -> Tensor:
    """Which masked positions are unmasked, bool [M]; of each request that has any, at least one.

    confidence f32 [M]; request r owns the rows offsets[r] to offsets[r + 1], and has rule[r] and value[r].
    Its rows are ranked by falling confidence, the lowest row first on a tie, NaN after every number:

    THRESHOLD  the rows with confidence >= value, and always the first. The value is rounded to float32 first,
               as torch does in `tensor >= number`: float32(0.9) passes a threshold of 0.9.
    QUOTA      the first `value` rows: at least one, at most all.
    FACTOR     Fast-dLLM's rule (arXiv 2505.22618): the bound of rank n is 1 - value / (n + 1), in float32.
               The first always passes; those before the first that is below its bound are taken. As in its
               authors' code, when that one is the very last it is taken too.
    ALL        all rows.
    AT_LEAST + n  as THRESHOLD, but always the first n.

    Raises ValueError where offsets or a rule make no sense.
    """
    ends = offsets.tolist()
    if ends[0] != 0 or ends[-1] != len(confidence):
        raise bad_request(len(ends) - 1, offsets, rule)
    unmask = torch.zeros_like(confidence, dtype=torch.bool)
    for request, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        if not begin <= end <= len(confidence) or int(rule[request]) < THRESHOLD:
            raise bad_request(request, offsets, rule)
        rows = confidence[begin:end]
        order = torch.where(rows.isnan(), -torch.inf, rows).sort(descending=True, stable=True).indices
        num = _num_unmasked(rows[order], int(rule[request]), float(value[request]))
        unmask[begin + order[:num]] = True
    return unmask


def _num_unmasked(ranked: Tensor, rule: int, value: float) -> int:
    num_rows = len(ranked)
    if rule == ALL or num_rows == 0:
        return num_rows
    if rule == QUOTA:
        return int(min(num_rows, value)) if value >= 1 else 1
    if rule == THRESHOLD or rule >= AT_LEAST:
        num_passing = int((ranked >= torch.tensor(value, dtype=torch.float32)).sum())
        return max(1, num_passing, min(num_rows, rule - AT_LEAST))
    bound = 1 - value / torch.arange(2, num_rows + 2, dtype=torch.float64)
    passes = (ranked.cpu() >= bound.float()).tolist()
    first_below = next((n for n in range(1, num_rows) if not passes[n]), num_rows)
    return num_rows if first_below == num_rows - 1 else first_below


def bad_request(request: int, offsets: Tensor, rule: Tensor) -> ValueError:
    """The error of a `select` whose arguments fail at `request` (at their number: in the last offset)."""
    seen = f"rule {int(rule[request])}" if request < len(rule) else "the end of the offsets"
    return ValueError(
        f"select: request {request} has {seen} and offsets {offsets.tolist()}; wanted a rule from 0 to {ALL}, "
        "or AT_LEAST + n, and offsets that rise from 0 to the number of rows: check how the batch was put together"
    )
