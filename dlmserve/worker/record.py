"""What a step did, as arrays, and put into words: the messages that tell the head of it.

Nobody waits for the words: they are found while the next step runs, and followers never do. Knows nothing of how a
step comes about.
"""

from dataclasses import dataclass, field

import numpy as np

from dlmserve.messages import Failure, RequestStep
from dlmserve.worker.canvas import Finished, Part
from dlmserve.worker.decision import Decided
from dlmserve.worker.hidden_reader import HiddenOutlook

Alternatives = list[tuple[int, float]]  # (token, log probability), best first


@dataclass
class StepResult:
    """num_tokens: packed tokens of the step; `failed`: requests that are gone now."""

    num_tokens: int = 0
    requests: list[RequestStep] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)


@dataclass
class StepRecord:
    """Of M rows, those of part i from offsets[i] to offsets[i + 1]. Canvases and thresholds change after the step; what
    is here does not.

    columns [M]: each row's place in its request's canvas. thresholds: of each part. top: (log probabilities [n, k],
    tokens [n, k]) of each request that asked for alternatives, top_rows: its first row. outlooks [n, 2]: read at the n
    recompute steps; None: nothing was. broken: parts whose logits are not finite, which are among the failed.
    """

    num_tokens: int = 0
    released: list[int] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    offsets: np.ndarray | None = None
    columns: np.ndarray | None = None
    thresholds: list[float] = field(default_factory=list)
    top_rows: list[int] = field(default_factory=list)
    decided: Decided | None = None
    finished: dict[int, Finished] = field(default_factory=dict)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    outlooks: np.ndarray | None = None
    broken: set[int] = field(default_factory=set)

    def result(self) -> StepResult:
        return StepResult(self.num_tokens, self._steps(), self.released, self.failed)

    def _steps(self) -> list[RequestStep]:
        if self.decided is None or self.offsets is None or self.columns is None:
            return []
        chosen = self.decided.chosen
        ends = np.concatenate(([0], chosen.cumsum()))[self.offsets].tolist()  # of the unmasked rows
        masked_ends = [end - taken for end, taken in zip(self.offsets.tolist(), ends, strict=True)]
        positions, tokens = self.columns[chosen].tolist(), self.decided.tokens[chosen].tolist()
        confidences = self.decided.confidences[chosen].tolist()
        masked_confidences = self.decided.confidences[~chosen].tolist()
        top, outlooks = self._alternatives(chosen), self._outlooks()
        steps = []
        for i, part in enumerate(self.parts):
            if i in self.broken:
                continue
            mine, masked = slice(ends[i], ends[i + 1]), slice(masked_ends[i], masked_ends[i + 1])
            request = part.resident.request
            steps.append(
                RequestStep(
                    request=request,
                    recompute=part.recompute,
                    block=part.block,
                    threshold=self.thresholds[i],
                    positions=positions[mine],
                    tokens=tokens[mine],
                    confidences=confidences[mine],
                    finished=self.finished.get(request, ""),
                    top=top[mine] if part.resident.decoding.num_top else None,
                    masked_confidences=masked_confidences[masked],
                    hidden=outlooks.get(i),
                )
            )
        return steps

    def _alternatives(self, chosen: np.ndarray) -> list[Alternatives]:
        """Of each unmasked row; empty where its request did not ask."""
        if not self.top:
            return []
        found: list[Alternatives] = [[] for _ in chosen]
        for start, (values, ids) in zip(self.top_rows, self.top, strict=True):
            for row, pair in enumerate(zip(ids.tolist(), values.tolist(), strict=True), start):
                found[row] = list(zip(*pair, strict=True))
        return [found[row] for row in chosen.nonzero()[0].tolist()]

    def _outlooks(self) -> dict[int, HiddenOutlook]:
        """By part."""
        if self.outlooks is None:
            return {}
        recomputed = [i for i, part in enumerate(self.parts) if part.recompute]
        return {i: (row[0], row[1]) for i, row in zip(recomputed, self.outlooks.tolist(), strict=True)}
