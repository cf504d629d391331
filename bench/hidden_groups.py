"""Groups of steps for bench/hidden_states.py, errors in each, and intervals from drawing prompts anew.

Owns the statistics; knows nothing of where predictions come from.
"""

import numpy as np

from dlmserve.control.policy.step_predictor import error_ratio
from dlmserve.control.policy.step_table import StepTable
from dlmserve.messages import RequestStep
from dlmserve.training.courses import Course

NUM_DRAWS = 2000
BASE = "without"


def answer_length(course: Course, eos_ids: tuple[int, ...]) -> int:
    """Output positions before the first end token."""
    ends = [at for step in course.steps for at in end_columns(step, eos_ids)]
    return min([*ends, course.spec.limit]) - course.spec.output_start


def end_columns(step: RequestStep, eos_ids: tuple[int, ...]) -> list[int]:
    """Where it unmasked end tokens."""
    return [at for at, token in zip(step.positions, step.tokens, strict=True) if token in eos_ids]


def end_read(courses: list[Course], chances: list[np.ndarray], eos_ids: tuple[int, ...]) -> dict[str, float]:
    """How far the first position that is likely an end token is from where the answer then ends.

    chances: P(end token) of each output position, for each course.
    """
    answers = [answer_length(course, eos_ids) for course in courses]
    read = [int(np.argmax(np.append(each > 0.5, True))) for each in chances]
    wrong = np.abs(np.subtract(read, answers))
    return {"error": float(wrong.sum() / sum(answers)), "exact": float((wrong == 0).mean())}


def groups_of(courses: list[Course], table: StepTable, eos_ids: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Rows bool [n] of each group; those of a step that at least one came before, but for the arrivals."""
    early, unended, later = [], [], []
    for course in courses:
        seen, block_length = False, course.spec.decoding.block_length
        answer = answer_length(course, eos_ids)
        is_early = answer < (course.spec.output_end - course.spec.output_start) / 2
        for step in course.steps:
            early.append(is_early)
            unended.append(not seen)
            later.append(answer // block_length > step.block)
            seen = seen or bool(end_columns(step, eos_ids))
    is_early, unended, later = (np.array(rows) for rows in (early, unended, later))
    after = table.started
    return {
        "all": after,
        "ends early": after & is_early,
        "fills most": after & ~is_early,
        "ends early, no end token yet": after & is_early & unended,
        "ends early, in a later block": after & is_early & later,
        "ends early, after the first recompute": (table.steps_done == 1) & is_early,
        "after the first recompute": table.steps_done == 1,
        "on arrival": ~after,
    }


def compare(
    table: StepTable, found: dict[str, np.ndarray], groups: dict[str, np.ndarray], seed: int
) -> dict[str, dict]:
    """By group: how many rows and prompts, and each predictor's error with its difference to BASE, in points."""
    results = {}
    for group, rows in groups.items():
        results[group] = {"steps": int(rows.sum()), "prompts": len(np.unique(table.requests[rows]))}
        print(f"{group}: {results[group]['steps']} steps of {results[group]['prompts']} prompts")
        if not rows.any():
            continue
        part = table.select(rows)
        for name in sorted(found, key=lambda name: name != BASE):
            error = error_ratio(found[name][rows], part.steps_left)
            low, high = _interval(part, found[BASE][rows], found[name][rows], seed)
            results[group][name] = {"error": error, "difference": [low, high]}
            print(f"  {name:>14} {error:.1%}  {100 * low:+.2f} to {100 * high:+.2f}", flush=True)
    return results


def _interval(table: StepTable, base: np.ndarray, other: np.ndarray, seed: int) -> tuple[float, float]:
    """95% of the difference in error ratio, prompts drawn with replacement."""
    _, prompts = np.unique(table.requests, return_inverse=True)
    more = np.abs(other - table.steps_left) - np.abs(base - table.steps_left)
    sums = np.stack([np.bincount(prompts, weights) for weights in (more, table.steps_left)])
    num = sums.shape[1]
    drawn = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), NUM_DRAWS)
    differences, totals = sums @ drawn.T
    low, high = np.percentile(differences / totals, (2.5, 97.5))
    return float(low), float(high)
