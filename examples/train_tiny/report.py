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


def print_row(*cells: object) -> None:
    """One row of a Markdown table; at once, as the measurement takes minutes."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_tables(
    model: LLaDA, tokenizer: Tokenizer, how: Decoding, thresholds: list[float], num_problems: int, seed: int
) -> None:
    """Measures and prints accuracy and steps per threshold, then accuracy per task and threshold."""
    cache = "dual cache" if how.dual_cache else "no cache"
    print(f"\n{cache}, {how.gen_length} tokens, block length {how.block_length}\n")
    print_row("threshold", "accuracy", "steps mean", "p10", "p50", "p90", "max")
    print_row(*["---"] * 7)
    by_task = []
    for threshold in thresholds:
        result = measure(model, tokenizer, replace(how, threshold=threshold), num_problems, seed)
        steps = result.num_steps
        percentiles = (f"{value:.0f}" for value in np.percentile(steps, [10, 50, 90]))
        print_row(threshold, f"{result.accuracy:.3f}", f"{np.mean(steps):.1f}", *percentiles, max(steps))
        by_task.append(result.accuracy_by_task())
    print()
    print_row("task", *thresholds)
    print_row(*["---"] * (1 + len(thresholds)))
    for task in by_task[0]:
        print_row(task, *(f"{shares[task]:.2f}" for shares in by_task))


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy and steps as Markdown tables.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--n", type=int, default=660, help="problems, the tasks in turn")
    parser.add_argument("--seed", type=int, default=9)
    parser.add_argument("--gen-length", type=int, default=128)
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS)
    parser.add_argument("--caches", choices=["none", "dual"], nargs="+", default=["none", "dual"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    for cache in args.caches:
        how = Decoding(gen_length=args.gen_length, dual_cache=cache == "dual")
        print_tables(model, tokenizer, how, args.thresholds, args.n, args.seed)


if __name__ == "__main__":
    main()
