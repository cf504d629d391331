"""How long the scheduler takes to digest one StepReport of 32 requests, by policy and number of instances.

Run: python -m bench.scheduler [--policies infaas,dlmserve]. Every instance is full, with a queue behind all of
them; the instances report in turn, each every STEP_S of virtual time, with a Tick every TICK_S as in the head.
Two kinds of report: a plain one (tokens only), and one that finishes a request while others wait for its
place. A finished request is replaced by an arrival, so the load stays what it is. Times are CPU seconds of this
thread: what other processes do does not count. Ticks and arrivals are timed on their own.

To compare with (TeDiServe's scheduler, per decision): 0.6-0.9 ms at 4-8 instances, 2.7 ms at 32, 8.1 at 96.
"""

import argparse
import gc
import itertools
import time

import numpy as np

from bench import report
from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import RankId
from dlmserve.control.policy.events import Arrived, Event, NodeUp, RankFormed, RankUp, StepDone, Tick
from dlmserve.control.policy.policies import POLICIES, make_policy
from dlmserve.control.policy.request import RequestSpec
from dlmserve.control.policy.scheduler import TICK_S, Scheduler
from dlmserve.messages import Decoding, RequestStep, StepReport

MASK = 126336
NUM_RESIDENTS, NUM_WAITING = 32, 256
PROMPT, OUTPUT, BLOCK = 1075, 256, 32
NUM_REPORTS = 2000
STEP_S = 0.1
SLO_S = 60.0
NUM_TOKENS = 3_000  # packed tokens of a step
POLICY_OPTIONS = {"dlmserve": {"efficient_batch": 0.0}}  # it would take fewer residents than 32
OUTPUT_FILE = "bench/results/scheduler.json"


class Load:
    """A scheduler whose every instance is full, and what its instances report next."""

    def __init__(self, policy: str, num_instances: int, asks_predictor: bool = False) -> None:
        options = POLICY_OPTIONS.get(policy, {})
        config = ServerConfig(
            tp_layout=(1,) * num_instances,
            policy=policy,
            policy_options=options,
            max_num_seqs=NUM_RESIDENTS,
            max_resident_tokens=10**9,
        )
        self.scheduler = Scheduler(
            config, make_policy(config), MASK, max_model_len=4096, asks_predictor=asks_predictor
        )
        self._numbers = itertools.count()
        self._sequence = itertools.count()
        self._feed(NodeUp("n", num_instances))
        for device in range(num_instances):
            self._feed(RankUp(RankId("n", device, 1), "plan"))
        for name in list(self.scheduler.cluster.instances):
            self._feed(RankFormed(name, 0, num_pages=10_000))
        for _ in range(num_instances * NUM_RESIDENTS + NUM_WAITING):
            self.arrive(0.0)

    def _feed(self, event: Event, now: float = 0.0) -> None:
        self.scheduler.on_event(now, event)

    def arrive(self, now: float) -> float:
        """Seconds that an arrival takes."""
        canvas = [1] * PROMPT + [MASK] * OUTPUT
        decoding = Decoding(block_length=BLOCK)
        spec = RequestSpec("r", canvas, PROMPT, len(canvas), len(canvas), decoding, slo_s=SLO_S)
        return self.timed(Arrived(next(self._numbers), spec), now)

    def timed(self, event: Event, now: float) -> float:
        began_at = time.thread_time()
        self.scheduler.on_event(now, event)
        return time.thread_time() - began_at

    def report(self, name: str, num_finished: int, num_tokens: int = 4) -> StepDone:
        """`num_tokens` unmasked for each resident; the first `num_finished` of them are done then."""
        steps = []
        for i, number in enumerate(self.scheduler.cluster.instances[name].residents):
            request = self.scheduler.requests[number]
            first = PROMPT + request.num_unmasked
            chosen = list(range(first, min(first + num_tokens, PROMPT + OUTPUT)))
            finished = "length" if i < num_finished or chosen[-1] == PROMPT + OUTPUT - 1 else ""
            block = (first - PROMPT) // BLOCK
            values = [0.9] * len(chosen)
            threshold = request.threshold
            steps.append(
                RequestStep(
                    number, first % BLOCK == 0, block, threshold, chosen, [7] * len(chosen), values, finished
                )
            )
        return StepDone(StepReport(name, next(self._sequence), STEP_S, 0.0, NUM_TOKENS, 0, steps, [], []))


def measure(policy: str, num_instances: int, num_finished: int) -> dict[str, dict[str, float]]:
    """Percentiles in us, by kind of event."""
    load = Load(policy, num_instances)
    names = itertools.cycle(list(load.scheduler.cluster.instances))
    spent: dict[str, list[float]] = {"report": [], "tick": [], "arrival": []}
    now = ticked_at = 0.0
    gc.collect()
    gc.freeze()
    for name in itertools.islice(names, NUM_REPORTS):
        now += STEP_S / num_instances
        event = load.report(name, num_finished)
        spent["report"].append(load.timed(event, now))
        if now >= ticked_at + TICK_S:
            ticked_at = now
            spent["tick"].append(load.timed(Tick(), now))
        while load.scheduler.num_waiting < NUM_WAITING:
            spent["arrival"].append(load.arrive(now))
    load.scheduler.check()
    return {kind: percentiles(values) for kind, values in spent.items() if values}


def percentiles(durations_s: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(durations_s) * 1e6, [50, 99])
    return {"mean": float(np.mean(durations_s)) * 1e6, "p50": float(p50), "p99": float(p99)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help="with commas between (default: all)")
    parser.add_argument("--instances", default="16,96", help="with commas between (default: 16,96)")
    args = parser.parse_args()
    print(f"one StepReport of {NUM_RESIDENTS} requests, {NUM_WAITING} waiting; time in us: p50 / p99")
    print(f"{'instances':>9} {'policy':>10} {'report':>16} {'StepReport':>15} {'Tick':>15} {'Arrived':>15}")
    results = []
    for num_instances in map(int, args.instances.split(",")):
        for policy in args.policies.split(","):
            for kind, num_finished in (("tokens only", 0), ("one finishes", 1)):
                spent = measure(policy, num_instances, num_finished)
                results.append({"instances": num_instances, "policy": policy, "report": kind, "us": spent})
                cells = [f"{each['p50']:.0f} / {each['p99']:.0f}" for each in spent.values()]
                print(
                    f"{num_instances:>9} {policy:>10} {kind:>16} "
                    + " ".join(f"{cell:>15}" for cell in cells),
                    flush=True,
                )
    report.write(OUTPUT_FILE, 0, results)


if __name__ == "__main__":
    main()
