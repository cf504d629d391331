"""Between the scheduler's books and the policy: what the policy sees, and what becomes of its decisions.

Keeps the remaining work, the cost model and the history up to date, asks for predictions when they are due,
and turns a Decision into actions. Decides nothing itself; owns no request's place.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster, Instance
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.events import Action, Predict, Predicted, RankFormed, Send
from dlmserve.control.policy.pace import Pace
from dlmserve.control.policy.policy import Policy
from dlmserve.control.policy.predictions import HistoricalAverage
from dlmserve.control.policy.remaining import STAYING, WAITING, RemainingWork
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.stays import Stays
from dlmserve.control.policy.view import View
from dlmserve.control.policy.waiting import WaitingQueue
from dlmserve.messages import Release, RequestStep, SetRefresh, SetThreshold, StepReport

# Tokens unmasked between two predictions: the most whose error is within 5% of predicting at every token.
REFRESH_TOKENS = 8


class Steering:
    """`asks`: predictions come from outside, by Predict and Predicted; otherwise the history gives them."""

    def __init__(
        self,
        config: ServerConfig,
        policy: Policy,
        costs: CostModel,
        cluster: Cluster,
        requests: dict[int, RequestState],
        waiting: WaitingQueue,
        asks: bool,
    ) -> None:
        self._policy, self._requests = policy, requests
        self._asks = asks and policy.wants_predictions
        self.view = View(
            cluster=cluster,
            requests=requests,
            work=RemainingWork(config.thresholds),
            costs=costs,
            history=HistoricalAverage(),
            pace=Pace(),
            stays=Stays(),
            waiting=waiting,
        )
        self.errors = PredictionErrors()
        self._due: dict[int, RequestState] = {}  # to be predicted
        self._predicted_at = -np.inf

    def formed(self, event: RankFormed) -> None:
        """A new instance's step times count where none of its TP degree are known: later ones are corrected."""
        instance = self.view.cluster.instances.get(event.instance)
        if event.step_times and instance and not self.view.costs.knows(instance.tp_degree):
            self.view.costs.learn(instance.tp_degree, event.step_times, "measured")

    # ---- what happens to requests

    def arrived(self, request: RequestState) -> None:
        usual = self.view.history.steps_of_new(request.output_length, self.view.work.thresholds)
        self.view.work.add(request, usual)
        self.view.load_changed = True
        self._make_due([request])

    def ended(self, request: RequestState, finished_at: float | None) -> None:
        """None: it was given up."""
        self.view.work.remove(request.number)
        self._due.pop(request.number, None)
        self.view.load_changed = True
        self.view.stays.ended(request.number, finished_at)
        if finished_at is not None:
            self.view.history.observe_finish(request.num_unmasked / request.output_length, request.steps)
            self.errors.finished(request)
        self.errors.forget(request.number)

    def placed(self, request: RequestState, instance: Instance) -> None:
        self.view.work.set(request.number, "slot", instance.slot.index)
        self.view.changed_slots.add(instance.slot.index)

    def left(self, request: RequestState, instance: Instance) -> None:
        """It is resident no more: finished, moved, or its instance is lost."""
        work = self.view.work
        work.set(request.number, "slot", WAITING)
        work.set(request.number, "going_to", STAYING)
        work.set(request.number, "recomputes", request.recomputes_left)
        self.view.moving.discard(request.number)
        self.view.changed_slots.add(instance.slot.index)

    def stepped(
        self, report: StepReport, instance: Instance, steps: list[tuple[RequestState, RequestStep]]
    ) -> None:
        """`steps`: those of the report that have been applied to their requests."""
        if report.num_tokens:
            step_s = report.duration_s + report.idle_s
            num_requests = len(report.requests)
            self.view.costs.observe(instance.tp_degree, report.num_tokens, num_requests, step_s)
            self.view.pace.stepped(instance.slot.index, step_s)
        self.view.stepped_slots.add(instance.slot.index)
        live, due = [], []
        seen: dict[float, list[int]] = {}  # tokens that they unmasked, by threshold
        for request, step in steps:
            if request.spec.decoding.rule == "threshold":
                seen.setdefault(step.threshold, []).append(len(step.positions))
            if not step.finished:
                live.append(request)
                if request.num_unmasked - request.num_unmasked_at_refresh >= REFRESH_TOKENS:
                    due.append(request)
        for threshold, nums in seen.items():
            self.view.history.observe_steps(threshold, len(nums), sum(nums))
        self.view.work.proceed(live)
        self._make_due(due)

    # ---- predictions

    def _make_due(self, requests: Iterable[RequestState]) -> None:
        if self._policy.wants_predictions:
            for request in requests:
                request.num_unmasked_at_refresh = request.num_unmasked
                self._due[request.number] = request

    def _predict_due(self, now: float) -> Iterator[Action]:
        """All that are due in one batch."""
        if not self._due or now < self._predicted_at + self.view.round_s:
            return
        self._predicted_at = now
        self.view.pace_rounds(self._policy.round_share)
        requests = list(self._due.values())
        self._due.clear()
        if self._asks:
            yield Predict(tuple(request.progress() for request in requests))
        else:
            self._take(requests, [request.steps for request in requests], self._usual_steps(requests))

    def predicted(self, event: Predicted) -> None:
        """Those that are over by now are left out."""
        live = [i for i, progress in enumerate(event.progress) if progress.request in self._requests]
        if live:
            requests = [self._requests[event.progress[i].request] for i in live]
            self._take(requests, [event.progress[i].steps for i in live], event.steps[live])

    def _take(self, requests: list[RequestState], at_steps: list[int], steps_left: np.ndarray) -> None:
        self.view.work.predict(requests, at_steps, steps_left)
        self.view.load_changed = True
        predicted = self.view.work.rows([request.number for request in requests]).at(steps_left, "current")
        for request, at_step, steps in zip(requests, at_steps, predicted.tolist(), strict=True):
            self.errors.predicted(request.number, at_step, steps)

    def _usual_steps(self, requests: list[RequestState]) -> np.ndarray:
        lengths = np.array([request.output_length for request in requests], dtype=float)
        unmasked = np.array([request.num_unmasked for request in requests], dtype=float)
        steps = np.array([request.steps for request in requests], dtype=float)
        return self.view.history.steps_left(lengths, unmasked, steps, self.view.work.thresholds)

    # ---- decisions

    def start_at(self, now: float, request: RequestState, instance: Instance) -> None:
        """Sets what a request that is about to be admitted starts with."""
        request.refresh_blocks = self._policy.refresh_blocks(request)
        self.view.work.set(request.number, "refresh_blocks", request.refresh_blocks)
        if not request.spec.pinned:
            self._set_level(request, self._policy.level(now, request, instance, self.view))

    def decide(self, now: float, may_control: bool) -> Iterator[Action]:
        """Performs what the policy wants done; says nothing that an instance knows already."""
        if may_control:
            yield from self._predict_due(now)
        decision = self._policy.control(now, self.view) if may_control else None
        decision = decision or self._policy.decide(now, self.view)
        self.view.changed_slots.clear()
        self.view.stepped_slots.clear()
        if decision.caps is not None:
            self.view.work.rows()["cap"][:] = decision.caps
            self.view.load_changed = False
        for number, level in decision.thresholds.items():
            request = self._requests[number]
            before = request.threshold
            self._set_level(request, level)
            if request.instance and request.threshold != before:
                yield Send(request.instance, SetThreshold(number, request.threshold))
        for number, refresh_blocks in decision.refresh_blocks.items():
            request = self._requests[number]
            request.refresh_blocks = refresh_blocks
            self.view.work.set(number, "refresh_blocks", refresh_blocks)
            if request.instance:
                yield Send(request.instance, SetRefresh(number, refresh_blocks))
        for number, target in decision.moves:
            request = self._requests[number]
            if request.instance and request.moving_to is None:
                request.moving_to = target
                self.view.moving.add(number)
                slot = self.view.cluster.instances[target].slot.index
                self.view.work.set(number, "going_to", slot)
                self.view.work.set(number, "moved_at", now)
                yield Send(request.instance, Release(number))

    def _set_level(self, request: RequestState, level: int) -> None:
        work = self.view.work
        request.threshold = max(float(work.thresholds[level]), request.spec.min_threshold or 0.0)
        work.set(request.number, "current", level)

    def cap_of(self, request: RequestState) -> float | None:
        """The highest threshold that load control allows it; None where nothing controls it."""
        if request.spec.pinned or not self._policy.controls_thresholds:
            return None
        cap = int(self.view.work.get(request.number, "cap"))
        return max(float(self.view.work.thresholds[cap]), request.spec.min_threshold or 0.0)

    def mean_cap(self) -> float:
        """Of all live requests; the highest candidate where there are none."""
        work = self.view.work
        return float(work.thresholds[work.rows().index("cap")].mean() if len(work) else work.thresholds[0])


class PredictionErrors:
    """How far predictions were off: sum of |predicted - actual| over sum of actual, over recent requests."""

    def __init__(self) -> None:
        self._open: dict[int, list[tuple[int, float]]] = {}  # by request: (at step, steps then predicted)
        self._wrong, self._actual = 0.0, 0.0

    @property
    def ratio(self) -> float:
        """0 before any request with predictions has finished."""
        return self._wrong / self._actual if self._actual else 0.0

    def predicted(self, request: int, at_step: int, steps: float) -> None:
        self._open.setdefault(request, []).append((at_step, steps))

    def finished(self, request: RequestState) -> None:
        fade = 0.99
        self._wrong, self._actual = fade * self._wrong, fade * self._actual
        for at_step, steps in self._open.pop(request.number, []):
            actual = request.steps - at_step
            self._wrong += abs(steps - actual)
            self._actual += actual

    def forget(self, request: int) -> None:
        self._open.pop(request, None)
