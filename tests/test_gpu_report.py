"""The GPU report: each line of it runs here on a CPU; what it imports is there on a machine without the server's."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import gpu_report
from bench.gpu.setup import Setting

# Packages of the head, the planner and the predictor, which a machine that only computes does not have.
ABSENT = ("aiohttp", "catboost", "cvxpy", "prometheus_client", "rich", "uvloop", "zmq")


def test_the_report_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    gpu_report.main(["--device", "cpu", "--small", "--json", str(file)])
    results = json.loads(file.read_text())["results"]
    assert not [part for part in results.values() if "error" in part], capsys.readouterr().out
    float32 = [row for row in results["golden"]["rows"] if row["dtype"] == "float32"]
    assert float32 and all(row["equal_traces"] == row["traces"] for row in float32)
    assert all(not row["wrong"] for row in results["kernels"]["rows"])
    errors = [row["error_to_plain"] for row in results["attention"]["rows"] if "error" not in row]
    assert len(errors) == 12 and max(errors) < 1e-5, "4 settings; plain, varlen and sdpa work on a CPU"
    (group,) = results["groups"]["rows"]
    assert group["ranks"] == 2 and group["right"] and group["replayed_right"]
    assert [row["tokens"] for row in results["steps"]["rows"]] == [32, 1536]
    assert [row["batch"] for row in results["decode"]["rows"]] == [1, 2]


def test_parts_that_time_does_not_suffice_for_are_left_out_and_said(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    setting = Setting("cpu", True, str(tmp_path))
    began_at = time.perf_counter() - gpu_report.LIMIT_S
    gpu_report.run(
        setting, ["golden", "steps"], began_at, lambda results: gpu_report.save(str(file), setting, results)
    )
    results = json.loads(file.read_text())["results"]
    assert results.keys() == {"golden", "steps"}
    assert all("left out: 48" in part["error"] for part in results.values())


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_report.main(["--device", "cuda:7"])
    assert "--device cpu --small" in capsys.readouterr().err


def test_it_imports_nothing_of_the_server() -> None:
    program = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import bench.gpu_report"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
