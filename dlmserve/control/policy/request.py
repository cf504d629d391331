"""A request as the head sees it: what was asked, its canvas, how far it is, what it is told.

Owns the head's copy of the canvas, which is the truth: an instance that dies loses nothing that was
reported. Knows nothing of instances, queues, sockets or texts (tokens only).
"""

import itertools
from array import array
from dataclasses import dataclass, field
from math import nan
from typing import Literal, Protocol

import msgspec

from dlmserve.control.policy.predictions import NOT_READ, Progress
from dlmserve.errors import DlmServeError
from dlmserve.messages import Decoding, RequestStep

FinishReason = Literal["stop", "length"]
CancelOutcome = Literal["stop", "abandoned"]


@dataclass(frozen=True)
class RequestSpec:
    """What a client asked for, in tokens. Output positions are output_start .. output_end - 1.

    `canvas` holds prompt, output (mask ids where masked) and suffix; the answer is what lies before
    `limit`. `pinned`: the client fixed the threshold, factor or steps, so no policy may change it.
    """

    name: str  # the client's id of it, for logs
    canvas: list[int]
    output_start: int
    output_end: int
    limit: int
    decoding: Decoding
    slo_s: float | None = None
    priority: int = 0  # higher first
    min_threshold: float | None = None
    pinned: bool = False


# Made for every token or every step of every request: structs are made five times as fast as dataclasses.
class Unmasked(msgspec.Struct, frozen=True, gc=False):
    """One position that a step fixed; `position` is a canvas column, `top` (token, log probability) pairs."""

    position: int
    token: int
    confidence: float
    top: list[tuple[int, float]] | None = None


class StepUpdate(msgspec.Struct, frozen=True):
    """What one denoising step did to a request; `step` counts this request's steps from 1."""

    step: int
    did: RequestStep

    @property
    def unmasked(self) -> list[Unmasked]:
        """Made anew each time: the scheduler has no use for them."""
        did = self.did
        tops = did.top or itertools.repeat(None)
        return list(map(Unmasked, did.positions, did.tokens, did.confidences, tops))


@dataclass(frozen=True)
class Summary:
    """A request's account at its end. `mean_threshold` weighs each step by the tokens it unmasked."""

    steps: int
    recompute_steps: int
    num_unmasked: int
    mean_threshold: float | None  # None: no threshold was in use (factor or fixed schedule), or no token came
    latency_s: float
    slo_s: float | None
    slo_met: bool | None
    instances: list[str]
    threshold_cap: float | None = None  # the highest threshold load control allowed it last; None: no control


class Sink(Protocol):
    """Where a request's progress goes; called on the head's event loop, so it must not block."""

    def on_step(self, update: StepUpdate) -> None: ...

    def on_finish(self, reason: FinishReason, summary: Summary) -> None: ...

    def on_error(self, error: DlmServeError) -> None: ...


@dataclass(slots=True)
class RequestState:
    """A live request. `instance` is the formation that holds it, None while it waits.

    `moving_to`: it was asked back from its instance, to be sent there at its next block start.
    """

    number: int
    spec: RequestSpec
    arrived_at: float
    mask_id: int
    num_pages: int  # KV pages that it needs on any instance
    eos_ids: frozenset[int] = frozenset()
    canvas: list[int] = field(init=False)
    num_blocks: int = field(init=False)
    threshold: float = field(init=False)  # the rule's value for its next step, as the head last set it
    refresh_blocks: int = field(init=False)  # whole-canvas recompute every so many blocks, as last set
    threshold_cap: float | None = None
    instance: str | None = None
    moving_to: str | None = None
    instances: list[str] = field(default_factory=list)
    block: int = 0  # the one its next step works on
    num_masks: int = field(init=False)  # of its output at the start
    masks_in_block: int = field(init=False)  # left in that block
    answer_end: int = field(init=False)  # column of the first end token so far, or where the answer is cut
    confidences: array = field(default_factory=lambda: array("f"))  # of its unmasked tokens, in any order
    masked_confidences: list[float] = field(default_factory=list)  # of masked positions, at its last step
    hidden: tuple[float, float] = NOT_READ  # as of now, from what was read at its last recompute step
    cache_lost: bool = False  # it is inside a block, and no instance holds its K/V
    num_unmasked_at_refresh: int = 0  # when its remaining steps were last asked for
    steps: int = 0
    recompute_steps: int = 0
    steps_in_block: int = 0
    num_unmasked: int = 0
    num_losses: int = 0  # formations that died while they held it
    _threshold_sum: float = 0.0  # over unmasked tokens

    def __post_init__(self) -> None:
        self.canvas = list(self.spec.canvas)
        self.answer_end = self.spec.limit
        if self.spec.decoding.ignore_eos:
            self.eos_ids = frozenset()
        self.num_blocks = self.spec.decoding.grid.num_blocks(self.spec.output_start, self.output_length)
        self.threshold = self.spec.decoding.value
        self.refresh_blocks = self.spec.decoding.refresh_blocks
        self.num_masks = self.canvas[self.spec.output_start : self.spec.output_end].count(self.mask_id)
        self.masks_in_block = self._count_masks(0)

    @property
    def started(self) -> bool:
        return bool(self.instances)

    @property
    def output_length(self) -> int:
        return self.spec.output_end - self.spec.output_start

    @property
    def deadline(self) -> float:
        return self.arrived_at + self.spec.slo_s if self.spec.slo_s is not None else float("inf")

    @property
    def recomputes_left(self) -> int:
        """Recompute steps to come, if it goes on to its last block."""
        return self.num_blocks - self.block - (self.steps_in_block > 0) + self.cache_lost

    def progress(self) -> Progress:
        spec, block_length = self.spec, self.spec.decoding.block_length
        return Progress(
            self.number,
            self.steps,
            self.num_unmasked,
            self.block,
            block_length - self.masks_in_block,
            self.output_length,
            block_length,
            spec.output_start,
            self._num_masks_before_end(),
            self.confidences + array("f", self.masked_confidences),
            self.hidden,
        )

    def _num_masks_before_end(self) -> int:
        if self.answer_end == self.spec.output_end:
            return self.num_masks - self.num_unmasked
        return self.canvas[self.spec.output_start : self.answer_end].count(self.mask_id)

    def apply(self, step: RequestStep) -> StepUpdate:
        """Takes a step's tokens into the canvas and counts it."""
        positions, tokens = step.positions, step.tokens
        if step.block != self.block:  # the blocks between had no mask
            self.block, self.masks_in_block = step.block, self._count_masks(step.block)
        canvas, num_unmasked = self.canvas, len(positions)
        if len(tokens) != num_unmasked:
            raise ValueError(f"request {self.number}: {len(tokens)} tokens at {num_unmasked} positions")
        for at, position in enumerate(
            positions
        ):  # for few positions half of what zip(..., strict=True) takes
            canvas[position] = tokens[at]
        if not self.eos_ids.isdisjoint(tokens):
            ends = [at for at, token in zip(positions, tokens, strict=True) if token in self.eos_ids]
            self.answer_end = min(self.answer_end, *ends)
        self.steps += 1
        self.recompute_steps += step.recompute
        self.num_unmasked += num_unmasked
        self._threshold_sum += step.threshold * num_unmasked
        self.confidences.fromlist(step.confidences)
        self.masked_confidences = step.masked_confidences
        if step.hidden or self.hidden is not NOT_READ:
            self.hidden = step.hidden or (self.hidden[0], max(self.hidden[1] - 1, 0.0))
        self.cache_lost = False
        self.masks_in_block -= num_unmasked
        if self.masks_in_block:
            self.steps_in_block += 1
        else:
            self._next_block()
        return StepUpdate(self.steps, step)

    def _next_block(self) -> None:
        self.block += 1
        self.masks_in_block, self.steps_in_block = self._count_masks(self.block), 0
        if self.hidden is not NOT_READ:
            self.hidden = (max(self.hidden[0] - 1, 0.0), nan)

    def _count_masks(self, block: int) -> int:
        length = self.spec.decoding.block_length
        start = self.spec.decoding.grid.start(self.spec.output_start) + block * length
        return self.canvas[start : min(start + length, self.spec.output_end)].count(self.mask_id)

    def summary(self, now: float) -> Summary:
        latency_s = now - self.arrived_at
        slo_s = self.spec.slo_s
        has_threshold = self.spec.decoding.rule == "threshold" and self.num_unmasked > 0
        return Summary(
            steps=self.steps,
            recompute_steps=self.recompute_steps,
            num_unmasked=self.num_unmasked,
            mean_threshold=self._threshold_sum / self.num_unmasked if has_threshold else None,
            latency_s=latency_s,
            slo_s=slo_s,
            slo_met=None if slo_s is None else latency_s <= slo_s,
            instances=list(self.instances),
            threshold_cap=self.threshold_cap,
        )

    def check(self) -> None:
        """Raises AssertionError where the counters and the canvas disagree."""
        spec, start, end = self.spec, self.spec.output_start, self.spec.output_end
        assert len(self.canvas) == len(spec.canvas), f"request {self.number}: its canvas changed length"
        assert self.canvas[:start] == spec.canvas[:start], f"request {self.number}: its prompt changed"
        assert self.canvas[end:] == spec.canvas[end:], f"request {self.number}: its suffix changed"
        filled = self.num_masks - self.canvas[start:end].count(self.mask_id)
        assert filled == self.num_unmasked, (
            f"request {self.number}: {filled} masks gone but {self.num_unmasked} tokens reported"
        )
        assert self.masks_in_block == self._count_masks(self.block), (
            f"request {self.number}: block {self.block} holds {self._count_masks(self.block)} masks, "
            f"not {self.masks_in_block}"
        )
        assert self.recompute_steps <= self.steps
