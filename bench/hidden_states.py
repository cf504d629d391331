"""What hidden states add to a prediction of remaining steps: python -m bench.hidden_states [--n 550] [--blocks 32,8]

The embedded model answers held-out problems (bench/tasks.py) at every threshold, outputs of 32 to 256 tokens in turn,
with blocks of 32 tokens (most answers end in the first) and of 8 (most go over several, as a large model's do). A
forward over each canvas that a recompute step met gives the hidden states of the whole output and the probability of
an end token at each position. Then predictors are trained on four fifths of the prompts and asked about the others,
five times. Readings, each as two features beside those that need no hidden states:

  network       as served: the mean and the first of the block's masked positions, read by a network
  network 4     the same network on four vectors: the first, and the means of this block, of the next and of the rest
  end in block  masks before the first position of the block where an end token is more likely than not, and masks
                expected before the end, from the probabilities at the block's recompute step
  end           the same from the whole output
  true end      the same with the end that the answer will have, from arrival on ("later": from the first step on)
  alone         only what the network reads, no trees

Differences are to trees without any reading, with 95% intervals from drawing prompts anew. `--cache FOLDER` keeps
what was recorded. Writes bench/results/hidden_states.json.
"""

import argparse
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from bench import report, tasks
from bench.hidden_groups import answer_length, compare, end_columns, end_read, groups_of
from dlmserve import LLM
from dlmserve.checkpoint import ModelInfo
from dlmserve.control.policy.predictions import HIDDEN_BLOCKS
from dlmserve.control.policy.step_predictor import COLUMNS, WITHOUT_HIDDEN, CatBoostPredictor, predict_rows
from dlmserve.control.policy.step_table import StepTable
from dlmserve.training.courses import Course, run_courses, step_table
from dlmserve.training.hidden import hidden_table, read_unseen, train_network, with_outlooks
from dlmserve.training.learn import hidden_alone
from dlmserve.training.prompts import encode_prompts

THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5)
LENGTHS = (32, 64, 96, 128, 256)
NUM_FOLDS = 5
VALIDATION = 0.15  # of the prompts that are learnt from: they stop the network's training
HEAD = "model.transformer.ff_out.weight"


@dataclass(frozen=True)
class State:
    """At a recompute step: four pooled vectors f32 [4d], and P(end token) f32 [output positions], 0 where unmasked."""

    pooled: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class Recording:
    courses: list[Course]
    states: list[list[State]]  # of each course's recompute steps


def record(llm: LLM, prompts: list[list[int]], block_length: int) -> Recording:
    llm.info = replace(llm.info, generation=llm.info.generation | {"block_length": block_length})
    courses = run_courses(llm, prompts, THRESHOLDS, LENGTHS, lambda: None)
    # Logits are hidden states times the head, which has more rows than columns: its inverse gives them back.
    inverse = torch.linalg.pinv(load_file(Path(llm.info.path) / "model.safetensors")[HEAD].float()).T
    known: dict[bytes, State] = {}  # thresholds share their first canvas
    return Recording(courses, [_states(llm, course, inverse, known) for course in courses])


def _states(llm: LLM, course: Course, inverse: torch.Tensor, known: dict[bytes, State]) -> list[State]:
    spec, canvas, states = course.spec, np.array(course.spec.canvas), []
    for step in course.steps:
        if step.recompute:
            key = canvas.tobytes() + bytes([step.block])
            if key not in known:
                logits = llm.logits(canvas.tolist())[spec.output_start :]
                masked = torch.from_numpy(canvas[spec.output_start :] == llm.info.mask_id)
                ends = logits.softmax(-1)[:, list(llm.info.eos_ids)].sum(-1) * masked
                block = slice(
                    step.block * spec.decoding.block_length, (step.block + 1) * spec.decoding.block_length
                )
                known[key] = State(_pool(logits[:, : len(inverse)] @ inverse, masked, block), ends.numpy())
            states.append(known[key])
        canvas[step.positions] = step.tokens
    return states


def _pool(hidden: torch.Tensor, masked: torch.Tensor, block: slice) -> np.ndarray:
    length = block.stop - block.start
    here = hidden[block][masked[block]]
    after = [hidden[block.stop : block.stop + length], hidden[block.stop + length :]]
    means = [part.mean(0) if len(part) else torch.zeros_like(here[0]) for part in (here, *after)]
    return torch.cat((here[0], *means)).numpy()


def end_features(recording: Recording, reads: str, info: ModelInfo) -> np.ndarray:
    """[n, 2], a row for each step, over the output: masks before the likely end, and masks expected before the end."""
    rows = []
    for course, states in zip(recording.courses, recording.states, strict=True):
        start, length, left = course.spec.output_start, course.spec.decoding.block_length, iter(states)
        canvas, end = np.array(course.spec.canvas[start:]), course.spec.limit - start
        truth = np.arange(len(canvas)) >= answer_length(course, info.eos_ids)
        ends = truth if reads == "true end" else np.zeros(len(canvas))
        for step in course.steps:
            masked = canvas[:end] == info.mask_id
            chances = ends[:end] * masked
            likely = chances > 0.5
            before = int(np.argmax(likely)) if likely.any() else end
            counts = masked[:before].sum(), (masked * np.cumprod(1 - chances)).sum()
            rows.append(np.array(counts) / len(canvas))
            if reads.startswith("true end"):
                ends = truth
            elif step.recompute:
                ends = next(left).ends.copy()
                if reads == "end in block":
                    ends[: step.block * length] = ends[(step.block + 1) * length :] = 0
            canvas[np.array(step.positions, dtype=int) - start] = step.tokens
            end = min([end, *(at - start for at in end_columns(step, info.eos_ids))])
    return np.array(rows)


def predict_held_out(llm: LLM, recording: Recording, seed: int) -> tuple[StepTable, dict[str, np.ndarray]]:
    """The table of all steps, and what each predictor says of them without having seen their prompts."""
    courses, info = recording.courses, llm.info
    table = step_table(courses, info)
    requests = np.random.default_rng(seed).permutation(np.unique(table.requests))
    pooled = [
        replace(course, pooled=[each.pooled for each in states])
        for course, states in zip(courses, recording.states, strict=True)
    ]
    ends = {
        reads: _with_features(table, end_features(recording, reads, info))
        for reads in ("end in block", "end", "true end", "true end later")
    }
    found = {}
    for part in np.array_split(requests, NUM_FOLDS):
        seen, out = np.setdiff1d(requests, part), np.isin(table.requests, part)
        shuffled = np.random.default_rng(seed).permutation(seen)
        tables = ends | {
            "network": step_table(_read(courses, shuffled, seed), info),
            "network 4": step_table(_read(pooled, shuffled, seed), info),
        }
        alone = hidden_alone([course for course in courses if course.request in set(seen.tolist())])
        said = {"alone": predict_rows(alone, tables["network"].select(out))}
        for name, each in ({"without": table} | tables).items():
            columns = WITHOUT_HIDDEN if name == "without" else COLUMNS
            trees = CatBoostPredictor.train(each.select(~out), columns, seed)
            said[name] = predict_rows(trees, each.select(out))
        for name, steps in said.items():
            found.setdefault(name, np.empty(len(out)))[out] = steps
    return table, found


def _read(courses: list[Course], seen: np.ndarray, seed: int) -> list[Course]:
    """As learn() does it: of `seen` requests, what networks read that had not seen them."""
    hidden, num = hidden_table(courses), round(len(seen) * VALIDATION)
    network = train_network(hidden.of(seen[num:]), hidden.of(seen[:num]), seed)
    return with_outlooks(courses, read_unseen(network, hidden, seen, seed))


def _with_features(table: StepTable, read: np.ndarray) -> StepTable:
    features = table.features.copy()
    features[:, HIDDEN_BLOCKS : HIDDEN_BLOCKS + 2] = read
    return replace(table, features=features)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=550, help="problems; those with the same prompt count once")
    parser.add_argument("--blocks", default="32,8", help="block lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", help="folder of what was recorded, to go on from")
    parser.add_argument("--json", default="bench/results/hidden_states.json")
    args = parser.parse_args()
    llm = LLM("tiny", device="cpu")
    assert llm.tokenizer, "the embedded model has a tokenizer"
    texts = dict.fromkeys(problem.prompt for problem in tasks.problems("test", args.n, args.seed))
    prompts = encode_prompts([[{"role": "user", "content": text}] for text in texts], llm.tokenizer)
    results = {}
    for block_length in map(int, args.blocks.split(",")):
        file = Path(args.cache or "/", f"hidden_states_{args.n}_{args.seed}_{block_length}.pickle")
        if args.cache and file.exists():
            recording = pickle.loads(file.read_bytes())
        else:
            recording = record(llm, prompts, block_length)
            if args.cache:
                file.write_bytes(pickle.dumps(recording))
        table, found = predict_held_out(llm, recording, args.seed)
        groups = groups_of(recording.courses, table, llm.info.eos_ids)
        first = [states[0].ends for states in recording.states]
        results[str(block_length)] = {
            "end_read_at_first_step": end_read(recording.courses, first, llm.info.eos_ids),
            "groups": compare(table, found, groups, args.seed),
        }
    report.write(args.json, args.seed, results)


if __name__ == "__main__":
    main()
