"""Measures a tiny checkpoint on held-out problems: accuracy and denoising steps against the threshold.

Owns the measurement and its tables. Knows nothing about training.

    python -m examples.train_tiny.report --model dlmserve/checkpoints/tiny
"""

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from bench import tasks
from examples.train_tiny.decode import Decoding, generate
from examples.train_tiny.model import LLaDA
from examples.train_tiny.tokenizer import decode_answer, encode_prompt
from examples.train_tiny.tokenizer import load as load_tokenizer

THRESHOLDS = [0.95, 0.9, 0.8, 0.7, 0.6, 0.5]


@dataclass(frozen=True, slots=True)
class Result:
    """One decoding of a list of problems; `texts`, `right` and `num_steps` have one entry per problem."""

    problems: list[tasks.Problem]
    texts: list[str]
    right: list[bool]
    num_steps: list[int]

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    def accuracy_by_task(self) -> dict[str, float]:
        by_task = defaultdict(list)
        for problem, right in zip(self.problems, self.right, strict=True):
            by_task[problem.task].append(right)
        return {task: sum(right) / len(right) for task, right in by_task.items()}

    def summary(self) -> str:
        per_task = " ".join(f"{task} {share:.2f}" for task, share in self.accuracy_by_task().items())
        return f"accuracy {self.accuracy:.3f} steps {np.mean(self.num_steps):.1f} {per_task}"


def measure(
    model: LLaDA, tokenizer: Tokenizer, how: Decoding, num_problems: int, seed: int, rows: int = 32
) -> Result:
    """Decodes held-out problems, in batches of prompts of similar length."""
    problems = tasks.problems("test", num_problems, seed)
    prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
    order = sorted(range(num_problems), key=lambda i: len(prompts[i]))
    texts, num_steps = [""] * num_problems, [0] * num_problems
    for first in range(0, num_problems, rows):
        batch = order[first : first + rows]
        generated, steps = generate(model, [prompts[i] for i in batch], how)
        for i, ids, taken in zip(batch, generated, steps, strict=True):
            texts[i], num_steps[i] = decode_answer(tokenizer, ids), taken
    right = [tasks.score(problem, text) for problem, text in zip(problems, texts, strict=True)]
    return Result(problems, texts, right, num_steps)


def load_model(folder: Path) -> LLaDA:
    """The exported weights as fp32."""
    model = LLaDA(json.loads((folder / "config.json").read_text()))
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval()


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row_of(threshold: float, result: Result) -> list[str]:
    p10, p50, p90 = (f"{value:.0f}" for value in np.percentile(result.num_steps, [10, 50, 90]))
    steps = [f"{np.mean(result.num_steps):.1f}", p10, p50, p90, str(max(result.num_steps))]
    return [str(threshold), f"{result.accuracy:.3f}", *steps]


def print_tables(how: Decoding, results: dict[float, Result]) -> None:
    """Prints accuracy and steps per threshold, then accuracy per task and threshold."""
    cache = "dual cache" if how.dual_cache else "no cache"
    print(f"\n{cache}, {how.gen_length} tokens, block length {how.block_length}\n")
    header = ["threshold", "accuracy", "steps mean", "p10", "p50", "p90", "max"]
    print(table(header, [row_of(threshold, result) for threshold, result in results.items()]) + "\n")
    by_task = [result.accuracy_by_task() for result in results.values()]
    rows = [[task, *(f"{shares[task]:.2f}" for shares in by_task)] for task in by_task[0]]
    print(table(["task", *map(str, results)], rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy and steps as Markdown tables.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--n", type=int, default=600, help="problems, the tasks in turn")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--gen-length", type=int, default=128)
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS)
    parser.add_argument("--caches", choices=["none", "dual"], nargs="+", default=["none", "dual"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    for cache in args.caches:
        how = Decoding(gen_length=args.gen_length, dual_cache=cache == "dual")
        results = {
            threshold: measure(model, tokenizer, replace(how, threshold=threshold), args.n, args.seed)
            for threshold in args.thresholds
        }
        print_tables(how, results)


if __name__ == "__main__":
    main()
