"""What response refresh costs in accuracy: python -m bench.refresh [--n 660] [--block-length 32,8]

The embedded model solves held-out problems (bench/tasks.py) in this process with the real engine, dual cache, at
threshold 0.9: once with the whole canvas recomputed at each block, then with only the response recomputed but at
every k-th block, and never but at the first. Beside them, what lower thresholds with full refresh cost: the other
way to save the same time. Only problems whose answer needs more than one block can tell refreshes apart, so they
are counted on their own. Writes bench/results/refresh.json.
"""

import argparse
import time

from bench import report, tasks
from dlmserve import LLM, DecodingParams

NEVER = 1000  # blocks: more than any answer has
SETTINGS = (
    ("full", 0.9),
    ("response:2", 0.9),
    ("response:4", 0.9),
    ("response:8", 0.9),
    (f"response:{NEVER}", 0.9),
    ("full", 0.8),
    ("full", 0.7),
    ("full", 0.6),
    ("full", 0.5),
)


def measure(
    llm: LLM, problems: list[tasks.Problem], block_length: int, refresh: str, threshold: float
) -> dict:
    """Accuracy over all problems, and over those whose right answer needs more than one block."""
    params = DecodingParams(
        gen_length=128, block_length=block_length, threshold=threshold, refresh=refresh, cache="dual"
    )
    began_at = time.perf_counter()
    outs = llm.generate([encode(llm, problem) for problem in problems], params)
    right = [tasks.score(problem, out.text) for problem, out in zip(problems, outs, strict=True)]
    is_long = [num_tokens(llm, problem) > block_length for problem in problems]
    long = [score for score, kept in zip(right, is_long, strict=True) if kept]
    return {
        "block_length": block_length,
        "refresh": refresh,
        "threshold": threshold,
        "accuracy": sum(right) / len(right),
        "num_problems": len(right),
        "accuracy_long": sum(long) / len(long) if long else None,
        "num_long": len(long),
        "steps": sum(len(out.steps) for out in outs) / len(outs),
        "wall_s": time.perf_counter() - began_at,
    }


def encode(llm: LLM, problem: tasks.Problem) -> list[int]:
    assert llm.tokenizer
    return llm.tokenizer.encode_chat([{"role": "user", "content": problem.prompt}])


def num_tokens(llm: LLM, problem: tasks.Problem) -> int:
    """Of the right answer with its EOS."""
    assert llm.tokenizer
    return len(llm.tokenizer.encode(problem.answer)) + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=660, help="problems, the tasks in turn (default: 660)")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--block-length", default="32,8", help="with commas between (default: 32,8)")
    args = parser.parse_args()
    problems = tasks.problems("test", args.n, args.seed)
    llm = LLM("tiny", max_num_seqs=64)
    results = []
    print(f"{'block':>5} {'refresh':>14} {'threshold':>9} {'accuracy':>8} {'long answers':>14} {'steps':>6}")
    for block_length in map(int, args.block_length.split(",")):
        for refresh, threshold in SETTINGS:
            found = measure(llm, problems, block_length, refresh, threshold)
            results.append(found)
            long = "-" if found["accuracy_long"] is None else f"{found['accuracy_long']:.3f}"
            print(
                f"{block_length:>5} {refresh:>14} {threshold:>9} {found['accuracy']:>8.3f} "
                f"{long + ' of ' + str(found['num_long']):>14} {found['steps']:>6.1f}",
                flush=True,
            )
    llm.close()
    report.write("bench/results/refresh.json", args.seed, results)


if __name__ == "__main__":
    main()
