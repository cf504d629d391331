"""The simulated bars: python -m bench.simulations [--only PART] [--seeds 0,1,2] [--jobs N]

Parts:
  calibration  where fixed 0.9 falls to 50% attainment: the one free constant, the overhead of a step, is
               chosen for that
  published    `tediserve` and its ablations against the published table
  dlmserve     `dlmserve` at 9.5 requests a second, and where it falls to 50%
  ablation     what each lever of `dlmserve` contributes, at a rate that all levers together can just bear
  stagger      steps of fewer tokens, so that requests do not recompute together
  capacity     up to which rate 16 GPUs keep up at 0.9, so that a longer run has no longer latencies: what the trace's
               peak is scaled by
  trace        the day of 16 GPUs under INFaaS, TeDiServe and dlmserve (--requests: a part of the day's requests, in
               as much less time)

Each part writes bench/results/simulations_PART.json: one entry of `dlmserve simulate --json` for each run, and the
CPU seconds that it took (`cpu_s`, the predictor's training included).
"""

import argparse
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import mean

from bench import report
from dlmserve.control.policy.policies import POLICIES
from dlmserve.simulate import make_config, simulate
from dlmserve.simulation.scenarios import DAY_REQUESTS, get_scenario

# SLO attainment in % by rate: fixed 0.9, Algorithm 1 only, Algorithm 2 only, both (TeDiServe, GSM8K).
PUBLISHED = {
    7.5: (92.0, 99.8, 100.0, 100.0),
    8.0: (27.1, 97.9, 99.6, 99.8),
    8.5: (8.5, 77.7, 96.1, 97.7),
    9.0: (6.2, 30.3, 55.3, 72.7),
}
VARIANTS = {
    "fixed 0.9": ("infaas", {}),
    "Alg. 1 only": ("tediserve", {"alg2": 0.0}),
    "Alg. 2 only": ("tediserve", {"alg1": 0.0}),
    "both": ("tediserve", {}),
}
ABLATION_RPS = 26.0
CAPACITY_RPS, CAPACITY_REQUESTS = (45.0, 47.0, 49.0, 51.0), (6000, 12000)
STEP_TOKENS = (16384, 4096, 2048)
TRACE_POLICIES = ("infaas", "tediserve", "dlmserve")


@dataclass(frozen=True)
class Run:
    """`label` names the row of the table; all else is what is simulated."""

    label: str
    scenario: str
    policy: str
    rps: float | None  # None: the scenario's
    seed: int
    policy_options: dict[str, float] = field(default_factory=dict)
    max_resident_tokens: int | None = None  # None: the policy's own limit
    num_requests: int | None = None
    arrivals: str | None = None
    max_step_tokens: int | None = None


def perform(run: Run) -> dict:
    scenario = get_scenario(run.scenario)
    given = {
        "rps": run.rps,
        "arrivals": run.arrivals,
        "num_requests": run.num_requests,
        "max_step_tokens": run.max_step_tokens,
    }
    if run.num_requests and scenario.arrivals == "day":
        given["duration_s"] = scenario.duration_s * run.num_requests / DAY_REQUESTS
    scenario = replace(scenario, **{name: value for name, value in given.items() if value is not None})
    config = make_config(
        scenario,
        run.policy,
        policy_options=run.policy_options,
        max_resident_tokens=run.max_resident_tokens,
    )
    began_at = time.process_time()
    result = simulate(config, scenario, run.seed)
    return {"label": run.label, "cpu_s": time.process_time() - began_at} | result


def perform_all(runs: list[Run], jobs: int) -> list[dict]:
    """In order; prints a line for each as it ends."""
    with ProcessPoolExecutor(jobs) as pool:
        results = []
        for result in pool.map(perform, runs):
            results.append(result)
            met, threshold = f"{result['attainment']:.1%}", f"{result['mean_threshold']:.3f}"
            print(
                f"{result['label']}, {result['rps']:g} rps, seed {result['seed']}: {met} at {threshold},"
                f" {result['cpu_s']:.0f} s of CPU",
                flush=True,
            )
    return results


# ---- the parts


def calibration(seeds: Iterable[int], num_requests: int | None) -> list[Run]:
    return [
        Run("fixed 0.9", "gsm8k-4gpu", "infaas", rps, seed, num_requests=num_requests)
        for rps in (7.6, 7.8, 8.0)
        for seed in seeds
    ]


def published(seeds: Iterable[int], num_requests: int | None) -> list[Run]:
    return [
        Run(label, "gsm8k-4gpu", policy, rps, seed, options, num_requests=num_requests)
        for rps in PUBLISHED
        for label, (policy, options) in VARIANTS.items()
        for seed in seeds
    ]


def dlmserve(seeds: Iterable[int], num_requests: int | None) -> list[Run]:
    return [
        Run("dlmserve", "gsm8k-4gpu", "dlmserve", rps, seed, num_requests=num_requests)
        for rps in (9.5, 16.0, 20.0, 24.0, 28.0)
        for seed in seeds
    ]


def ablation(seeds: Iterable[int], num_requests: int | None) -> list[Run]:
    """All levers, each one off, each one alone; and the paper's resident limit with all levers."""
    known = POLICIES["dlmserve"].known_options
    levers = [name for name, value in known.items() if value == 1.0 and name != "drop_late"]
    off = dict.fromkeys(levers, 0.0)
    variants = {"all levers": {}, **{f"without {name}": {name: 0.0} for name in levers}}
    variants |= {"no lever": off, **{f"only {name}": off | {name: 1.0} for name in levers}}
    run = partial(Run, scenario="gsm8k-4gpu", policy="dlmserve", rps=ABLATION_RPS, num_requests=num_requests)
    runs = [run(label=k, seed=seed, policy_options=v) for k, v in variants.items() for seed in seeds]
    for label, options in (("all levers, 8192 resident tokens", {}), ("no lever, 8192 resident tokens", off)):
        runs += [run(label=label, seed=s, policy_options=options, max_resident_tokens=8192) for s in seeds]
    return runs


def capacity(seeds: Iterable[int], num_requests: int | None) -> list[Run]:
    return [
        Run(
            f"{num} requests",
            "sharegpt-16gpu",
            "infaas",
            rps,
            seed,
            {"drop_late": 0.0},
            num_requests=num,
            arrivals="poisson",
        )
        for rps in CAPACITY_RPS
        for num in ([num_requests] if num_requests else CAPACITY_REQUESTS)
        for seed in seeds
    ]


def stagger(seeds: Iterable[int], num_requests: int | None) -> list[Run]:
    return [
        Run(
            f"{policy}, steps of {tokens} tokens",
            "gsm8k-4gpu",
            policy,
            rps,
            seed,
            num_requests=num_requests,
            max_step_tokens=tokens,
        )
        for policy, rps in (("infaas", 7.8), ("dlmserve", ABLATION_RPS))
        for tokens in STEP_TOKENS
        for seed in seeds
    ]


def trace(seeds: Iterable[int], num_requests: int | None) -> list[Run]:
    return [
        Run(policy, "sharegpt-16gpu", policy, None, seed, num_requests=num_requests)
        for policy in TRACE_POLICIES
        for seed in seeds
    ]


PARTS = {
    each.__name__: each for each in (calibration, published, dlmserve, ablation, stagger, capacity, trace)
}


# ---- tables


def print_table(results: list[dict]) -> None:
    """Means over the seeds, one line for each label and rate; published figures where there are any."""
    rows: dict[tuple[str, float], list[dict]] = {}
    for result in results:
        rows.setdefault((result["label"], result["rps"]), []).append(result)
    titles = ("rps", "SLO met %", "min..max", "published", "threshold", "accuracy %", "p50 s", "p99 s")
    print(f"\n{'':34}" + "".join(f"{title:>12}" for title in titles))
    for (label, rps), same in rows.items():
        met = [100 * result["attainment"] for result in same]
        latencies = [result["latency_s"] for result in same]
        figures = (
            f"{rps:.4g}",
            f"{mean(met):.1f}",
            f"{min(met):.1f}..{max(met):.1f}",
            published_figure(label, rps),
            f"{mean(result['mean_threshold'] for result in same):.3f}",
            f"{100 * mean(result['accuracy'] for result in same):.1f}",
            *(f"{mean(latency[p] for latency in latencies):.2f}" for p in ("p50", "p99")),
        )
        print(f"{label:34}" + "".join(f"{figure:>12}" for figure in figures))


def published_figure(label: str, rps: float) -> str:
    if label not in VARIANTS or rps not in PUBLISHED:
        return "-"
    return f"{PUBLISHED[rps][list(VARIANTS).index(label)]:.1f}"


def crossing(results: list[dict], label: str) -> float | None:
    """The rate at which the mean attainment falls through 50%, linear between the simulated rates."""
    mine = [result for result in results if result["label"] == label]
    rates = sorted({result["rps"] for result in mine})
    met = [mean(result["attainment"] for result in mine if result["rps"] == rate) for rate in rates]
    for (low_rate, high), (high_rate, low) in pairwise(zip(rates, met, strict=True)):
        if high >= 0.5 > low:
            return low_rate + (high_rate - low_rate) * (high - 0.5) / (high - low)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--seeds", default="0,1,2", help="with commas between (default: 0,1,2)")
    parser.add_argument("--requests", type=int, help="of each run (default: 2000, the trace 63,736)")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    args = parser.parse_args()
    seeds = tuple(int(seed) for seed in args.seeds.split(","))
    for name in [args.only] if args.only else PARTS:
        results = perform_all(PARTS[name](seeds, args.requests), args.jobs)
        report.write(f"bench/results/simulations_{name}.json", seeds[0], results)
        print_table(results)
        for label in dict.fromkeys(result["label"] for result in results):
            if (rate := crossing(results, label)) is not None:
                print(f"{label}: 50% at {rate:.2f} requests a second")


if __name__ == "__main__":
    main()
