"""The server's Prometheus metrics, on a registry of their own.

Owns names, labels and buckets. Knows nothing of where the numbers come from: counters and histograms are
fed as things happen, gauges are read when somebody asks (`on_render`).
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
IDLE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)
THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


class Metrics:
    """One attribute per metric, named as it is exported without the prefix `dlmserve_`."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.on_render: Callable[[], None] = lambda: None
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dlmserve_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"dlmserve_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"dlmserve_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests_running = gauge("requests_running", "Requests resident on an instance")
        self.requests_waiting = gauge("requests_waiting", "Requests in the waiting queue")
        self.requests_total = counter("requests", "Requests by outcome", "outcome")
        self.request_seconds = histogram("request_seconds", "Arrival to last token", REQUEST_S)
        self.first_unmask_seconds = histogram("first_unmask_seconds", "Arrival to first token", REQUEST_S)
        self.slo_requests_total = counter("slo_requests", "Finished requests that had a latency SLO")
        self.slo_met_total = counter("slo_met", "Finished requests that met their latency SLO")

        self.steps_total = counter("steps", "Denoising steps, counted per request", "kind")
        self.step_seconds = histogram(
            "step_seconds",
            "Duration of an instance's step; recompute: any request in it",
            STEP_S,
            "kind",
            "tp_degree",
        )
        self.step_idle_seconds = histogram(
            "step_idle_seconds", "Between two steps of a busy instance", IDLE_S
        )
        self.tokens_unmasked_total = counter("tokens_unmasked", "Positions unmasked")
        self.threshold_used = histogram("threshold_used", "Threshold of a request's step", THRESHOLDS)
        self.threshold_cap = gauge(
            "threshold_cap", "Highest threshold that load control allows, mean of the live requests"
        )

        self.kv_pages = gauge("kv_pages", "KV pages of an instance", "instance")
        self.kv_pages_in_use = gauge("kv_pages_in_use", "KV pages held by requests", "instance")
        self.instance_requests = gauge(
            "instance_requests", "Requests resident on an instance", "instance", "tp_degree"
        )
        self.predictor_error_ratio = gauge("predictor_error_ratio", "Step predictor: absolute error / steps")
        self.migrations_total = counter("migrations", "Requests moved to another instance")
        self.workload_rps = gauge(
            "workload_rps", "Requests a second, by most prompt and output tokens", "prompt", "output"
        )
        self.tokens_per_step = gauge("tokens_per_step", "Tokens unmasked in a step, as of late", "threshold")
        self.reconfigurations_total = counter("reconfigurations", "Changes of the layout")
        self.rank_restarts_total = counter("rank_restarts", "Rank processes that were lost")

    def render(self) -> bytes:
        """The text format of `content_type`."""
        self.on_render()
        return generate_latest(self._registry)
