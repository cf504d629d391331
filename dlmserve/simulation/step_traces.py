"""Step predictors for the simulator: one trained on simulated requests, and an oracle that knows the course.

Runs requests alone on a simulated engine at every threshold, as `train-predictor` does on a real one, and
collects a row per step. The training requests are none of a scenario's own: they have numbers of their own.
"""

from dataclasses import replace
from functools import lru_cache

import numpy as np

from dlmserve.control.policy.predictions import Progress
from dlmserve.control.policy.request import RequestSpec
from dlmserve.control.policy.step_predictor import CatBoostPredictor
from dlmserve.control.policy.step_table import StepRecorder, StepTable, join
from dlmserve.messages import Admit, Decoding
from dlmserve.simulation.forest import Forest
from dlmserve.simulation.instance import EOS, MASK, TEXT, SimulatedEngine
from dlmserve.simulation.scenarios import Scenario
from dlmserve.simulation.unmasking import Unmasking, load_calibration
from dlmserve.simulation.workloads import Job

FIRST_NUMBER = 10_000_000  # of the training requests
TRAINING_SEED = 1000
NUM_REQUESTS = 100
PAGE_SIZE = 32


def record(scenario: Scenario, thresholds: tuple[float, ...], first_number: int, seed: int) -> StepTable:
    """One row per step of NUM_REQUESTS requests at each threshold."""
    jobs = dict(enumerate(scenario.sample_jobs(NUM_REQUESTS, seed), first_number))
    unmasking = Unmasking(load_calibration(scenario.text), seed)
    return join([_record_at(threshold, jobs, unmasking) for threshold in thresholds])


def _record_at(threshold: float, jobs: dict[int, Job], unmasking: Unmasking) -> StepTable:
    eos_at = {number: 1 + job.answer for number, job in jobs.items() if job.answer < job.output}
    num_pages = sum(1 + job.output // PAGE_SIZE for job in jobs.values())
    engine = SimulatedEngine(unmasking, num_pages, PAGE_SIZE, eos_at)
    specs = {}
    for number, job in jobs.items():
        length = 1 + job.output
        canvas = [TEXT] + [MASK] * job.output
        specs[number] = RequestSpec("", canvas, 1, length, length, Decoding(value=threshold))
        engine.apply(Admit(number, canvas, 1, length, length, specs[number].decoding))
    recorder = StepRecorder(specs, MASK, frozenset([EOS]))
    while engine.has_work():
        for step in engine.step().requests:
            recorder.record(step)
    return recorder.table()


def train_predictor(scenario: Scenario, thresholds: tuple[float, ...]) -> Forest:
    """Trained as in the paper: 100 requests at every threshold. The same for all rates, SLOs and seeds."""
    return _train(replace(scenario, rps=1.0, num_requests=0, slo_s=1.0, overhead_s=0.0), thresholds)


@lru_cache(maxsize=8)
def _train(scenario: Scenario, thresholds: tuple[float, ...]) -> Forest:
    return Forest(CatBoostPredictor.train(record(scenario, thresholds, FIRST_NUMBER, TRAINING_SEED)))


class Oracle:
    """Decodes each request ahead, at each of the thresholds: steps per block, and from them what is left."""

    def __init__(self, unmasking: Unmasking, jobs: list[Job], thresholds: tuple[float, ...]) -> None:
        self._unmasking, self._jobs, self._thresholds = unmasking, jobs, thresholds
        self._courses: dict[int, np.ndarray] = {}

    def predict(self, progress: list[Progress]) -> np.ndarray:
        """Steps left, float [n, T]."""
        return np.array([self._steps_left(each) for each in progress])

    def _steps_left(self, progress: Progress) -> np.ndarray:
        course, block = self.course(progress.request), progress.block
        if block >= len(course):
            return np.ones(len(self._thresholds))
        done = progress.num_unmasked_in_block / progress.block_length
        return np.maximum(course[block:].sum(0) - done * course[block], 1.0)

    def course(self, request: int) -> np.ndarray:
        """Steps of each block at each threshold, int [num_blocks, T]."""
        if request not in self._courses:
            self._courses[request] = self._decode(request)
        return self._courses[request]

    def _decode(self, request: int) -> np.ndarray:
        """All blocks at all thresholds at once."""
        job, length = self._jobs[request], self._unmasking.calibration.block_length
        wanted = min(job.answer + 1, job.output)
        num_blocks = -(-wanted // length)
        steps = np.zeros((num_blocks, len(self._thresholds)), int)
        live = []
        for block in range(num_blocks):
            masked = (1 << min(length, job.output - block * length)) - 1
            needed = (1 << min(length, wanted - block * length)) - 1
            for i, threshold in enumerate(self._thresholds):
                decoding = self._unmasking.begin_block(request, block, masked, threshold)
                live.append(((block, i), decoding, needed))
        while live:
            for place, decoding, _ in live:
                decoding.step()
                steps[place] += 1
            live = [each for each in live if each[1].masked & each[2]]
        return steps
