"""`dlmserve plan`: what it prints, the schema of its JSON, and how it refuses."""

import json
from pathlib import Path

import pytest

from dlmserve.cli import main

CLUSTER = ["--model-preset", "h100-nvlink", "--nodes", "2", "--gpus", "4"]


def test_it_prints_the_layout_what_it_costs_and_the_alternatives(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", *CLUSTER, "--rps", "0.5", "--present", "1,1,1,1"]) == 0
    shown = capsys.readouterr().out
    for text in ("2 x TP-4", "Fewest instances that serve so", "present", "all TP-1", "100% at 0.9"):
        assert text in shown


def test_it_says_what_fails(capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", *CLUSTER, "--rps", "500"]) == 0
    shown = capsys.readouterr().out
    assert "infeasible: GPUs: the load takes" in shown and "8 x TP-1" in shown


def test_json_has_the_schema(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    arguments = ["plan", *CLUSTER, "--rps", "4", "--lengths", "500+64:0.5,1000+256:0.5", "--slo-ms", "9000"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {
        "layout", "needed", "mean_threshold", "latency_s", "utilisation", "status", "reason", "solve_s",
    }  # fmt: skip
    assert result["status"] == "optimal" and result["mean_threshold"] == pytest.approx(0.9, abs=2e-3)
    assert 0 < result["utilisation"] < 1
    file = tmp_path / "plan.json"
    assert main([*arguments, "--json", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8"))["layout"] == result["layout"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rps", "0"], "--rps is 0; wanted more than 0"),
        (["--rps", "1", "--lengths", "10x20"], "--lengths has '10x20'; wanted PROMPT+OUTPUT"),
        (["--rps", "1", "--lengths", "10+0"], "--lengths has '10+0'"),
        (["--rps", "1", "--tp-degrees", "3"], "--tp-degrees has 3; wanted 1, 2, 4 or 8"),
        (["--rps", "1", "--tp-degrees", "8"], "a node has 4 GPUs"),
        (["--rps", "1", "--thresholds", "1.5"], "--thresholds is 1.5"),
        (["--rps", "1", "--present", "4,4,4"], "--present is 4,4,4; wanted TP degrees"),
        (["--rps", "1", "--slo-ms", "-1"], "--slo-ms is -1"),
        (["--rps", "x"], "--rps"),
        (["--rps", "inf"], "--rps is inf"),
        (["--rps", "1", "--json", "/nowhere/plan.json"], "--json /nowhere/plan.json cannot be written"),
        (["--rps", "1", "--model-preset", "tpu"], "cost model preset is 'tpu'"),
        ([], "--rps"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["plan", *CLUSTER, *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
