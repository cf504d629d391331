"""What policies that control thresholds by SLO have in common: when Algorithms 1 and 2 run, and on what.

Algorithm 1 for the residents of an instance whose members have changed; Algorithm 2, then Algorithm 1 for
everybody, when the load or predictions have changed and the last time is a round ago (view.py): at ticks and
arrivals.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from dlmserve.control.policy.cluster import Instance
from dlmserve.control.policy.outlook import Outlook, degrees_of, residents_of
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.remaining import Rows
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.threshold import pick
from dlmserve.control.policy.view import NOTHING, Decision, Move, View


class SloPolicy(Policy, ABC):
    """Subclasses say what work is (`outlook`), who may use how much (`caps`) and who moves (`moves`, `step_moves`)."""

    known_options = {
        "drop_late": 0.0,
        "alg1": 1.0,  # each request's threshold by its own deadline
        "alg2": 1.0,  # caps by the load of the cluster
        "moves": 1.0,
        "supply": 0.9,  # share of the cluster's capacity that load control plans with
        "caution": 1.0,  # predicted times count so many times over when they are held against deadlines,
        "reserve": 0.0,  # and deadlines come so much sooner, as a share of the SLO
    }
    wants_predictions = controls_thresholds = True
    _controlled_at = -np.inf

    def outlook(self, view: View, rows: Rows) -> Outlook:
        return Outlook(view, rows)

    @abstractmethod
    def caps(self, now: float, view: View) -> np.ndarray:
        """The highest threshold each request may use, int [n], for all rows."""

    def survey(self, residents: Outlook) -> None:
        """All residents as load control finds them, for what has to do without in between."""

    def moves(self, now: float, view: View) -> Iterable[Move]:
        """Considered with load control."""
        return ()

    def step_moves(self, view: View) -> Iterable[Move]:
        """Considered when an instance has ended a step."""
        return ()

    def refreshes(self, view: View) -> dict[int, int]:
        """New refresh_blocks, by request."""
        return {}

    def level(self, now: float, request: RequestState, instance: Instance, view: View) -> int:
        """The cap: Algorithm 1 runs for the whole instance once the request is on it."""
        return int(view.work.get(request.number, "cap"))

    def _slack_s(self, now: float, outlook: Outlook) -> np.ndarray:
        slack_s, reserve = outlook.slack_s(now), self.options["reserve"]
        if not reserve:
            return slack_s
        slo_s = outlook.rows["slo_s"]
        return slack_s - reserve * np.where(np.isfinite(slo_s), slo_s, 0.0)

    def decide(self, now: float, view: View) -> Decision:
        moves = tuple(self.step_moves(view)) if self.options["moves"] else ()
        if not view.changed_slots or not len(rows := residents_of(view, view.changed_slots)):
            return Decision(moves=moves) if moves else NOTHING
        return Decision(self._levels(now, self.outlook(view, rows), rows["cap"]), moves=moves)

    def control(self, now: float, view: View) -> Decision | None:
        if now < self._controlled_at + view.round_s or not len(view.work):
            return None
        moves = tuple(self.moves(now, view)) if self.options["moves"] else ()
        if not view.load_changed:
            return self.decide(now, view)._replace(moves=moves)
        self._controlled_at = now
        residents = np.flatnonzero(view.work.rows()["slot"] >= 0)
        outlook = self.outlook(view, view.work.take(residents))
        self.survey(outlook)
        caps = self.caps(now, view) if self.options["alg2"] else view.work.rows().index("top")
        view.pace.expect(degrees_of(view), outlook.batches(), view.costs)
        levels = self._levels(now, outlook, caps[residents])
        return Decision(levels, caps, self.refreshes(view), moves)

    def _levels(self, now: float, outlook: Outlook, caps: np.ndarray) -> dict[int, int]:
        """The thresholds that change, by request; of residents."""
        rows, levels = outlook.rows, caps
        if self.options["alg1"]:
            time_s = self.options["caution"] * outlook.time_s(outlook.batches())
            slack_s, savable = self._slack_s(now, outlook), outlook.savable(now)
            levels = pick(time_s, slack_s, caps, rows["bottom"], savable)
        changed = (levels != rows["current"]).nonzero()[0]
        numbers, levels = rows["number"][changed].astype(int), levels[changed].astype(int)
        return dict(zip(numbers.tolist(), levels.tolist(), strict=True))
