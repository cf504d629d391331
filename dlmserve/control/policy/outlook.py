"""What the remaining work means on the cluster: batches, step times, time to the end, and who can be saved.

A snapshot: computed from rows and the cost model when it is asked for. Decides nothing.
"""

import copy
from collections.abc import Iterable

import numpy as np

from dlmserve.control.policy.remaining import Rows
from dlmserve.control.policy.threshold import OPTIMISM
from dlmserve.control.policy.view import View


class Outlook:
    """Of some rows, each at all thresholds (n rows, T thresholds).

    `tokens_per_step` [T] makes it EOS-aware: blocks that the predicted steps leave no time for don't count.
    `refresh_blocks` asks what if all recomputed the whole canvas only every so many blocks.
    """

    def __init__(
        self,
        view: View,
        rows: Rows,
        tokens_per_step: np.ndarray | None = None,
        refresh_blocks: float | None = None,
    ) -> None:
        self._view, self.rows = view, rows
        self.steps = rows.steps_left()
        per_block = None if tokens_per_step is None else rows["block_length"][:, None] / tokens_per_step
        self.recomputes = rows.recomputes_left(self.steps, per_block)
        self._count_tokens(rows["refresh_blocks"] if refresh_blocks is None else refresh_blocks)

    def _count_tokens(self, refresh_blocks: np.ndarray | float) -> None:
        each = self.rows.recompute_tokens(refresh_blocks)
        self.tokens = self.rows.tokens_left(self.steps, self.recomputes, each)

    def with_refresh(self, refresh_blocks: float) -> "Outlook":
        """The same if all recomputed the whole canvas only every so many blocks."""
        other = copy.copy(self)
        other._count_tokens(refresh_blocks)
        return other

    @property
    def step_tokens(self) -> np.ndarray:
        """Mean tokens per step of each row at its present threshold, float [n]: its share of a batch."""
        return self.rows.at(self.tokens, "current") / self.rows.at(self.steps, "current")

    def batches(self) -> np.ndarray:
        """Expected packed tokens of a step, float [slots]; of the residents among the rows."""
        slots, tokens = self.rows.index("slot"), self.step_tokens
        resident = slots >= 0
        num_slots = len(self._view.cluster.slots)
        return np.bincount(slots[resident], tokens[resident], minlength=num_slots)

    def time_s(self, batches: np.ndarray) -> np.ndarray:
        """Seconds to the end in a batch of the present size, float [n, T]; of residents."""
        step_s = step_times(self._view, batches) * self._view.pace.ratios(degrees_of(self._view))
        return self.steps * step_s[self.rows.index("slot")][:, None]

    def slack_s(self, now: float) -> np.ndarray:
        """Until the deadline, float [n]; infinite without one."""
        return self.rows["deadline"] - now

    def savable(self, now: float) -> np.ndarray:
        """Whether the deadline can be kept at best (lowest threshold, alone, fastest instance); bool [n]."""
        steps = self.rows.at(self.steps, "bottom")
        alone = self.rows.at(self.tokens, "bottom") / steps
        degrees = set(self._view.cluster.layout)
        step_s = self._view.costs.step_s_many(degrees.pop(), alone)
        for degree in degrees:
            step_s = np.minimum(step_s, self._view.costs.step_s_many(degree, alone))
        return OPTIMISM * steps * step_s <= self.slack_s(now)


def step_times(view: View, batches: np.ndarray) -> np.ndarray:
    """Seconds of a step of each slot's instance at these packed tokens, float [slots]."""
    return view.costs.step_s_each(degrees_of(view), batches)


def degrees_of(view: View) -> list[int]:
    """TP degree of each slot."""
    return [slot.tp_degree for slot in view.cluster.slots]


def residents_of(view: View, slots: Iterable[int]) -> Rows:
    """The rows of the requests on these slots' instances."""
    names = [view.cluster.slots[slot].instance for slot in slots]
    instances = [view.cluster.instances[name] for name in names if name]
    return view.work.rows([number for instance in instances for number in instance.residents])


def all_residents(view: View) -> Rows:
    return view.work.take(np.flatnonzero(view.work.rows()["slot"] >= 0))
