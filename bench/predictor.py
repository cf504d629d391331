"""What predicting steps costs the event loop: 64 live requests, the embedded model's trained predictor.

    python -m bench.predictor [--json bench/results/predictor.json]

The real scheduler and the real predictor thread on an asyncio loop; instances report as in bench/scheduler.py, eight
tokens for each request, so that every report makes all its requests due. `report`, `tick`, `ask` and `answer` are CPU
time of the loop's thread: a StepReport; a Tick, which also collects the progress of all that are due, and controls
the load; handing it over; and taking the answer in.
`late` is wall time: by how much a timer of 1 ms is late, so it also counts waiting for the interpreter lock that the
predictor's thread holds, and everything else that runs on the machine; once with the predictor and once without.
"""

import argparse
import asyncio
import time
from typing import get_args

import numpy as np

from bench import report
from bench.scheduler import STEP_S, Load, percentiles
from dlmserve.checkpoint import resolve
from dlmserve.config import PredictorKind, ServerConfig
from dlmserve.control.policy.events import Event, Predict, Predicted, Tick
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.predictor import PredictorThread
from dlmserve.control.predictor_files import choose_predictor

NUM_INSTANCES = 2  # of 32 requests each
NUM_REPORTS = 300
TIMER_S = 0.001


class Timer:
    """By how much a timer on this loop is late, in seconds, until it is stopped."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            began_at = time.perf_counter()
            await asyncio.sleep(TIMER_S)
            self.late_s.append(time.perf_counter() - began_at - TIMER_S)

    def stop(self) -> None:
        self._task.cancel()


async def measure(predicts: bool, kind: PredictorKind) -> dict[str, dict[str, float]]:
    """Percentiles in us."""
    load = Load("dlmserve", NUM_INSTANCES, asks_predictor=predicts)
    spent: dict[str, list[float]] = {"report": [], "tick": [], "ask": [], "answer": []}
    answered = asyncio.Event()
    now = 0.0

    def on_answer(predicted: Predicted) -> None:
        spent["answer"].append(load.timed(predicted, now))
        answered.set()

    config = ServerConfig(step_predictor_kind=kind)
    predictor = choose_predictor(config, make_policy(config), resolve("tiny")).load()
    assert predictor is not None, f"the embedded model has no predictor of kind {kind}"
    thread = PredictorThread(predictor, config.thresholds, on_answer)
    thread.start()
    timer = Timer()
    names = list(load.scheduler.cluster.instances)
    for i in range(NUM_REPORTS):
        now += STEP_S / NUM_INSTANCES
        events: dict[str, Event] = {"report": load.report(names[i % NUM_INSTANCES], 0, num_tokens=8)}
        if i % NUM_INSTANCES == 0:  # every TICK_S
            events["tick"] = Tick()
        for kind_of_event, event in events.items():
            began_at = time.thread_time()
            actions = load.scheduler.on_event(now, event)
            spent[kind_of_event].append(time.thread_time() - began_at)
            for action in actions:
                if isinstance(action, Predict):
                    answered.clear()
                    began_at = time.thread_time()
                    thread.ask(action.progress)
                    spent["ask"].append(time.thread_time() - began_at)
                    await answered.wait()
        await asyncio.sleep(2 * TIMER_S)
    timer.stop()
    thread.stop()
    spent["late"] = timer.late_s
    return {name: percentiles(values) for name, values in spent.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = get_args(PredictorKind)
    parser.add_argument("--kind", default="auto", choices=kinds, help="as --step-predictor-kind")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()
    np.random.seed(0)
    results = {}
    print(f"{NUM_INSTANCES * 32} live requests; us: p50 / p99")
    for name, predicts in (("with", True), ("without", False)):
        spent = results[name] = asyncio.run(measure(predicts, args.kind))
        cells = [f"{part} {each['p50']:.0f} / {each['p99']:.0f}" for part, each in spent.items()]
        print(f"{name:>8} predictor: " + ", ".join(cells), flush=True)
    if args.json:
        report.write(args.json, 0, results)


if __name__ == "__main__":
    main()
