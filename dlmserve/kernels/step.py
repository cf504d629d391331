"""The unmasking half of a denoising step: what the ranks exchange, what comes of it, and how, in plain torch.

Owns the exchange format and the layout of a step's outcome, on any device. Knows nothing of canvases as the
worker keeps them: `canvas` is any flat tensor of token ids.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
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
        return self._field("token", torch.int64, self.num_rows)

    @property
    def confidence(self) -> Tensor:
        """f32 [M]: the token's softmax probability; NaN where the row's logits are not numbers."""
        return self._field("confidence", torch.float32, self.num_rows)

    @property
    def statistics(self) -> Tensor:
        """f32 [R, 5]: STATISTICS of each request's confidences; NaN where one is NaN or there are no rows."""
        size = self.num_requests * len(STATISTICS)
        return self._field("statistics", torch.float32, size).view(-1, len(STATISTICS))

    @property
    def num_left(self) -> Tensor:
        """i32 [R]: how many of each request's rows stay masked."""
        return self._field("num_left", torch.int32, self.num_requests)

    @property
    def unmask(self) -> Tensor:
        """bool [M]: whether the row's token was written to the canvas."""
        return self._field("unmask", torch.bool, self.num_rows)

    @property
    def begins(self) -> dict[str, int]:
        """The byte of `memory` that each field begins at."""
        return _begins(self.num_rows, self.num_requests)

    def _field(self, name: str, dtype: torch.dtype, length: int) -> Tensor:
        begin = self.begins[name]
        return self.memory[begin : begin + length * dtype.itemsize].view(dtype)


def _begins(num_rows: int, num_requests: int) -> dict[str, int]:
    left = 12 * num_rows + 4 * len(STATISTICS) * num_requests
    return {
        "token": 0,
        "confidence": 8 * num_rows,
        "statistics": 12 * num_rows,
        "num_left": left,
        "unmask": left + 4 * num_requests,
    }


def outcome_arrays(
    memory: np.ndarray, num_rows: int, num_requests: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """token, confidence and unmask of a StepOutcome whose memory is a host's array."""
    begins = _begins(num_rows, num_requests)
    return (
        memory[: 8 * num_rows].view(np.int64),
        memory[begins["confidence"] : begins["statistics"]].view(np.float32),
        memory[begins["unmask"] :].view(np.bool_),
    )


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
