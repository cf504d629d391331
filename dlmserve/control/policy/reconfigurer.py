"""When to ask the planner for a layout, with which question, and whether to follow its answer.

Asks every `--reconfigure-every` seconds, and sooner where the mean cap of the thresholds has fallen. Knows
nothing of how a layout is changed, nor of where plans are made.
"""

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster
from dlmserve.control.policy.events import MakePlan
from dlmserve.control.policy.plan import Plan, Problem, RequestClass, is_worthwhile, tp_layout
from dlmserve.control.policy.request import RequestState
from dlmserve.control.policy.steering import Steering
from dlmserve.control.policy.workload import Bin, WorkloadMonitor
from dlmserve.messages import Decoding

CAP_FELL = 0.05  # mean cap below the highest threshold by more than this: the layout may be the reason
SOONEST = 0.2  # but never ask before this share of the period


class Reconfigurer:
    """`plan` is the last one, for whoever wants to look at it."""

    def __init__(self, config: ServerConfig, cluster: Cluster, steering: Steering) -> None:
        self._config, self._cluster, self._steering = config, cluster, steering
        self._thresholds = sorted(config.thresholds, reverse=True)
        self._asked_at: float | None = None  # None: the first period has not begun
        self._workload = WorkloadMonitor(config.workload_window_s)
        self._decoding = Decoding()  # of the newest request
        self._now = 0.0  # when it was last called
        self.plan: Plan | None = None

    def arrived(self, now: float, request: RequestState) -> None:
        self._decoding = request.spec.decoding
        prompt = len(request.canvas) - request.output_length
        self._workload.arrived(now, prompt, request.output_length, request.spec.slo_s)

    def question(self, now: float) -> Iterator[MakePlan]:
        """To be called often; asks when it is time, and something is known of the load."""
        self._now = now
        period_s = self._config.reconfigure_every_s
        if period_s is None:
            return
        if self._asked_at is None:
            self._asked_at = now
        fallen = self._steering.mean_cap() < self._thresholds[0] - CAP_FELL
        if now < self._asked_at + period_s * (SOONEST if fallen else 1.0):
            return
        if problem := self.problem(now):
            self._asked_at = now
            yield MakePlan(problem)

    def problem(self, now: float) -> Problem | None:
        """None where no request came within the window, or no node is there."""
        # Answers end early: the rest of their output is never decoded.
        used, trend = self._steering.view.history.share_used, self._workload.trend(now)
        classes = [
            replace(each, output=used * each.output, rps=trend * each.rps)
            for each in self._workload.classes(now)
        ]
        nodes = [num for _, num in sorted(self._cluster.nodes.items())]
        degrees = [degree for degree in self._config.tp_degrees if degree <= max(nodes, default=0)]
        if not classes or not degrees:
            return None
        present = list(self._cluster.layout)
        return Problem(
            classes=classes,
            nodes=nodes,
            tp_degrees=degrees,
            thresholds=self._thresholds,
            tokens_per_step=list(self.tokens_per_step().values()),
            step_s={each: self._steering.view.costs.points(each) for each in {*degrees, *present}},
            block_length=self._decoding.block_length,
            max_num_seqs=self._config.max_num_seqs,
            kv_tokens=self._kv_tokens(),
            present=present,
            block_causal=self._decoding.block_causal,
        )

    def workload(self) -> dict[Bin, RequestClass]:
        """What came within the window, by bin."""
        return self._workload.bins(self._now)

    def tokens_per_step(self) -> dict[float, float]:
        """T_c as observed, by threshold."""
        means = self._steering.view.history.tokens_per_step(np.array(self._thresholds))
        return dict(zip(self._thresholds, means.tolist(), strict=True))

    def _kv_tokens(self) -> int | None:
        """Of one GPU; None while no instance serves, and where no K/V are kept."""
        per_gpu = [each.num_pages // each.tp_degree for each in self._cluster.serving()]
        return min(per_gpu, default=0) * self._config.page_size or None

    def answer(self, plan: Plan) -> tuple[int, ...] | None:
        """The layout to change to; None where the present one will do."""
        before, self.plan = self.plan, plan
        change = is_worthwhile(plan, tuple(self._cluster.layout), before)
        return tp_layout(plan.layout) if change else None
