"""The account of several decodings of one request."""

from types import SimpleNamespace
from typing import Any

import pytest

from dlmserve.control.policy.request import Summary
from dlmserve.server.replies import account


def finished(**fields: Any) -> Any:
    defaults = {"steps": 4, "recompute_steps": 1, "num_unmasked": 8, "mean_threshold": 0.9, "latency_s": 1.0}
    rest = {"slo_s": None, "slo_met": None, "instances": ["a"]}
    return SimpleNamespace(summary=Summary(**(defaults | rest | fields)))


def test_steps_add_up_the_slowest_counts_and_thresholds_weigh_by_tokens() -> None:
    first = finished(slo_s=2.0, slo_met=True, instances=["a", "b"])
    second = finished(
        steps=12,
        recompute_steps=2,
        num_unmasked=24,
        mean_threshold=0.5,
        latency_s=3.0,
        slo_s=2.0,
        slo_met=False,
    )
    assert account([first, second]) == {
        "steps": 16,
        "recompute_steps": 3,
        "tokens_per_step": 2.0,
        "mean_threshold": pytest.approx(0.6),
        "threshold_cap": None,
        "slo_ms": 2000.0,
        "latency_ms": 3000.0,
        "slo_met": False,
        "instances": ["a", "b"],
    }


def test_without_an_slo_and_without_thresholds_there_is_nothing_to_say_of_them() -> None:
    said = account([finished(mean_threshold=None)])
    assert (said["slo_ms"], said["slo_met"], said["mean_threshold"]) == (None, None, None)


def test_an_answer_that_took_no_step_divides_by_nothing() -> None:
    said = account([finished(steps=0, recompute_steps=0, num_unmasked=0, mean_threshold=None)])
    assert said["tokens_per_step"] == 0.0
