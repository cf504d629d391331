"""Runs prompts on the real engine at every threshold and keeps each decoding's steps: its course.

Owns the recording, and turns courses into tables. The steps are played to the head's own bookkeeping afterwards,
so features are what a live server computes.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dlmserve.checkpoint import ModelInfo
from dlmserve.control.policy.request import RequestSpec
from dlmserve.control.policy.step_table import StepRecorder, StepTable
from dlmserve.llm import LLM, DecodingParams, make_decoding
from dlmserve.messages import RequestStep


@dataclass
class Course:
    """One decoding: `request` numbers its prompt; pooled: f32 [2d] of each of its recompute steps."""

    request: int
    spec: RequestSpec
    steps: list[RequestStep] = field(default_factory=list)
    pooled: list[np.ndarray] = field(default_factory=list)

    @property
    def threshold(self) -> float:
        return self.spec.decoding.value


def run_courses(
    llm: LLM,
    prompts: list[list[int]],
    thresholds: tuple[float, ...],
    lengths: tuple[int, ...],
    on_finish: Callable[[], None],
) -> list[Course]:
    """Each prompt at each threshold; prompt i has lengths[i mod len(lengths)] output tokens. Greedy.

    Raises ContextTooLong where a prompt leaves no room for its output.
    """
    courses = []
    for threshold in thresholds:
        for i, length in enumerate(lengths):
            numbers = range(i, len(prompts), len(lengths))
            params = DecodingParams(gen_length=length, threshold=threshold)
            courses += _run_batch(llm, {number: prompts[number] for number in numbers}, params, on_finish)
    return courses


def _run_batch(
    llm: LLM, prompts: dict[int, list[int]], params: DecodingParams, on_finish: Callable[[], None]
) -> list[Course]:
    courses = [Course(number, _spec(ids, params, llm.info)) for number, ids in prompts.items()]

    states: deque[np.ndarray] = deque()  # of the steps that are about to be noted, in their order

    def keep(pooled: torch.Tensor) -> torch.Tensor:
        states.extend(pooled.cpu().numpy())
        return torch.full((len(pooled), 2), torch.nan)

    def note(index: int, step: RequestStep) -> None:
        courses[index].steps.append(step)
        if step.recompute:
            courses[index].pooled.append(states.popleft())
        if step.finished:
            on_finish()

    llm.read_hidden(keep)
    llm.generate(list(prompts.values()), params, note)
    return courses


def _spec(ids: list[int], params: DecodingParams, info: ModelInfo) -> RequestSpec:
    """As the server makes it: output in whole blocks."""
    decoding, gen_length = make_decoding(params, info, "dual", 0)
    num_masks = decoding.grid.num_masks(len(ids), gen_length)
    start = len(ids)
    canvas = ids + [info.mask_id] * num_masks
    return RequestSpec("", canvas, start, len(canvas), start + gen_length, decoding)


def step_table(courses: list[Course], info: ModelInfo) -> StepTable:
    """One row per step of each course, in their order."""
    specs = {i: course.spec for i, course in enumerate(courses)}
    recorder = StepRecorder(specs, info.mask_id, frozenset(info.eos_ids))
    for i, course in enumerate(courses):
        for step in course.steps:
            recorder.record(_of_request(step, i))
    table = recorder.table()
    requests = np.array([course.request for course in courses])
    return replace(table, requests=requests[table.requests])


def _of_request(step: RequestStep, number: int) -> RequestStep:
    from msgspec.structs import replace

    return replace(step, request=number)
