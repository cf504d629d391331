"""The waiting requests in the order in which `dlmserve` serves them, with what each needs of an instance.

Whoever had started keeps its turn; then by priority; those that can't be saved last; then who must start first.
The order is made anew once in a round (view.py): those that arrive in between come after all others. Knows no
instances.
"""

from collections.abc import Callable, Iterator

import numpy as np

from dlmserve.control.policy.outlook import Outlook
from dlmserve.control.policy.remaining import Rows
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.view import View


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
        self._num_left = 0  # of them, not placed yet
        self._ordered_at = -np.inf
        self.needs, self.stays_s = np.zeros((0, 3)), np.zeros(0)

    def __len__(self) -> int:
        """Those that were not placed yet."""
        return self._num_left

    def update(self, now: float, view: View, step_s: Callable[[View, np.ndarray], np.ndarray]) -> None:
        """Looks who waits, unless that was done a moment ago and some of them still do.

        `step_s`: seconds of a step with a request of so many tokens [n], from which follows how late it may start.
        """
        if self._num_left and now < self._ordered_at + view.round_s:
            return
        outlook = self._outlook(view, view.work.rows(view.waiting.numbers()))
        rows, each_s = outlook.rows, step_s(view, outlook.step_tokens)
        order = self._order(now, view, outlook, each_s)
        stays_s = rows.at(outlook.steps, "cap") * each_s
        needs = np.stack((rows["num_pages"], rows["whole_tokens"], outlook.step_tokens), axis=1)
        self._numbers, self._ordered_at = rows.index("number")[order].tolist(), now
        self._num_left = len(self._numbers)
        self.needs, self.stays_s = needs[order], stays_s[order]

    def _order(self, now: float, view: View, outlook: Outlook, step_s: np.ndarray) -> np.ndarray:
        rows = outlook.rows
        if len(rows) == 1:
            return np.zeros(1, dtype=np.intp)
        keys = [rows["number"]]
        if self._least_slack:
            steps, fewest = rows.at(outlook.steps, "cap"), rows.at(outlook.steps, "bottom")
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
            else:
                self.placed(place)

    def placed(self, place: int) -> None:
        self.needs[place] = np.inf  # fits nowhere any more
        self._num_left -= 1

    def fitting(self, most: np.ndarray) -> np.ndarray:
        """Places of those for whom some instance may have room; `most` [3] that one has of each of `needs`."""
        return (self.needs <= most).all(axis=1).nonzero()[0]
