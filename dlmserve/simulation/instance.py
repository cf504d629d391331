"""A model instance without a model: the worker's engine, spans and block bookkeeping, in numbers.

Takes the worker's commands and gives the worker's step results; `tests/test_simulation_instance.py` holds it
against the real engine, step by step. What is unmasked comes from an `Unmasking`; how long a step takes is
the caller's. Covers the threshold rule without temperature, and models whose logits are not shifted.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from dlmserve.messages import Admit, Cancel, Command, Failure, Release, RequestStep, SetRefresh, SetThreshold

Finished = Literal["", "stop", "length"]

MASK, TEXT, EOS = 0, 1, 2  # token ids of simulated canvases
MAX_STEP_TOKENS = 16384  # as the worker's engine


class BlockDecoder(Protocol):
    """What decides which masks of each request's current block fall in a step; see `unmasking.Unmasking`."""

    def enter(self) -> int: ...
    def leave(self, row: int) -> None: ...
    def begin_block(
        self, row: int, request: int, block: int, masked: np.ndarray, steps_in_block: int = 0
    ) -> None: ...
    def set_threshold(self, row: int, threshold: float) -> None: ...
    def masked(self, row: int) -> np.ndarray: ...
    def step(self, rows: list[int]) -> tuple[list[int], list[int], list[float], np.ndarray]: ...


@dataclass
class StepResult:
    num_tokens: int = 0  # packed tokens of the step
    requests: list[RequestStep] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)


class Resident:
    """One admitted request. It is finished once no mask is before the column `answer_end`."""

    __slots__ = (
        "answer_end",
        "block",
        "block_end",
        "block_start",
        "cache_is_whole",
        "eos_at",
        "last_step",
        "length",
        "needs_recompute",
        "num_pages",
        "output_end",
        "output_start",
        "refresh_blocks",
        "release_asked",
        "request",
        "row",
        "span",
        "threshold",
    )

    def __init__(self, admit: Admit, eos_at: int | None, num_pages: int, row: int) -> None:
        self.request = admit.request
        self.threshold = admit.decoding.value
        self.length = len(admit.canvas)
        self.output_start, self.output_end = admit.output_start, admit.output_end
        self.refresh_blocks = admit.decoding.refresh_blocks
        self.eos_at = admit.output_end if eos_at is None else eos_at
        self.answer_end = min(self.eos_at + 1, admit.limit)
        self.num_pages, self.row = num_pages, row
        self.block = -1
        self.block_start = self.block_end = admit.output_start
        self.needs_recompute, self.cache_is_whole = True, False
        self.release_asked = False
        self.last_step = -1
        self.span = 0  # tokens of the step that is being computed


class SimulatedEngine:
    """`eos_at` says where a request's answer will end (a canvas column), None where it fills its output."""

    def __init__(
        self,
        decoder: BlockDecoder,
        num_pages: int,
        page_size: int,
        eos_at: dict[int, int],
        max_step_tokens: int = MAX_STEP_TOKENS,
        recompute_tokens: int = 0,
    ) -> None:
        self._max_step_tokens, self._recompute_tokens = max_step_tokens, recompute_tokens
        self.num_pages, self.num_pages_in_use = num_pages, 0
        self._decoder, self._page_size, self._eos_at = decoder, page_size, eos_at
        self._residents: dict[int, Resident] = {}
        self._failed: list[Failure] = []
        self._num_steps = 0

    def has_work(self) -> bool:
        return bool(self._residents or self._failed)

    def apply(self, command: Command) -> None:
        """Takes effect at the next step; a request that is gone is ignored."""
        match command:
            case Admit():
                self._admit(command)
            case Cancel(request):
                self._remove(request)
            case SetThreshold(request, threshold):
                if resident := self._residents.get(request):
                    resident.threshold = threshold
                    self._decoder.set_threshold(resident.row, threshold)
            case SetRefresh(request, refresh_blocks):
                if resident := self._residents.get(request):
                    resident.refresh_blocks = refresh_blocks
            case Release(request):
                if resident := self._residents.get(request):
                    resident.release_asked = True

    def _admit(self, admit: Admit) -> None:
        assert admit.decoding.cache == "dual" and admit.decoding.rule == "threshold", (
            "only these are simulated"
        )
        num_pages = -(-len(admit.canvas) // self._page_size)
        if num_pages > self.num_pages - self.num_pages_in_use:
            message = f"request {admit.request} needs {num_pages} of {self.num_pages} KV pages; too few free"
            self._failed.append(Failure(admit.request, "no_pages", message))
            return
        self.num_pages_in_use += num_pages
        eos_at = None if admit.decoding.ignore_eos else self._eos_at.get(admit.request)
        resident = Resident(admit, eos_at, num_pages, self._decoder.enter())
        self._residents[admit.request] = resident
        self._decoder.set_threshold(resident.row, resident.threshold)
        self._begin_block(resident, admit)

    def _begin_block(self, resident: Resident, admit: Admit) -> None:
        """On the first block that still holds a mask."""
        length = admit.decoding.block_length
        first_mask = admit.canvas.index(MASK, admit.output_start, admit.output_end)
        resident.block = (first_mask - admit.output_start) // length
        resident.block_start = admit.output_start + resident.block * length
        resident.block_end = min(resident.block_start + length, admit.output_end)
        masked = np.array(
            [token == MASK for token in admit.canvas[resident.block_start : resident.block_end]]
        )
        self._decoder.begin_block(resident.row, admit.request, resident.block, masked, admit.steps_in_block)

    def _remove(self, request: int) -> None:
        if resident := self._residents.pop(request, None):
            self.num_pages_in_use -= resident.num_pages
            self._decoder.leave(resident.row)

    def step(self) -> StepResult:
        """One denoising step over the residents that fit in the step's token budget."""
        result = StepResult(failed=self._failed, released=self._release_due())
        self._failed = []
        chosen = self._choose()
        if chosen:
            self._num_steps += 1
            result.num_tokens = sum(resident.span for resident in chosen)
            result.requests = self._unmask(chosen)
        return result

    def _release_due(self) -> list[int]:
        due = [r.request for r in self._residents.values() if r.release_asked and r.needs_recompute]
        for request in due:
            self._remove(request)
        return due

    def _choose(self) -> list[Resident]:
        """Who takes part: those that waited longest first, up to the token budgets, at least one."""
        chosen: list[Resident] = []
        num_tokens = recomputed = 0
        for resident in sorted(self._residents.values(), key=_last_step):
            resident.span = _span(resident)
            if resident.needs_recompute and self._recompute_tokens:
                if recomputed and recomputed + resident.span > self._recompute_tokens:
                    continue
                recomputed += resident.span
            num_tokens += resident.span
            if chosen and num_tokens > self._max_step_tokens:
                break
            resident.last_step = self._num_steps
            chosen.append(resident)
        return chosen

    def _unmask(self, chosen: list[Resident]) -> list[RequestStep]:
        index, positions, confidences, left = self._decoder.step([resident.row for resident in chosen])
        steps = []
        at, num = 0, len(index)
        for i, (resident, num_left) in enumerate(zip(chosen, left.tolist(), strict=True)):
            start = at
            while at < num and index[at] == i:
                at += 1
            first = resident.block_start
            columns = [first + position for position in positions[start:at]]
            eos_at = resident.eos_at
            finished = self._finished(resident, num_left)
            step = RequestStep(
                request=resident.request,
                recompute=resident.needs_recompute,
                block=resident.block,
                threshold=resident.threshold,
                positions=columns,
                tokens=[EOS if column >= eos_at else TEXT for column in columns],
                confidences=confidences[start:at],
                finished=finished,
            )
            steps.append(step)
            resident.needs_recompute, resident.cache_is_whole = False, True
            if finished:
                self._remove(resident.request)
            elif num_left == 0:
                self._next_block(resident)
        return steps

    def _finished(self, resident: Resident, num_left: int) -> Finished:
        """ "stop" once no mask is before the first EOS, "length" once none is in the answer, else ""."""
        end = resident.answer_end
        if resident.block_end < end:
            return ""
        if num_left and self._decoder.masked(resident.row)[: end - resident.block_start].any():
            return ""
        return "stop" if resident.eos_at < end else "length"

    def _next_block(self, resident: Resident) -> None:
        length = resident.block_end - resident.block_start
        resident.block += 1
        resident.block_start = resident.block_end
        resident.block_end = min(resident.block_end + length, resident.output_end)
        resident.needs_recompute = True
        masked = np.ones(resident.block_end - resident.block_start, bool)
        self._decoder.begin_block(resident.row, resident.request, resident.block, masked)

    def check(self) -> None:
        """Raises AssertionError where pages and residents do not fit together."""
        held = sum(resident.num_pages for resident in self._residents.values())
        assert held == self.num_pages_in_use <= self.num_pages, (
            f"{held} pages held, {self.num_pages_in_use} counted"
        )


def _last_step(resident: Resident) -> int:
    return resident.last_step


def _span(resident: Resident) -> int:
    """Tokens of its next step, dual cache: the block; at a block's start the canvas, or only its response."""
    if not resident.needs_recompute:
        return resident.block_end - resident.block_start
    if resident.block % resident.refresh_blocks == 0 or not resident.cache_is_whole:
        return resident.length
    return resident.length - resident.output_start
