"""What /metrics promises."""

from dlmserve.control.metrics import Metrics

NAMES = """
    requests_running requests_waiting requests_total request_seconds slo_requests_total slo_met_total
    first_unmask_seconds steps_total step_seconds step_idle_seconds tokens_unmasked_total threshold_used
    threshold_cap kv_pages_in_use kv_pages instance_requests predictor_error_ratio migrations_total
    reconfigurations_total rank_restarts_total
"""


def test_all_metrics_are_there_from_the_start() -> None:
    lines = Metrics().render().decode().splitlines()
    types = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {f"dlmserve_{name}" for name in NAMES.split()} <= types
    assert "process_resident_memory_bytes" in types


def test_gauges_are_read_when_somebody_asks() -> None:
    metrics = Metrics()
    metrics.on_render = lambda: metrics.requests_running.set(7)
    assert "dlmserve_requests_running 7.0" in metrics.render().decode().splitlines()


def test_two_servers_in_one_process_do_not_share_counts() -> None:
    one, other = Metrics(), Metrics()
    one.rank_restarts_total.inc()
    assert "dlmserve_rank_restarts_total 0.0" in other.render().decode().splitlines()
