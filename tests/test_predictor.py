"""The predictor's thread: batches what is due, answers on the loop, outlives a predictor that fails."""

import asyncio
import threading

import numpy as np

from dlmserve.control.policy.events import Predicted
from dlmserve.control.policy.predictions import Progress
from dlmserve.control.predictor import PredictorThread

THRESHOLDS = (0.5, 0.9)


class GatedPredictor:
    """Works when the gate is open; notes its batches."""

    def __init__(self) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.batches: list[int] = []

    def predict(self, features: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
        self.entered.set()
        self.gate.wait()
        self.batches.append(len(features))
        if len(self.batches) == 1:
            raise ValueError("a bad model")
        return features[:, :1] + 10 * thresholds


def progress(request: int, steps: int) -> Progress:
    return Progress(request, steps, 0, 0, 0, 100, 10, 5, 100, ())


def test_what_comes_while_it_is_busy_is_one_batch_of_the_newest_and_a_failure_is_survived() -> None:
    async def story() -> None:
        answered: asyncio.Future[Predicted] = asyncio.get_running_loop().create_future()
        predictor = GatedPredictor()
        thread = PredictorThread(predictor, THRESHOLDS, answered.set_result)
        thread.start()
        thread.ask((progress(1, 0),))
        await asyncio.to_thread(predictor.entered.wait)
        thread.ask((progress(1, 4), progress(2, 9)))
        thread.ask((progress(1, 19),))
        predictor.gate.set()
        predicted = await answered
        thread.stop()
        assert predictor.batches == [1, 2]
        assert predicted.progress == (progress(1, 19), progress(2, 9))
        np.testing.assert_allclose(predicted.steps, [[9.2, 5.2], [9.1, 5.1]])

    asyncio.run(story())


def test_it_stops_at_once_when_nothing_is_asked() -> None:
    async def story() -> None:
        thread = PredictorThread(GatedPredictor(), THRESHOLDS, print)
        thread.start()
        thread.stop()

    asyncio.run(story())
