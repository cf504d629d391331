"""The learned step predictor: what it learns from, its error, and that a higher threshold takes longer."""

from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dlmserve.control.policy import step_predictor
from dlmserve.control.policy.predictions import FEATURES, Progress, features
from dlmserve.control.policy.step_predictor import (
    FEATURE_SETS,
    CatBoostPredictor,
    error_ratio,
    errors_by_features,
    errors_by_refresh,
    held_between,
)
from dlmserve.control.policy.step_table import StepTable, split
from dlmserve.errors import ConfigError
from dlmserve.simulation import step_traces
from dlmserve.simulation.forest import Forest
from dlmserve.simulation.scenarios import get_scenario

SCENARIO = replace(get_scenario("sharegpt-16gpu"), text="gsm8k")
THRESHOLDS = (0.9, 0.7, 0.5)


@pytest.fixture(scope="module")
def tables() -> tuple[StepTable, StepTable]:
    return tuple(step_traces.record(SCENARIO, THRESHOLDS, first, seed) for first, seed in ((0, 1), (1000, 2)))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def few_rows(tables: tuple[StepTable, StepTable]) -> StepTable:
    """Enough to learn from."""
    return tables[0].select(np.arange(0, len(tables[0].steps_left), 16))


@pytest.fixture(scope="module")
def trained(few_rows: StepTable) -> CatBoostPredictor:
    return CatBoostPredictor.train(few_rows)


def test_rows_count_down_to_the_last_step(tables: tuple[StepTable, StepTable]) -> None:
    table = tables[0]
    assert table.features.shape == (len(table.steps_left), len(FEATURES))
    assert (table.steps_left == 1).sum() == step_traces.NUM_REQUESTS * len(THRESHOLDS)
    assert (np.diff(table.steps_left)[table.steps_left[:-1] > 1] == -1).all()


def test_progress_more_than_halves_the_error(
    tables: tuple[StepTable, StepTable], few_rows: StepTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {name: FEATURE_SETS[name] for name in ("output length", "+ confidence")}
    monkeypatch.setattr(step_predictor, "FEATURE_SETS", two)
    held_out = tables[1].select(np.arange(0, len(tables[1].steps_left), 16))
    errors = errors_by_features(few_rows, held_out)
    assert errors["+ confidence"].after_step < 0.5 * errors["output length"].after_step
    assert errors["+ confidence"].after_step < 0.25


def test_a_prediction_that_is_held_loses_one_a_step_and_is_renewed_after_so_many_tokens() -> None:
    table = make_table(num_unmasked=[0, 4, 8, 12, 0, 2])
    predicted = np.array([9.0, 20.0, 30.0, 0.5, 7.0, 50.0])
    assert held_between(predicted, table, 1).tolist() == [9, 20, 30, 1, 7, 50]
    assert held_between(predicted, table, 8).tolist() == [9, 8, 30, 29, 7, 6]
    assert held_between(predicted, table, 100).tolist() == [9, 8, 7, 6, 7, 6]


def test_rare_predictions_are_worse(tables: tuple[StepTable, StepTable], trained: CatBoostPredictor) -> None:
    errors = errors_by_refresh(trained, tables[1])
    assert list(errors) == [1, 2, 4, 8, 16, 32]
    assert errors[1] < errors[32]


def test_no_two_parts_of_a_split_share_a_request(tables: tuple[StepTable, StepTable]) -> None:
    parts = split(tables[0], (0.7, 0.15, 0.15), seed=0)
    requests = [set(part.requests.tolist()) for part in parts]
    assert [len(part) for part in requests] == [70, 15, 15]
    assert len(set.union(*requests)) == 100
    assert sum(len(part.steps_left) for part in parts) == len(tables[0].steps_left)


def make_table(num_unmasked: list[int]) -> StepTable:
    """Courses that each begin where nothing is unmasked; output length 64."""
    rows, steps = [], 0
    for count in num_unmasked:
        steps = steps + 1 if count else 0
        rows.append(Progress(1, steps, count, 0, count, 64, 32, 9, 64 - count, array("d")))
    left = np.ones(len(rows))
    return StepTable(features(rows), np.full(len(rows), 0.9), left, left)


def test_a_higher_threshold_never_takes_fewer_steps(
    tables: tuple[StepTable, StepTable], trained: CatBoostPredictor, tmp_path: Path
) -> None:
    rows = tables[1].features[::97]
    steps = trained.predict(rows, np.array([0.9, 0.8, 0.7, 0.6, 0.5]))
    assert steps.shape == (len(rows), 5)
    assert (np.diff(steps, axis=1) <= 1e-9).all()
    assert (steps >= 1).all()

    trained.save(tmp_path / "steps.cbm")
    again = CatBoostPredictor.load(tmp_path / "steps.cbm").predict(rows, np.array([0.9, 0.8, 0.7, 0.6, 0.5]))
    assert np.array_equal(again, steps)
    assert Forest(trained).predict(rows, np.array([0.9, 0.8, 0.7, 0.6, 0.5])) == pytest.approx(steps)


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.cbm"
    path.write_bytes(b"no model")
    with pytest.raises(ConfigError, match="train it again"):
        CatBoostPredictor.load(path)


def test_the_error_ratio_weighs_by_what_was_left() -> None:
    assert error_ratio(np.array([8.0, 2.0]), np.array([10.0, 10.0])) == pytest.approx(0.5)
