"""The bench of the host's own time runs, and measures cache steps that graphs do."""

from pathlib import Path

from bench import host_time
from bench.gpu import steps
from bench.gpu.setup import Setting, admit, make_engine
from bench.gpu.stub import HostGpu


def test_the_bench_measures_pairs_of_replays() -> None:
    row = host_time.measure(batch=2, num_steps=40)
    # The head hears of the 40th step while the 41st runs; two recompute, the first replay ends no pair, 5 warm up.
    assert row["steps"] == 41 - 2 - 1 - 5
    assert all(row[name]["median"] >= row[name]["p10"] > 0 for name in ("critical_us", "rest_us"))
    assert len(host_time.lines([row])) == 2


def test_the_reports_own_clock_sees_both_parts(tmp_path: Path) -> None:
    setting = Setting("cpu", True, str(tmp_path))
    setting.write_config()
    engine, _ = make_engine(setting, 2, 128, device=HostGpu())
    engine.apply(admit(setting, 0, 64, 32, 32, 32, "dual"))
    engine.step()
    engine.step()
    replays = engine._runner.num_replays
    critical_s, whole_s = steps.host_s(engine)
    assert 0 < critical_s < whole_s and engine._runner.num_replays == replays + 2
