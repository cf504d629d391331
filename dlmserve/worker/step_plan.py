"""A step before it runs: who takes part, where their candidates are, and which of those are masked now.

A plan holds as long as each of its requests stays in its block, so it is made while the step before runs, and used
again and again. Only what depends on the canvases is looked up for each step: `masked`. Numbers only.
"""

from typing import NamedTuple

import numpy as np

from dlmserve.worker import decision
from dlmserve.worker.canvas import Part, Resident
from dlmserve.worker.decision import Rules
from dlmserve.worker.runner import Placement
from dlmserve.worker.sampling import RowGroup


class Masked(NamedTuple):
    """The masked candidates of a step. at [M]: their indices in the plan's arrays; those of part i are
    at[offsets[i]] .. at[offsets[i + 1] - 1].
    """

    at: np.ndarray
    offsets: np.ndarray

    @property
    def counts(self) -> list[int]:
        return (self.offsets[1:] - self.offsets[:-1]).tolist()

    def parts_of(self, rows: np.ndarray) -> list[int]:
        """The part that each of some of the M rows belongs to."""
        return (self.offsets.searchsorted(rows, side="right") - 1).tolist()


class StepPlan:
    """Arrays over the candidates of all parts, part by part: `columns` of their own canvases, `places` in the flat
    array of canvases, `rows` of the batch that hold the hidden states to draw them from.

    num_tokens: packed tokens of the step. `rules`: as of now; None: to be looked up again. `watched`: whether some
    request may be finished while its block has masks left.
    """

    def __init__(self, parts: list[Part], placement: Placement, shifted: bool) -> None:
        """Parts in ascending order of their spans, which are those of `placement`."""
        self.parts, self.placement = parts, placement
        spans = placement.spans
        self.num_tokens = sum(span.end - span.start for span in spans)
        self.decodings = [part.resident.decoding for part in parts]
        self.is_greedy = all(each.temperature == 0 and each.num_top == 0 for each in self.decodings)
        self.has_quotas = any(each.has_quota for each in self.decodings)
        self.rules: Rules | None = None
        self.watched = False

        firsts = np.array([part.first for part in parts])
        lengths = np.array([part.end for part in parts]) - firsts
        self._bounds = np.concatenate(([0], lengths.cumsum()))
        whose = np.repeat(np.arange(len(parts)), lengths)
        self.columns = np.arange(len(whose)) + (firsts - self._bounds[:-1])[whose]
        self.places = self.columns + np.array([span.place for span in spans])[whose]
        # With shifted logits a column is drawn from the state of the one before.
        sources = np.maximum(self.columns - 1, 0) if shifted else self.columns
        self.rows = sources + (placement.starts - np.array([span.start for span in spans]))[whose]

    @property
    def repeats(self) -> bool:
        """Whether it is the next step's plan as well, while each request stays in its block."""
        return not any(part.begins for part in self.parts)

    def masked(self, canvases: np.ndarray, mask_id: np.ndarray) -> Masked:
        """`mask_id` i64 []."""
        at = (canvases[self.places] == mask_id).nonzero()[0]
        return Masked(at, at.searchsorted(self._bounds))

    def to_look_at(self, masked: Masked) -> list[Resident]:
        """Who may be through with its block or its answer: all others are not."""
        residents = (part.resident for part in self.parts)
        return [
            r for r, count in zip(residents, masked.counts, strict=True) if not count or r.may_end_in_block
        ]

    def refresh(self) -> None:
        """What changes from step to step though nobody moves. While the step before runs."""
        self.watched = any(part.resident.may_end_in_block for part in self.parts)
        if self.has_quotas:
            self.rules = None
        self.current_rules()

    def current_rules(self) -> Rules:
        if self.rules is None:
            self.rules = decision.rules(self.parts)
        return self.rules

    def row_groups(self, masked: Masked) -> list[RowGroup]:
        """How each request's rows are drawn; none where all are greedy."""
        if self.is_greedy:
            return []
        offsets, columns = masked.offsets.tolist(), self.columns[masked.at]
        return [
            RowGroup(start, end, columns[start:end], part.resident.steps_done, part.resident.decoding)
            for part, start, end in zip(self.parts, offsets, offsets[1:], strict=False)
        ]
