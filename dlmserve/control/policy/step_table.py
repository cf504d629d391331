"""What a step predictor learns from: one row per executed step, with the steps that were left then.

Owns the table, how it is recorded and how it is split. Knows neither where the steps come from (a real engine,
or the simulator) nor any predictor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from dlmserve.control.policy.predictions import OUTPUT_LENGTH, STEP, UNMASKED, Progress, features
from dlmserve.control.policy.request import RequestSpec, RequestState
from dlmserve.messages import RequestStep


@dataclass(frozen=True)
class StepTable:
    """n rows; those of one course (a request at a threshold) are consecutive, in the order of its steps.

    features [n, F] as in predictions.py, before a step; the threshold and the request that they are of; the
    steps that were left.
    """

    features: np.ndarray
    thresholds: np.ndarray
    requests: np.ndarray
    steps_left: np.ndarray

    def select(self, rows: np.ndarray) -> "StepTable":
        return StepTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def inputs(self) -> np.ndarray:
        """[n, F + 1]: features and threshold."""
        return np.column_stack((self.features, self.thresholds))

    @property
    def steps_done(self) -> np.ndarray:
        return np.rint(self.features[:, STEP] * self.features[:, OUTPUT_LENGTH]) - 1

    @property
    def num_unmasked(self) -> np.ndarray:
        return np.rint(self.features[:, UNMASKED] * self.features[:, OUTPUT_LENGTH])

    @property
    def started(self) -> np.ndarray:
        """Bool [n]: at least one step was done."""
        return self.steps_done > 0


def join(tables: list[StepTable]) -> StepTable:
    columns = ([getattr(table, field.name) for table in tables] for field in fields(StepTable))
    return StepTable(*map(np.concatenate, columns))


def split(table: StepTable, shares: tuple[float, ...], seed: int) -> list[StepTable]:
    """By request: no two parts have rows of the same one. `shares` add up to 1."""
    requests = np.unique(table.requests)
    np.random.default_rng(seed).shuffle(requests)
    ends = np.rint(np.cumsum(shares)[:-1] * len(requests)).astype(int)
    return [table.select(np.isin(table.requests, part)) for part in np.split(requests, ends)]


class StepRecorder:
    """Follows requests as the head does and notes their progress before each step.

    `specs`: by the number that their steps have.
    """

    def __init__(self, specs: Mapping[int, RequestSpec], mask_id: int, eos_ids: frozenset[int]) -> None:
        self._requests = {
            number: RequestState(number, spec, 0.0, mask_id, num_pages=0, eos_ids=eos_ids)
            for number, spec in specs.items()
        }
        self._courses: dict[int, list[Progress]] = {number: [] for number in specs}

    def record(self, step: RequestStep) -> None:
        request = self._requests[step.request]
        self._courses[step.request].append(request.progress())
        request.apply(step)

    def table(self) -> StepTable:
        """When all are finished."""
        rows = [progress for course in self._courses.values() for progress in course]
        lengths = [len(course) for course in self._courses.values()]
        thresholds = [request.spec.decoding.value for request in self._requests.values()]
        return StepTable(
            features(rows),
            np.repeat(thresholds, lengths),
            np.repeat(list(self._courses), lengths),
            np.concatenate([np.arange(length, 0, -1) for length in lengths]),
        )
