"""The unmasking half of a denoising step: what the ranks exchange, what comes of it, and how, in plain torch.

Owns the exchange format and the layout of a step's outcome, on any device. Knows nothing of canvases as the
worker keeps them: `canvas` is any flat tensor of token ids.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlmserve.kernels.reference import Rows, combine, confidence

# Planes of the exchange, f32. Token ids below 2^24 are exact in float32.
SCORE, LOGIT, LSE, TOKEN = range(4)
NUM_PLANES = 4
# Columns of StepOutcome.statistics, in the order of the step predictor's features.
STATISTICS = ("min", "q25", "median", "mean", "q75")
QUANTILES = (0.0, 0.25, 0.5, 0.75)


def pack(rows: Rows, score: Tensor | None = None) -> Tensor:
    """f32 [4, M]: what one rank contributes. `score` ranks the slices, the logit where it is not given."""
    return torch.stack((rows.logit if score is None else score, rows.logit, rows.lse, rows.token.float()))


def pack_whole(rows: Rows, size: int) -> Tensor:
    """f32 [size, 4, M]: the exchange of `size` ranks where each knows the rows of the whole vocabulary."""
    part = pack(rows)
    parts = part.new_full((size, *part.shape), -torch.inf)
    parts[:, TOKEN] = -1
    parts[0] = part
    return parts


def unpack(part: Tensor) -> tuple[Tensor, Rows]:
    """(score, rows) from what `pack` made of them."""
    return part[SCORE], Rows(part[LOGIT], part[TOKEN].long(), part[LSE])


@dataclass(frozen=True)
class StepOutcome:
    """What a step decided for M rows of R requests. All in one buffer, so that one copy brings it to the host.

    memory: uint8, the fields one after the other, those of 8 bytes first.
    """

    memory: Tensor
    num_rows: int
    num_requests: int

    @classmethod
    def empty(cls, num_rows: int, num_requests: int, device: torch.device | str) -> "StepOutcome":
        size = 13 * num_rows + (4 + 4 * len(STATISTICS)) * num_requests
        return cls(torch.empty(size, dtype=torch.uint8, device=device), num_rows, num_requests)

    def to(self, device: torch.device | str) -> "StepOutcome":
        return StepOutcome(self.memory.to(device), self.num_rows, self.num_requests)

    @property
    def token(self) -> Tensor:
        """i64 [M]: the most probable allowed token, or the drawn one; -1 where a row has none."""
        return self._field(0, torch.int64, self.num_rows)

    @property
    def confidence(self) -> Tensor:
        """f32 [M]: the token's softmax probability; NaN where the row's logits are not numbers."""
        return self._field(8 * self.num_rows, torch.float32, self.num_rows)

    @property
    def statistics(self) -> Tensor:
        """f32 [R, 5]: STATISTICS of each request's confidences; NaN where one is NaN or there are no rows."""
        size = self.num_requests * len(STATISTICS)
        return self._field(12 * self.num_rows, torch.float32, size).view(-1, len(STATISTICS))

    @property
    def num_left(self) -> Tensor:
        """i32 [R]: how many of each request's rows stay masked."""
        begin = 12 * self.num_rows + 4 * len(STATISTICS) * self.num_requests
        return self._field(begin, torch.int32, self.num_requests)

    @property
    def unmask(self) -> Tensor:
        """bool [M]: whether the row's token was written to the canvas."""
        begin = 12 * self.num_rows + (4 + 4 * len(STATISTICS)) * self.num_requests
        return self._field(begin, torch.bool, self.num_rows)

    def _field(self, begin: int, dtype: torch.dtype, length: int) -> Tensor:
        return self.memory[begin : begin + length * dtype.itemsize].view(dtype)


def unmask_step(
    parts: Tensor,
    offsets: Tensor,
    rule: Tensor,
    value: Tensor,
    position: Tensor,
    canvas: Tensor,
    select: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> StepOutcome:
    """Combines the ranks' parts [tp, 4, M], applies each request's rule by `select`, writes the canvas.

    A row without a token is never written: it stays masked whatever the rule says.
    """
    scores, slices = zip(*map(unpack, parts), strict=True)
    rows = combine(slices, scores)
    outcome = StepOutcome.empty(len(position), len(rule), parts.device)
    outcome.token.copy_(rows.token)
    outcome.confidence.copy_(confidence(rows))
    outcome.unmask.copy_(select(outcome.confidence, offsets, rule, value) & (rows.token >= 0))
    canvas[position[outcome.unmask]] = rows.token[outcome.unmask]
    for request, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        outcome.num_left[request] = end - begin - outcome.unmask[begin:end].sum()
        outcome.statistics[request] = _statistics(outcome.confidence[begin:end])
    return outcome


def _statistics(confidence: Tensor) -> Tensor:
    """numpy's linear quantiles, and the mean in between."""
    if len(confidence) == 0:
        return confidence.new_full((len(STATISTICS),), torch.nan)
    low, q25, median, q75 = confidence.quantile(confidence.new_tensor(QUANTILES))
    return torch.stack((low, q25, median, confidence.mean(), q75))
