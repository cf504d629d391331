"""One workload on a live server and in the simulator: how far apart their latencies are.

    python -m bench.live_vs_sim [--rps 8,16] [--seeds 0,1,2] [--json bench/results/live_vs_sim.json]

Records on the real engine which tokens each request unmasks in which step, serves the requests (one rank of one
thread; the client is this process, so another core should be free), and plays the same arrivals in the
simulator with that recording and the server's own step times: its profile as the reports have corrected it by
the end of the run (`profile` in GET /v1/cluster). What a message takes between head and rank is measured before:
with one request at a time, it is what is left of the latency without the steps.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bench import report, tasks
from bench.load import start_server
from dlmserve import LLM, DecodingParams
from dlmserve.config import ServerConfig
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.flags import read_integers, read_numbers
from dlmserve.loadtest import Run, Shot, fire, poisson_times
from dlmserve.messages import RequestStep
from dlmserve.simulation.recorded import Course, RecordedStep, Recording
from dlmserve.simulation.results import Ledger
from dlmserve.simulation.scenarios import get_scenario
from dlmserve.simulation.workloads import Job
from dlmserve.simulator import Simulator

THRESHOLD = 0.9
BLOCK = 32
OUTPUT = 128
SLO_S = 60.0  # nothing is judged by it here
WARM_UP = 40  # requests
ALONE_S = 0.25  # between requests that never meet


def record(prompts: list[str]) -> tuple[list[Job], list[Mapping[float, Course]]]:
    """Each prompt decoded alone: its job (arrival still 0), and its course."""
    llm = LLM("tiny", device="cpu")
    assert llm.tokenizer
    params = DecodingParams(gen_length=OUTPUT, block_length=BLOCK, threshold=THRESHOLD)
    jobs: list[Job] = []
    courses: list[Mapping[float, Course]] = []
    for prompt in prompts:
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        course: list[RecordedStep] = []
        tokens: dict[int, int] = {}

        def note(_: int, step: RequestStep, start: int = len(ids), course=course, tokens=tokens) -> None:
            places = [position - start for position in step.positions]
            tokens |= dict(zip(places, step.tokens, strict=True))
            in_block = tuple(place - step.block * BLOCK for place in places)
            course.append(RecordedStep(step.block, in_block, tuple(step.confidences)))

        llm.generate([ids], params, note)
        ends = [place for place, token in tokens.items() if token in llm.info.eos_ids]
        jobs.append(Job(0.0, len(ids), OUTPUT, min(ends, default=OUTPUT)))
        courses.append({THRESHOLD: course})
    llm.close()
    return jobs, courses


def play(
    times: list[float],
    jobs: list[Job],
    courses: list[Mapping[float, Course]],
    profile: dict,
    head_s: float,
) -> Ledger:
    """The same arrivals in the simulator; `head_s`: from a step's end to commands that answer it, in an inbox."""
    arrived = [replace(job, arrived_at=at_s) for job, at_s in zip(jobs, times, strict=True)]
    scenario = replace(get_scenario("gsm8k-4gpu"), layout=(1,), slo_s=SLO_S, overhead_s=0.0, head_s=head_s)
    simulator = Simulator(
        ServerConfig(policy="infaas"),
        scenario,
        0,
        "average",
        make_costs=lambda: CostModel.from_profile(profile),
        recording=Recording(arrived, courses),
    )
    return simulator.run()


def latencies(run: Run) -> list[float]:
    """The server's own, from the arrival at the scheduler on: the simulator has no HTTP."""
    assert not run.errors, run.errors
    return [answer.dlm["latency_ms"] / 1e3 for answer in run.answers]


def finished_s(ledger: Ledger) -> list[float]:
    return [outcome.latency_s for outcome in ledger.outcomes if outcome.latency_s is not None]


def compare(live_s: list[float], ledger: Ledger) -> dict:
    simulated_s = finished_s(ledger)
    figures = {}
    for name, of in {"mean": np.mean, "p50": np.median, "p95": lambda x: np.percentile(x, 95)}.items():
        live, simulated = float(of(live_s)), float(of(simulated_s))
        figures[name] = {
            "live_ms": 1e3 * live,
            "simulated_ms": 1e3 * simulated,
            "off": simulated / live - 1,
        }
    return figures


def serve_and_play(seed: int, num_requests: int, rates: list[float]) -> list[dict]:
    """One server's runs, one for each rate."""
    prompts = [problem.prompt for problem in tasks.problems("test", num_requests, seed)]
    jobs, courses = record(prompts)
    process, url, _ = start_server(["--device", "cpu", "--policy", "infaas"])

    def both(times: list[float], head_s: float) -> tuple[list[float], Ledger]:
        shots = [Shot(at_s, prompt) for at_s, prompt in zip(times, prompts, strict=False)]
        run = asyncio.run(fire(url, shots))
        return latencies(run), play(times, jobs[: len(times)], courses, run.cluster["profile"], head_s)

    results = []
    try:
        both(poisson_times(WARM_UP, 8.0, 1), 0.0)
        live_s, ledger = both([ALONE_S * i for i in range(WARM_UP)], 0.0)
        head_s = max(0.0, float(np.mean(live_s) - np.mean(finished_s(ledger))))
        for rps in rates:
            figures = compare(*both(poisson_times(num_requests, rps, seed), head_s))
            results.append({"seed": seed, "rps": rps, "head_ms": 1e3 * head_s} | figures)
            print(json.dumps(results[-1]), flush=True)
    finally:
        process.terminate()
        process.wait()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rps", type=read_numbers, default=(8.0, 16.0, 24.0), help="rates, one run each")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=read_integers, default=(0,), help="one server for each")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    results = [one for seed in args.seeds for one in serve_and_play(seed, args.requests, args.rps)]
    off = [result["mean"]["off"] for result in results]
    print(
        f"mean latency, simulated over live: {report.spread(off)}; within 15%: {sum(abs(x) < 0.15 for x in off)}"
    )
    if args.json:
        report.write(args.json, args.seeds[0], results)


if __name__ == "__main__":
    main()
