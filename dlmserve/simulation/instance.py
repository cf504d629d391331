"""A model instance without a model: the worker's engine, spans and block bookkeeping, in numbers.

Takes the worker's commands and gives the worker's step results; `tests/test_simulation_instance.py` holds it
against the real engine, step by step. What is unmasked comes from an `Unmasking`; how long a step takes is
the caller's. Covers the threshold rule without temperature, and models whose logits are not shifted.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal, Protocol

from dlmserve.messages import Admit, Cancel, Command, Failure, Release, RequestStep, SetRefresh, SetThreshold

Finished = Literal["", "stop", "length"]

MASK, TEXT, EOS = 0, 1, 2  # token ids of simulated canvases
MAX_STEP_TOKENS = 16384  # as the worker's engine


class DecodingBlock(Protocol):
    """One block that is being decoded. `masked`: a bit for each position that still holds the mask."""

    masked: int

    def set_threshold(self, threshold: float) -> None: ...

    def step(self) -> tuple[list[int], list[float]]:
        """Positions in it that its next step unmasks, ascending, and their confidences."""
        ...


class BlockDecoder(Protocol):
    """What decides which masks of a block fall in a step; see `unmasking.Unmasking`."""

    def begin_block(
        self, request: int, block: int, masked: int, threshold: float, steps_in_block: int = 0
    ) -> DecodingBlock: ...


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
        "decoding",
        "eos_at",
        "last_step",
        "length",
        "needs_recompute",
        "num_pages",
        "output_end",
        "output_start",
        "refresh_blocks",
        "request",
        "span",
        "threshold",
    )

    decoding: DecodingBlock

    def __init__(self, admit: Admit, eos_at: int | None, num_pages: int) -> None:
        self.request = admit.request
        self.threshold = admit.decoding.value
        self.length = len(admit.canvas)
        self.output_start, self.output_end = admit.output_start, admit.output_end
        self.refresh_blocks = admit.decoding.refresh_blocks
        self.eos_at = admit.output_end if eos_at is None else eos_at
        self.answer_end = min(self.eos_at + 1, admit.limit)
        self.num_pages = num_pages
        self.block = -1
        self.block_start = self.block_end = admit.output_start
        self.needs_recompute, self.cache_is_whole = True, False
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
        self._releasing: set[int] = set()  # residents that are to be given back at their next block start
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
                    resident.decoding.set_threshold(threshold)
            case SetRefresh(request, refresh_blocks):
                if resident := self._residents.get(request):
                    resident.refresh_blocks = refresh_blocks
            case Release(request):
                if request in self._residents:
                    self._releasing.add(request)

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
        resident = self._residents[admit.request] = Resident(admit, eos_at, num_pages)
        self._begin_block(resident, admit)

    def _begin_block(self, resident: Resident, admit: Admit) -> None:
        """On the first block that still holds a mask."""
        length = admit.decoding.block_length
        first_mask = admit.canvas.index(MASK, admit.output_start, admit.output_end)
        resident.block = (first_mask - admit.output_start) // length
        resident.block_start = admit.output_start + resident.block * length
        resident.block_end = min(resident.block_start + length, admit.output_end)
        tokens = admit.canvas[resident.block_start : resident.block_end]
        masked = sum(1 << position for position, token in enumerate(tokens) if token == MASK)
        resident.decoding = self._decoder.begin_block(
            admit.request, resident.block, masked, resident.threshold, admit.steps_in_block
        )

    def _remove(self, request: int) -> None:
        self._releasing.discard(request)
        if resident := self._residents.pop(request, None):
            self.num_pages_in_use -= resident.num_pages

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
        if not self._releasing:
            return []
        due = [
            r.request for r in self._residents.values() if r.request in self._releasing and r.needs_recompute
        ]
        for request in due:
            self._remove(request)
        return due

    def _choose(self) -> list[Resident]:
        """Who takes part: those that waited longest first, up to the token budgets, at least one."""
        chosen: list[Resident] = []
        num_tokens = recomputed = 0
        for resident in sorted(self._residents.values(), key=attrgetter("last_step")):
            resident.span = resident.block_end - resident.block_start
            if resident.needs_recompute:
                resident.span = _recompute_span(resident)
                if recomputed and 0 < self._recompute_tokens < recomputed + resident.span:
                    continue
                recomputed += resident.span
            num_tokens += resident.span
            if chosen and num_tokens > self._max_step_tokens:
                break
            resident.last_step = self._num_steps
            chosen.append(resident)
        return chosen

    def _unmask(self, chosen: list[Resident]) -> list[RequestStep]:
        steps = []
        for resident in chosen:
            positions, confidences = resident.decoding.step()
            first, eos_at = resident.block_start, resident.eos_at
            columns = [first + position for position in positions]
            tokens = [TEXT] * len(columns)
            if columns[-1] >= eos_at:
                tokens = [EOS if column >= eos_at else TEXT for column in columns]
            finished = "" if resident.block_end < resident.answer_end else _finished(resident)
            step = RequestStep(
                resident.request,
                resident.needs_recompute,
                resident.block,
                resident.threshold,
                columns,
                tokens,
                confidences,
                finished,
            )
            steps.append(step)
            resident.needs_recompute, resident.cache_is_whole = False, True
            if finished:
                self._remove(resident.request)
            elif not resident.decoding.masked:
                self._next_block(resident)
        return steps

    def _next_block(self, resident: Resident) -> None:
        length = resident.block_end - resident.block_start
        resident.block += 1
        resident.block_start = resident.block_end
        resident.block_end = min(resident.block_end + length, resident.output_end)
        resident.needs_recompute = True
        masked = (1 << (resident.block_end - resident.block_start)) - 1
        resident.decoding = self._decoder.begin_block(
            resident.request, resident.block, masked, resident.threshold
        )

    def check(self) -> None:
        """Raises AssertionError where pages and residents do not fit together."""
        held = sum(resident.num_pages for resident in self._residents.values())
        assert held == self.num_pages_in_use <= self.num_pages, (
            f"{held} pages held, {self.num_pages_in_use} counted"
        )


def _finished(resident: Resident) -> Finished:
    """In its answer's last block: "stop" once no mask is before the first EOS, "length" once none is in the answer."""
    end = resident.answer_end
    if resident.decoding.masked & ((1 << (end - resident.block_start)) - 1):
        return ""
    return "stop" if resident.eos_at < end else "length"


def _recompute_span(resident: Resident) -> int:
    """Tokens of a step at a block's start, dual cache: the canvas, or only its response."""
    if resident.block % resident.refresh_blocks == 0 or not resident.cache_is_whole:
        return resident.length
    return resident.length - resident.output_start
