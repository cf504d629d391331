"""The learned step predictor: what it learns from, its error, and that a higher threshold takes longer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlmserve.control.policy.predictions import FEATURES
from dlmserve.control.policy.step_predictor import (
    CatBoostPredictor,
    StepTable,
    error_ratio,
    errors_by_features,
)
from dlmserve.errors import ConfigError
from dlmserve.simulation import step_traces
from dlmserve.simulation.forest import Forest
from dlmserve.simulation.scenarios import get_scenario

SCENARIO = replace(get_scenario("sharegpt-16gpu"), text="gsm8k")
THRESHOLDS = (0.9, 0.7, 0.5)


@pytest.fixture(scope="module")
def tables() -> tuple[StepTable, StepTable]:
    return tuple(step_traces.record(SCENARIO, THRESHOLDS, first, seed) for first, seed in ((0, 1), (1000, 2)))  # type: ignore[return-value]


def test_rows_count_down_to_the_last_step(tables: tuple[StepTable, StepTable]) -> None:
    table = tables[0]
    assert table.features.shape == (len(table.steps_left), len(FEATURES))
    assert (table.steps_left == 1).sum() == step_traces.NUM_REQUESTS * len(THRESHOLDS)
    assert (np.diff(table.steps_left)[table.steps_left[:-1] > 1] == -1).all()


def test_progress_more_than_halves_the_error(tables: tuple[StepTable, StepTable]) -> None:
    train, held_out = (table.select(np.arange(0, len(table.steps_left), 4)) for table in tables)
    errors = errors_by_features(train, held_out)
    assert errors["all"] < 0.5 * errors["length"]
    assert errors["all"] < 0.25


def test_a_higher_threshold_never_takes_fewer_steps(
    tables: tuple[StepTable, StepTable], tmp_path: Path
) -> None:
    predictor = CatBoostPredictor.train(tables[0].select(np.arange(0, len(tables[0].steps_left), 8)))
    rows = tables[1].features[::97]
    steps = predictor.predict(rows, np.array([0.9, 0.8, 0.7, 0.6, 0.5]))
    assert steps.shape == (len(rows), 5)
    assert (np.diff(steps, axis=1) <= 1e-9).all()
    assert (steps >= 1).all()

    predictor.save(tmp_path / "steps.cbm")
    again = CatBoostPredictor.load(tmp_path / "steps.cbm").predict(rows, np.array([0.9, 0.8, 0.7, 0.6, 0.5]))
    assert np.array_equal(again, steps)
    assert Forest(predictor).predict(rows, np.array([0.9, 0.8, 0.7, 0.6, 0.5])) == pytest.approx(steps)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.cbm"
    path.write_bytes(b"no model")
    with pytest.raises(ConfigError, match="train it again"):
        CatBoostPredictor.load(path)


def test_the_error_ratio_weighs_by_what_was_left() -> None:
    assert error_ratio(np.array([8.0, 2.0]), np.array([10.0, 10.0])) == pytest.approx(0.5)
