"""A request on an instance: its canvas, the block it is in, and the span its next step computes.

Numbers only: knows nothing of the model, of K/V tensors or of how confidences come about. Blocks are decoded left
to right; a block's first step is a recompute step, the later ones are cache steps (`none`: all recompute). Of a
block-causal model a recompute step covers what was unmasked since the last one, whose K/V are final then, and the
block; the first one everything before it, too.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from dlmserve.errors import WorkerError
from dlmserve.messages import Admit
from dlmserve.worker.batch import Span
from dlmserve.worker.kv_cache import Slots

Finished = Literal["", "stop", "length"]


@dataclass(frozen=True)
class StepPlan:
    """One request's part in a step. `columns` may be unmasked; `forced`: all of them are, whatever the rule."""

    resident: "Resident"
    span: Span
    columns: np.ndarray
    forced: bool
    recompute: bool


class Resident:
    """State of one admitted request. `shifted`: column i's logits come from the hidden state at column i - 1."""

    def __init__(self, admit: Admit, mask_id: int, eos_ids: frozenset[int], shifted: bool) -> None:
        self.request = admit.request
        self.decoding = admit.decoding
        self.threshold = admit.decoding.value
        self.refresh_blocks = admit.decoding.refresh_blocks
        self.tokens = np.array(admit.canvas, dtype=np.int64)
        self.steps_done = admit.steps_done
        self.steps_in_block = admit.steps_in_block
        self.slots: Slots | None = None
        self.release_asked = False
        self.last_step = -1  # number of the instance's step that it last took part in
        self._output_start, self._output_end, self._limit = admit.output_start, admit.output_end, admit.limit
        self._mask_id, self._shifted = mask_id, shifted
        self._eos_ids = frozenset() if admit.decoding.ignore_eos else eos_ids
        self._prefix_end = admit.output_start  # no mask before it
        self._grid = admit.decoding.grid
        self._cache_is_whole = False  # the cache holds the whole canvas, from some earlier block on
        self._num_final = 0  # block-causal: columns before this one have their final K/V in the cache
        self.needs_recompute = True  # at a block's start: it could leave at no cost
        self._block_start = self._first_block = self._grid.start(admit.output_start)
        self._move_to_masked_block()
        if self._block_start >= self._output_end:
            raise WorkerError(f"request {admit.request} has no masked position left; wanted at least one")

    @property
    def block(self) -> int:
        """Index of the current block, counted from the one with the first output position."""
        return (self._block_start - self._first_block) // self.decoding.block_length

    @property
    def steps_quota(self) -> int:
        """Of a block in so many steps: positions to unmask in this one; the first ones take the remainder."""
        length, decoding = self._block_end - self._block_start, self.decoding
        num_steps = int(decoding.value) if decoding.rule == "steps" else decoding.max_block_steps
        share, remainder = divmod(length, num_steps)
        return max(1, share + (self.steps_in_block < remainder))

    @property
    def _block_end(self) -> int:
        return min(self._block_start + self.decoding.block_length, self._output_end)

    def plan(self) -> StepPlan:
        """What the next step computes and may unmask.

        With shifted logits the block's first column can only be predicted by a recompute step, which then reveals
        it alone, whatever its confidence.
        """
        forced = self._shifted and self.needs_recompute and self.tokens[self._block_start] == self._mask_id
        if forced:
            columns = np.array([self._block_start])
        else:
            masked = self.tokens[self._block_start : self._block_end] == self._mask_id
            columns = np.flatnonzero(masked) + self._block_start
        rows = np.maximum(columns - 1, 0) if self._shifted else columns
        start, end = self._columns()
        recompute = self.needs_recompute or self.decoding.cache == "none"
        unit = self._grid.block_length if self._grid.block_causal else 0
        span = Span(self.tokens, start, end, rows, self.slots, unit)
        return StepPlan(self, span, columns, forced, recompute)

    def _columns(self) -> tuple[int, int]:
        length, cache = len(self.tokens), self.decoding.cache
        if self._grid.block_causal:
            start = self._num_final if self.needs_recompute else self._block_start
            return 0 if cache == "none" else start, self._block_end
        if cache == "none":
            return 0, length
        if self.needs_recompute:
            refresh_all = self.block % self.refresh_blocks == 0
            return (0, length) if refresh_all or not self._cache_is_whole else (self._output_start, length)
        return self._block_start, length if cache == "prefix" else self._block_end

    def unmask(self, positions: np.ndarray, tokens: np.ndarray) -> Finished:
        """Applies one step and moves on; says whether the request is finished, and why."""
        self.tokens[positions] = tokens
        self.steps_done += 1
        self.steps_in_block += 1
        self.needs_recompute = False
        self._cache_is_whole = True
        self._num_final = self._block_start
        finished = self._scan_prefix()
        if not finished:
            self._move_to_masked_block()
        return finished

    def _scan_prefix(self) -> Finished:
        """ "stop" at the first EOS with no mask before it, "length" once the answer's last position is unmasked."""
        while self._prefix_end < self._limit and self.tokens[self._prefix_end] != self._mask_id:
            if self.tokens[self._prefix_end] in self._eos_ids:
                return "stop"
            self._prefix_end += 1
        return "length" if self._prefix_end == self._limit else ""

    def _move_to_masked_block(self) -> None:
        """To the first block that holds a mask; a new block starts with a recompute."""
        while self._block_start < self._output_end and not self._has_mask():
            self._block_start += self.decoding.block_length
            self.needs_recompute = True
            self.steps_in_block = 0

    def _has_mask(self) -> bool:
        return bool((self.tokens[self._block_start : self._block_end] == self._mask_id).any())
