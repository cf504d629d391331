"""The step predictor's own thread: takes what is due, predicts it in one batch, hands the answer to the loop.

Owns the thread and its queue. Knows nothing of models: a StepPredictor does the work. Nothing here runs on
the event loop but `ask` and the callback.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable

import numpy as np

from dlmserve.control.policy.events import Predicted
from dlmserve.control.policy.predictions import Progress, StepPredictor, features
from dlmserve.control.predictor_files import PredictorChoice

log = logging.getLogger("dlmserve.predictor")


def make_predictor(
    choice: PredictorChoice, thresholds: tuple[float, ...], answer: Callable[[Predicted], object]
) -> "PredictorThread | None":
    """None where the scheduler predicts from its history. Raises ConfigError."""
    predictor = choice.load()
    return None if predictor is None else PredictorThread(predictor, thresholds, answer)


class PredictorThread:
    """`answer` is called on the loop that called `start`, once for each batch."""

    def __init__(
        self,
        predictor: StepPredictor,
        thresholds: tuple[float, ...],
        answer: Callable[[Predicted], object],
    ) -> None:
        self._predictor, self._answer = predictor, answer
        self._thresholds = np.array(sorted(thresholds, reverse=True))
        self._asked: queue.SimpleQueue[tuple[Progress, ...] | None] = queue.SimpleQueue()  # None: stop
        self._thread = threading.Thread(target=self._run, name="step predictor", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def ask(self, progress: tuple[Progress, ...]) -> None:
        """Never blocks."""
        self._asked.put(progress)

    def stop(self) -> None:
        """Returns when the batch that is being predicted is done; what is still asked for is dropped."""
        self._asked.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._next_batch()) is not None:
            try:
                steps = self._predictor.predict(features(asked), self._thresholds)
            except Exception:
                log.exception("%d predictions failed; the requests keep their last ones", len(asked))
                continue
            try:
                self._loop.call_soon_threadsafe(self._answer, Predicted(asked, steps))
            except RuntimeError:  # the loop has been closed meanwhile
                return

    def _next_batch(self) -> tuple[Progress, ...] | None:
        """All that has been asked for, at least one; of each request the newest progress."""
        newest: dict[int, Progress] = {}
        while not newest or not self._asked.empty():
            asked = self._asked.get()
            if asked is None:
                return None
            newest |= {progress.request: progress for progress in asked}
        return tuple(newest.values())
