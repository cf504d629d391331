"""The planner: python -m bench.planner [--only PART] [--jobs N] [--hours N]

Parts:
  stage1   how long 28 classes x 3 TP degrees x 8 concurrencies take, at several loads; the published form
  stage2   how long the integer program takes on 64 GPUs; the greedy against it on 500 random aligned cases
  load     the layout for a rising load on 16 GPUs of the `h100-nvlink` preset; drawn into docs/planner.png
  diurnal  the day of `simulate --scenario diurnal` on fixed layouts and with reconfiguration

Each part writes bench/results/planner_PART.json.
"""

import argparse
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench import report
from bench.layouts import aligned_case
from dlmserve.control.planning.block_form import solve
from dlmserve.control.planning.paper_form import solve_paper
from dlmserve.control.planning.slots import most_kept
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.movement import least_movement
from dlmserve.control.policy.plan import Problem, RequestClass, tp_layout
from dlmserve.control.policy.predictions import PUBLISHED_TOKENS_PER_STEP
from dlmserve.flags import read_integers
from dlmserve.simulate import make_config
from dlmserve.simulation.scenarios import KV_TOKENS_PER_GPU, OVERHEAD_S, get_scenario
from dlmserve.simulator import Simulator

PRESET, DEGREES = "h100-nvlink", (1, 2, 4)
THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
SEED = 0
PLOT = "docs/planner.png"
FIXED = ("1,1,1,1,1,1,1,1", "2,2,2,2", "4,4")
# The day with reconfiguration begins on what `dlmserve plan` answers for the load of its last hour, as if on the
# day before: --rps 10.9 --nodes 2 --gpus 4 --lengths sharegpt --slo-ms 12500 --max-num-seqs 128 --model-preset
# h100-nvlink.
PLANNED_BEFORE = "4,2,1,1"
RECONFIGURE_S = 30.0
LOW_LOAD_HOURS = 9  # of 24: until the morning's rise


def make_problem(classes: list[RequestClass], **fields) -> Problem:
    costs = CostModel.from_preset(PRESET)
    step_s = {d: [(tokens, s + OVERHEAD_S) for tokens, s in costs.points(d)] for d in DEGREES}
    return Problem(
        classes,
        nodes=fields.pop("nodes", [4] * 4),
        tp_degrees=list(DEGREES),
        thresholds=list(THRESHOLDS),
        tokens_per_step=[PUBLISHED_TOKENS_PER_STEP[each] for each in THRESHOLDS],
        step_s=step_s,
        kv_tokens=KV_TOKENS_PER_GPU,
        **fields,
    )


def many_classes(num: int, rps: float) -> list[RequestClass]:
    """Prompts of up to 2816 tokens, outputs of up to 1024, SLOs of 9.5 s for each 256 of them."""
    rng = np.random.default_rng(SEED)
    prompts, outputs = rng.integers(1, 12, num) * 256.0, rng.integers(1, 5, num) * 256.0
    rates = rng.dirichlet(np.ones(num)) * rps
    rows = zip(prompts.tolist(), outputs.tolist(), rates.tolist(), strict=True)
    return [RequestClass(p, o, rate, 9.5 * o / 256) for p, o, rate in rows]


def stage1(args: argparse.Namespace) -> dict:
    """Loads up to what sixteen GPUs bear; CPU time, as the solver has one thread."""
    solve(make_problem(many_classes(1, 1.0)))  # imports
    rows = []
    for rps in (1.0, 3.0, 5.0, 7.0, 9.0):
        started_s = time.process_time()
        plan = solve(make_problem(many_classes(28, rps)), time_limit_s=120.0)
        row = {
            "rps": rps,
            "status": plan.status,
            "cpu_s": time.process_time() - started_s,
            "layout": plan.needed,
            "mean_threshold": plan.outcome and plan.outcome.mean_threshold,
            "latency_s": plan.outcome and plan.outcome.latency_s,
        }
        print(row, flush=True)
        rows.append(row)
    theirs = published_form()
    print("published form:", theirs, flush=True)
    slowest_s = max(row["cpu_s"] for row in rows)
    return {"classes": 28, "loads": rows, "slowest_s": slowest_s, "published_form": theirs}


def published_form() -> dict | None:
    """One class of requests: with more of them it runs into the time limit."""
    started_s = time.process_time()
    problem = make_problem([RequestClass(1075.0, 256.0, 5.0, 9.5)])
    found, ours = solve_paper(problem), solve(problem).outcome
    if found is None or ours is None:
        return None
    return found._asdict() | {
        "cpu_s": time.process_time() - started_s,
        "block_form_latency_s": ours.latency_s,
    }


def stage2(args: argparse.Namespace, num_cases: int = 500) -> dict:
    worst = []
    rng = random.Random(SEED)
    exact_s, greedy_s = [], []
    for case in range(num_cases):
        nodes, present, wanted = aligned_case(rng)
        exact, greedy, times = compare(nodes, present, wanted)
        exact_s.append(times[0])
        greedy_s.append(times[1])
        if exact != greedy:
            worst.append({"case": case, "exact": exact, "greedy": greedy})
    large = []
    for _ in range(10):
        nodes, present, wanted = aligned_case(rng, num_nodes=8, size=8)
        exact, greedy, times = compare(nodes, present, wanted)
        large.append({"exact": exact, "greedy": greedy, "exact_s": times[0], "greedy_s": times[1]})
    result = {
        "cases": num_cases,
        "differ": worst,
        "exact_s": report.spread(exact_s),
        "greedy_s": report.spread(greedy_s),
        "on_64_gpus": large,
        "on_64_gpus_exact_s": report.spread([each["exact_s"] for each in large]),
    }
    print({name: result[name] for name in ("cases", "differ", "exact_s", "greedy_s", "on_64_gpus_exact_s")})
    return result


def compare(nodes: list, present: list, wanted: dict) -> tuple[int, int, tuple[float, float]]:
    """Instances kept by the integer program and by the greedy, and the CPU seconds of both."""
    started_s = time.process_time()
    exact = most_kept(nodes, present, wanted, time_limit_s=120.0)
    assert exact is not None
    between_s = time.process_time()
    names = {str(node): num for node, num in enumerate(nodes)}
    held = [(str(each.node), len(each.gpus)) for each in present]
    greedy = least_movement(names, held, tp_layout(wanted))
    times = between_s - started_s, time.process_time() - between_s
    return len(set(exact) & set(present)), len(greedy.kept), times


def load(args: argparse.Namespace) -> dict:
    rows = []
    for rps in (0.5, 1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42):
        plan = solve(make_problem([RequestClass(1075.0, 256.0, rps, 9.5)]), time_limit_s=60.0)
        outcome = plan.outcome
        rows.append(
            {
                "rps": rps,
                "status": plan.status,
                "reason": plan.reason,
                "needed": {degree: plan.needed.get(degree, 0) for degree in DEGREES},
                "layout": {degree: plan.layout.get(degree, 0) for degree in DEGREES},
                "mean_threshold": outcome and outcome.mean_threshold,
                "latency_s": outcome and outcome.latency_s,
            }
        )
        print(rows[-1], flush=True)
    draw(rows)
    return {"preset": PRESET, "nodes": [4] * 4, "rows": rows}


def draw(rows: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rps = [row["rps"] for row in rows]
    figure, (gpus, quality) = pyplot.subplots(2, 1, sharex=True, figsize=(7.5, 6))
    for name, style in (("layout", "-"), ("needed", ":")):
        for degree, colour in zip(DEGREES, ("tab:blue", "tab:orange", "tab:green"), strict=True):
            counts = [row[name][degree] for row in rows]
            gpus.step(rps, counts, style, where="mid", color=colour, label=f"TP-{degree}, {name}")
    gpus.set_ylabel("instances")
    gpus.legend(fontsize=8)
    feasible = [row for row in rows if row["mean_threshold"] is not None]
    known = [row["rps"] for row in feasible]
    quality.plot(known, [row["mean_threshold"] for row in feasible], "k-", label="mean threshold")
    quality.set_ylabel("mean threshold")
    quality.set_xlabel("requests a second, 1075 + 256 tokens, SLO 9.5 s, 16 GPUs")
    latency = quality.twinx()
    latency.plot(known, [row["latency_s"] for row in feasible], "r--")
    latency.set_ylabel("latency, s", color="r")
    figure.tight_layout()
    figure.savefig(PLOT, dpi=110)


# ---- the day


def simulate_day(seed: int, layout: str, reconfigure_s: float | None, num_hours: int) -> dict:
    """The requests that arrive in the first `num_hours` of the day, played to their end."""
    tp = tuple(int(part) for part in layout.split(","))
    scenario = replace(get_scenario("diurnal"), layout=tp)
    config = make_config(scenario, "dlmserve", reconfigure_every_s=reconfigure_s)
    hour_s = scenario.duration_s / 24
    jobs = [job for job in scenario.jobs(seed) if job.arrived_at < num_hours * hour_s]
    ledger = Simulator(config, scenario, seed, "average", jobs=jobs).run()
    low_end_s = LOW_LOAD_HOURS * hour_s
    return {
        "seed": seed,
        "layout": layout,
        "reconfigure_every_s": reconfigure_s,
        "hours": num_hours,
        "all": ledger.result(),
        "low_load": ledger.result(0.0, low_end_s),
        "high_load": ledger.result(low_end_s),
    }


def diurnal(args: argparse.Namespace) -> list[dict]:
    layouts = [(PLANNED_BEFORE, RECONFIGURE_S), *((layout, None) for layout in FIXED)]
    runs = [(seed, layout, every, args.hours) for seed in args.seeds for layout, every in layouts]
    with ProcessPoolExecutor(args.jobs) as pool:
        results = []
        for result in pool.map(simulate_day, *zip(*runs, strict=True)):
            results.append(result)
            every, whole, low = result["reconfigure_every_s"], result["all"], result["low_load"]
            print(
                f"seed {result['seed']}, {result['layout']}{f', reconfigured every {every:g} s' if every else ''}: "
                f"attainment {whole['attainment']:.2%}, threshold {whole['mean_threshold']:.3f}, "
                f"latency {whole['latency_s']['mean']:.3f} s, at low load {low['latency_s']['mean']:.3f} s",
                flush=True,
            )
    return results


PARTS = {part.__name__: part for part in (stage1, stage2, load, diurnal)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (diurnal)")
    parser.add_argument("--hours", type=int, default=24, help="of the day (diurnal; default: 24)")
    parser.add_argument(
        "--seeds", type=read_integers, default=(SEED,), help="with commas between (diurnal; default: 0)"
    )
    args = parser.parse_args()
    Path("bench/results").mkdir(exist_ok=True)
    for name in [args.only] if args.only else PARTS:
        report.write(f"bench/results/planner_{name}.json", SEED, PARTS[name](args))


if __name__ == "__main__":
    main()
