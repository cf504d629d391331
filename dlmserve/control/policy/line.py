"""The waiting requests in the order in which `dlmserve` serves them, with what each needs of an instance.

Whoever had started keeps its turn; then by priority; those that can't be saved last; then who must start first.
The order is made anew every REORDER_S: in between, those that arrive stand at its end. Knows no instances.
"""

from collections.abc import Callable, Iterator

import numpy as np

from dlmserve.control.policy.outlook import Outlook
from dlmserve.control.policy.remaining import Rows
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.view import View

REORDER_S = 0.1


class Line:
    """`needs` [n, 3]: KV pages, tokens of the canvas, tokens of a step, of those in line; `stays_s` [n]: seconds
    from their start to their end, as far as their steps alone tell.

    `slack_s`: time to the deadlines, as the policy counts it, from now and an outlook.
    """

    def __init__(
        self,
        outlook: Callable[[View, Rows], Outlook],
        slack_s: Callable[[float, Outlook], np.ndarray],
        least_slack: bool,
    ) -> None:
        self._outlook, self._slack_s, self._least_slack = outlook, slack_s, least_slack
        self._numbers: list[int] = []
        self._known: set[int] = set()
        self._ordered_at = -np.inf
        self.needs, self.stays_s = np.zeros((0, 3)), np.zeros(0)

    def update(self, now: float, view: View, step_s: Callable[[View, np.ndarray], np.ndarray]) -> None:
        """`step_s`: seconds of a step with a request of so many tokens [n], from which follows how late it may
        start."""
        if now >= self._ordered_at + REORDER_S:
            self._numbers, self._ordered_at = [], now
            self.needs, self.stays_s = np.zeros((0, 3)), np.zeros(0)
            self._known.clear()
        new = [entry.number for entry in view.waiting.entries() if entry.number not in self._known]
        if new:
            outlook = self._outlook(view, view.work.rows(new))
            rows, each_s = outlook.rows, step_s(view, outlook.step_tokens)
            order = self._order(now, view, outlook, each_s)
            stays_s = outlook.steps[np.arange(len(rows)), rows.index("cap")] * each_s
            needs = np.stack((rows["num_pages"], rows["whole_tokens"], outlook.step_tokens), axis=1)
            self._numbers += rows.index("number")[order].tolist()
            self.needs = np.concatenate((self.needs, needs[order]))
            self.stays_s = np.concatenate((self.stays_s, stays_s[order]))
            self._known.update(new)

    def _order(self, now: float, view: View, outlook: Outlook, step_s: np.ndarray) -> np.ndarray:
        rows = outlook.rows
        keys = [rows["number"]]
        if self._least_slack:
            at = np.arange(len(rows))
            steps, fewest = outlook.steps[at, rows.index("cap")], outlook.steps[at, rows.index("bottom")]
            # Beside the others, not only alone, and with what usually comes in between.
            in_time = view.stays.high * fewest * step_s <= self._slack_s(now, outlook)
            keys += [rows["deadline"] - steps * step_s, ~(outlook.savable(now) & in_time)]
        return np.lexsort((*keys, -rows["priority"], rows["steps"] == 0))

    def waiting(self, view: View, places: np.ndarray) -> Iterator[tuple[int, RequestState]]:
        """(place, request) of those among these places that still wait."""
        for place in places.tolist():
            request = view.requests.get(self._numbers[place])
            if request and request.instance is None:
                yield place, request

    def placed(self, place: int) -> None:
        self.needs[place] = np.inf  # fits nowhere any more

    def fitting(self, free: np.ndarray) -> np.ndarray:
        """Places of those for whom some instance may have room; `free` [instances, 3] as `needs`."""
        return np.flatnonzero((self.needs <= free.max(axis=0, initial=-1.0)).all(axis=1))
