"""Turns what the head sees and does into metrics, and the cluster's books into the answer of GET /v1/cluster.

Reads the scheduler, changes nothing.
"""

from dlmserve.config import ServerConfig
from dlmserve.control.metrics import Metrics
from dlmserve.control.policy.cluster import Cluster, Instance, Rank
from dlmserve.control.policy.events import Action, Deliver, Drop, Fail, Finish, Reject
from dlmserve.control.policy.plan import Plan, tp_layout
from dlmserve.control.policy.reconfigurer import Reconfigurer
from dlmserve.control.policy.request import StepUpdate, Summary
from dlmserve.control.policy.scheduler import Scheduler
from dlmserve.messages import StepReport


class Observer:
    def __init__(self, scheduler: Scheduler, config: ServerConfig, metrics: Metrics) -> None:
        self._scheduler, self._config, self._metrics = scheduler, config, metrics
        self._num_migrations_told = self._num_reconfigurations_told = 0
        metrics.on_render = self._read_gauges

    # ---- as things happen

    def on_report(self, report: StepReport) -> None:
        """To be called before the scheduler hears of it: it forgets requests that are finished."""
        instance = self._scheduler.cluster.instances.get(report.instance)
        if instance is None or not report.requests:
            return
        kind = "recompute" if any(step.recompute for step in report.requests) else "cache"
        self._metrics.step_seconds.labels(kind, instance.tp_degree).observe(report.duration_s)
        self._metrics.step_idle_seconds.observe(report.idle_s)
        for step in report.requests:
            request = self._scheduler.requests.get(step.request)
            if request and request.spec.decoding.rule == "threshold":
                self._metrics.threshold_used.observe(step.threshold)

    def on_action(self, action: Action) -> None:
        match action:
            case Deliver(_, update, age_s):
                self._on_step(update, age_s)
            case Finish(_, reason, summary):
                self._metrics.requests_total.labels(reason).inc()
                self._on_finish(summary)
            case Drop(_, outcome, summary):
                self._metrics.requests_total.labels(outcome).inc()
                if outcome == "stop":
                    self._on_finish(summary)
            case Fail():
                self._metrics.requests_total.labels("error").inc()
            case Reject():
                self._metrics.requests_total.labels("rejected").inc()

    def _on_step(self, update: StepUpdate, age_s: float) -> None:
        metrics = self._metrics
        if update.step == 1:  # every step unmasks at least one position
            metrics.first_unmask_seconds.observe(age_s)
        metrics.steps_total.labels("recompute" if update.did.recompute else "cache").inc()
        metrics.tokens_unmasked_total.inc(len(update.did.positions))

    def _on_finish(self, summary: Summary) -> None:
        self._metrics.request_seconds.observe(summary.latency_s)
        if summary.slo_met is not None:
            self._metrics.slo_requests_total.inc()
            self._metrics.slo_met_total.inc(summary.slo_met)

    # ---- when somebody asks

    def _read_gauges(self) -> None:
        metrics, scheduler = self._metrics, self._scheduler
        metrics.requests_waiting.set(scheduler.num_waiting)
        metrics.requests_running.set(len(scheduler.requests) - scheduler.num_waiting)
        metrics.threshold_cap.set(scheduler.steering.mean_cap())
        metrics.predictor_error_ratio.set(scheduler.steering.errors.ratio)
        metrics.migrations_total.inc(scheduler.num_migrations - self._num_migrations_told)
        self._num_migrations_told = scheduler.num_migrations
        metrics.reconfigurations_total.inc(scheduler.num_reconfigurations - self._num_reconfigurations_told)
        self._num_reconfigurations_told = scheduler.num_reconfigurations
        self._read_workload()
        for gauge in (metrics.kv_pages, metrics.kv_pages_in_use, metrics.instance_requests):
            gauge.clear()
        for instance in scheduler.cluster.serving():
            metrics.kv_pages.labels(instance.name).set(instance.num_pages)
            metrics.kv_pages_in_use.labels(instance.name).set(instance.num_pages_reserved)
            metrics.instance_requests.labels(instance.name, instance.tp_degree).set(len(instance.residents))

    def _read_workload(self) -> None:
        metrics, reconfigurer = self._metrics, self._scheduler.reconfigurer
        metrics.workload_rps.clear()
        for (prompt, output), each in reconfigurer.workload().items():
            metrics.workload_rps.labels(prompt, output).set(each.rps)
        for threshold, tokens in reconfigurer.tokens_per_step().items():
            metrics.tokens_per_step.labels(threshold).set(tokens)

    def describe(self) -> dict:
        """Nodes, devices, instances, the wanted layout and the queue, ready for JSON."""
        cluster = self._scheduler.cluster
        return {
            "model": self._config.model,
            "policy": self._config.policy,
            "layout": cluster.layout,
            "changing": self._scheduler.transition.active,
            "nodes": [{"node": node, "num_devices": count} for node, count in sorted(cluster.nodes.items())],
            "devices": [_describe_rank(rank) for _, rank in sorted(cluster.ranks.items())],
            "instances": [_describe_instance(instance) for instance in cluster.instances.values()],
            "failures": _describe_failures(cluster),
            "workload": _describe_workload(self._scheduler.reconfigurer),
            "plan": _describe_plan(self._scheduler.reconfigurer.plan),
            "profile": self._scheduler.steering.view.costs.profile(),
            "threshold_cap": self._scheduler.steering.mean_cap(),
            "running": len(self._scheduler.requests) - self._scheduler.num_waiting,
            "waiting": self._scheduler.num_waiting,
        }


def _describe_workload(reconfigurer: Reconfigurer) -> dict:
    return {
        "classes": [
            {"prompt": each.prompt, "output": each.output, "rps": each.rps, "slo_s": each.slo_s}
            for each in reconfigurer.workload().values()
        ],
        "tokens_per_step": {str(g): tokens for g, tokens in reconfigurer.tokens_per_step().items()},
    }


def _describe_plan(plan: Plan | None) -> dict | None:
    """The last one; the server follows it only where that pays."""
    if plan is None:
        return None
    outcome = plan.outcome
    return {
        "layout": tp_layout(plan.layout),
        "status": plan.status,
        "reason": plan.reason or None,
        "mean_threshold": outcome and outcome.mean_threshold,
        "latency_s": outcome and outcome.latency_s,
        "solve_s": plan.solve_s,
    }


def _describe_rank(rank: Rank) -> dict:
    return {
        "node": rank.id.node,
        "device": rank.id.device,
        "generation": rank.id.generation,
        "pid": rank.pid,
        "state": rank.state,
        "instance": rank.instance if rank.state == "busy" else None,
    }


def _describe_instance(instance: Instance) -> dict:
    return {
        "name": instance.name,
        "state": "draining" if instance.draining else "serving" if instance.serving else "forming",
        "tp_degree": instance.tp_degree,
        "node": instance.ranks[0].node,
        "devices": [id.device for id in instance.ranks],
        "requests": len(instance.residents),
        "max_requests": instance.max_num_seqs,
        "tokens": instance.num_tokens,
        "kv_pages": instance.num_pages,
        "kv_pages_in_use": instance.num_pages_reserved,
    }


def _describe_failures(cluster: Cluster) -> list[dict]:
    """Slots whose last formation failed."""
    return [
        {"tp_degree": slot.tp_degree, "failures_in_a_row": slot.num_failures, "error": slot.error}
        for slot in cluster.slots
        if slot.num_failures
    ]
