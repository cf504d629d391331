"""How the design grows: python -m bench.scaling [--gpus 64,256,1024] [--cells 16,64] [--seconds S]

A scheduler looks at all its instances, so a cluster beyond its size is cut into cells: a scheduler for at most so
many instances each, and a thin dispatcher in front. A request stays in its cell. For each size of cluster and cell:

  decision_us   CPU time of a scheduler for one StepReport, p50 and p99
  decisions_s   how many a scheduler makes a second at that pace, and how many its cell asks of it
  dispatch_us   what the dispatcher takes for one request
  plan_s        what stage 1 takes for the whole cluster, and the greedy of stage 2 from all TP-1

All instances are TP-1 under `dlmserve` at a load near their capacity (GSM8K lengths); cells run one after the other
here, so the figures are those of a core for each. Writes bench/results/scaling.json.
"""

import argparse
import time
from dataclasses import replace

import numpy as np

from bench import report
from dlmserve.control.planning.block_form import solve
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.movement import least_movement
from dlmserve.control.policy.plan import Problem, RequestClass, tp_layout
from dlmserve.control.policy.predictions import PUBLISHED_TOKENS_PER_STEP
from dlmserve.simulate import make_config
from dlmserve.simulation.scenarios import Scenario, get_scenario
from dlmserve.simulation.workloads import Job, make_jobs, poisson_times
from dlmserve.simulator import Simulator

SEED = 0
RPS_PER_GPU = 1.9
GPUS_PER_NODE = 8


class Dispatcher:
    """Each request goes to the cell with the fewest outstanding tokens; it knows nothing else of them."""

    def __init__(self, num_cells: int) -> None:
        self.outstanding = [0] * num_cells
        self.spent_s: list[float] = []

    def choose(self, num_tokens: int) -> int:
        started_at = time.thread_time()
        cell = self.outstanding.index(min(self.outstanding))
        self.outstanding[cell] += num_tokens
        self.spent_s.append(time.thread_time() - started_at)
        return cell


def run(num_gpus: int, cell_gpus: int, seconds: float) -> dict:
    """All requests of that many seconds, played to their end."""
    scenario = replace(get_scenario("gsm8k-4gpu"), layout=(1,) * cell_gpus)
    config = make_config(scenario, "dlmserve")
    cells = [
        Simulator(config, scenario, SEED + i, "average", time.thread_time, jobs=[])
        for i in range(num_gpus // cell_gpus)
    ]
    for cell in cells:
        cell.start()
    dispatcher = Dispatcher(len(cells))
    ended = [0] * len(cells)
    for job in make_load(scenario, num_gpus, seconds):
        for i, cell in enumerate(cells):
            cell.advance(job.arrived_at)
            num_ended = len(cell.ledger.outcomes)
            dispatcher.outstanding[i] -= (num_ended - ended[i]) * (job.prompt + job.output)
            ended[i] = num_ended
        cells[dispatcher.choose(job.prompt + job.output)].submit(job)
    now = max(cell.now for cell in cells)
    while any(cell.num_left for cell in cells):
        now += 1.0
        for cell in cells:
            cell.advance(now)
    return figures(num_gpus, cell_gpus, cells, dispatcher)


def make_load(scenario: Scenario, num_gpus: int, seconds: float) -> list[Job]:
    """Requests of equal lengths: the dispatcher's books need only their number."""
    rng = np.random.default_rng(SEED)
    rps = RPS_PER_GPU * num_gpus
    times = poisson_times(int(rps * seconds), rps, rng)
    lengths = (np.full(len(times), each) for each in (scenario.prompt, scenario.output))
    return make_jobs(times, *lengths, early=False, rng=rng)


def figures(num_gpus: int, cell_gpus: int, cells: list[Simulator], dispatcher: Dispatcher) -> dict:
    ledgers = [cell.finish() for cell in cells]
    outcomes = [outcome for ledger in ledgers for outcome in ledger.outcomes]
    decision_s = np.concatenate([ledger.decision_s for ledger in ledgers])
    lasted_s = max(ledger.ended_at for ledger in ledgers)
    return {
        "gpus": num_gpus,
        "cells": len(cells),
        "instances_per_cell": cell_gpus,
        "requests": len(outcomes),
        "attainment": float(np.mean([outcome.slo_met for outcome in outcomes])),
        "mean_threshold": float(np.mean([each.mean_threshold for each in outcomes])),
        "decisions": len(decision_s),
        "decision_us": {f"p{p}": float(np.percentile(decision_s, p)) * 1e6 for p in (50, 99)},
        "decisions_s_possible": float(1 / decision_s.mean()),
        "decisions_s_asked": len(decision_s) / len(cells) / lasted_s,
        "dispatch_us": {f"p{p}": float(np.percentile(dispatcher.spent_s, p)) * 1e6 for p in (50, 99)},
    }


def planning(num_gpus: int) -> dict:
    """Eight classes of requests at half of the cluster's capacity; from all TP-1 to what is planned."""
    costs = CostModel.from_preset("h100-nvlink")
    rng = np.random.default_rng(SEED)
    shares = rng.dirichlet(np.ones(8)) * 0.5 * RPS_PER_GPU * num_gpus
    lengths = zip(rng.integers(1, 8, 8) * 256.0, rng.integers(1, 4, 8) * 128.0, shares, strict=True)
    num_nodes = num_gpus // GPUS_PER_NODE
    problem = Problem(
        [RequestClass(float(p), float(o), float(rps), 9.5 * o / 256) for p, o, rps in lengths],
        nodes=[GPUS_PER_NODE] * num_nodes,
        tp_degrees=[1, 2, 4, 8],
        thresholds=list(PUBLISHED_TOKENS_PER_STEP),
        tokens_per_step=list(PUBLISHED_TOKENS_PER_STEP.values()),
        step_s={degree: costs.points(degree) for degree in (1, 2, 4, 8)},
    )
    started_s = time.process_time()
    plan = solve(problem, time_limit_s=120.0)
    solved_s = time.process_time()
    nodes = {str(node): GPUS_PER_NODE for node in range(num_nodes)}
    present = [(node, 1) for node in nodes for _ in range(GPUS_PER_NODE)]
    movement = least_movement(nodes, present, tp_layout(plan.layout))
    return {
        "gpus": num_gpus,
        "layout": plan.layout,
        "status": plan.status,
        "stage1_s": solved_s - started_s,
        "greedy_s": time.process_time() - solved_s,
        "kept": len(movement.kept),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default="64,256,1024", help="sizes of clusters, with commas between")
    parser.add_argument("--cells", default="16,64", help="most instances of a cell, with commas between")
    parser.add_argument("--seconds", type=float, default=4.0, help="of arrivals (default: 4)")
    args = parser.parse_args()
    solve(_tiny())  # imports
    sizes = [int(each) for each in args.gpus.split(",")]
    plans = [planning(num_gpus) for num_gpus in sizes]
    rows = []
    for num_gpus in sizes:
        for cell_gpus in (int(each) for each in args.cells.split(",")):
            rows.append(run(num_gpus, cell_gpus, args.seconds))
            print(rows[-1], flush=True)
    for plan in plans:
        print(plan)
    report.write("bench/results/scaling.json", SEED, {"cells": rows, "planning": plans})


def _tiny() -> Problem:
    step_s = {1: CostModel.from_preset("h100-nvlink").points(1)}
    return Problem([RequestClass(64.0, 64.0, 1.0)], [1], [1], [0.9], [3.0], step_s)


if __name__ == "__main__":
    main()
