"""How long the scheduler takes to digest one StepReport of 32 requests, by the number of instances.

Run: python -m bench.scheduler. Two kinds of report: a plain one (tokens only), and one that finishes a
request while others wait for its place. To compare with (TeDiServe's scheduler, per decision): 0.6-0.9 ms at
4-8 instances, 2.7 ms at 32, 8.1 ms at 96.
"""

import itertools
import time

import numpy as np

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import RankId
from dlmserve.control.policy.events import Arrived, NodeUp, RankFormed, RankUp, StepDone
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.policy.request import RequestSpec
from dlmserve.control.policy.scheduler import Scheduler
from dlmserve.messages import Decoding, RequestStep, StepReport

MASK = 126336
NUM_RESIDENTS, NUM_WAITING = 32, 256
PROMPT, OUTPUT, BLOCK = 1075, 256, 32
NUM_REPORTS = 2000


def make_scheduler(num_instances: int) -> Scheduler:
    """Every instance full, a queue behind them."""
    config = ServerConfig(tp_layout=(1,) * num_instances, max_num_seqs=NUM_RESIDENTS)
    scheduler = Scheduler(config, make_policy(config), MASK, max_model_len=4096)
    scheduler.on_event(0.0, NodeUp("n", num_instances))
    for device in range(num_instances):
        scheduler.on_event(0.0, RankUp(RankId("n", device, 1), "plan"))
    for name in list(scheduler.cluster.instances):
        scheduler.on_event(0.0, RankFormed(name, 0, num_pages=10_000))
    canvas = [1] * PROMPT + [MASK] * OUTPUT
    spec = RequestSpec("r", canvas, PROMPT, len(canvas), len(canvas), Decoding(block_length=BLOCK))
    for number in range(num_instances * NUM_RESIDENTS + NUM_WAITING):
        scheduler.on_event(0.0, Arrived(number, spec))
    return scheduler


def make_report(scheduler: Scheduler, name: str, seq: int, num_finished: int) -> StepReport:
    """Four tokens for each resident; the first `num_finished` of them are done then."""
    steps = []
    for i, number in enumerate(scheduler.cluster.instances[name].residents):
        canvas = scheduler.requests[number].canvas
        masked = [column for column in range(PROMPT, PROMPT + OUTPUT) if canvas[column] == MASK]
        finished = "length" if i < num_finished or len(masked) <= 4 else ""
        chosen = masked[:4]
        block = (chosen[0] - PROMPT) // BLOCK
        values = [0.9] * len(chosen)
        steps.append(RequestStep(number, False, block, 0.9, chosen, [7] * len(chosen), values, finished))
    return StepReport(name, seq, 0.02, 0.0, 1024, 0, steps, [], [])


def time_reports(num_instances: int, num_finished: int) -> np.ndarray:
    """CPU seconds of each on_event (other processes do not count), the instances reporting in turn."""
    scheduler = make_scheduler(num_instances)
    names = itertools.cycle(list(scheduler.cluster.instances))
    numbers = itertools.count(1_000_000)
    durations_s = []
    for seq, name in zip(range(NUM_REPORTS), names, strict=False):
        event = StepDone(make_report(scheduler, name, seq, num_finished))
        while scheduler.num_waiting < NUM_WAITING:
            spec = next(iter(scheduler.requests.values())).spec
            scheduler.on_event(0.0, Arrived(next(numbers), spec))
        began_at = time.thread_time()
        scheduler.on_event(1.0, event)
        durations_s.append(time.thread_time() - began_at)
    scheduler.check()
    return np.array(durations_s)


def main() -> None:
    print(f"one StepReport of {NUM_RESIDENTS} requests, {NUM_WAITING} waiting; time in us")
    print(f"{'instances':>9} {'report':>16} {'p50':>7} {'p99':>7}")
    for num_instances in (16, 96):
        for kind, num_finished in (("tokens only", 0), ("one finishes", 1)):
            p50, p99 = np.percentile(time_reports(num_instances, num_finished) * 1e6, [50, 99])
            print(f"{num_instances:>9} {kind:>16} {p50:>7.0f} {p99:>7.0f}")


if __name__ == "__main__":
    main()
