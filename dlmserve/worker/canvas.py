"""A request on an instance: its canvas, the block it is in, and the span its next step computes.

Numbers only: knows nothing of the model, of K/V tensors or of how confidences come about. Blocks are decoded left
to right; a block's first step is a recompute step, the later ones are cache steps (`none`: all recompute). Of a
block-causal model a recompute step covers what was unmasked since the last one, whose K/V are final then, and the
block; the first one everything before it, too.
"""

from typing import Literal, NamedTuple

import numpy as np

from dlmserve.errors import WorkerError
from dlmserve.messages import Admit
from dlmserve.worker.batch import Span
from dlmserve.worker.kv_cache import Slots

Finished = Literal["", "stop", "length"]


class Part(NamedTuple):
    """One request's part in a step: its span, and the columns `first` .. `end` - 1, of which the masked ones may be
    unmasked; `forced`: all of them are, whatever the rule. `begins`: it is the first step of block number `block`.
    """

    resident: "Resident"
    span: Span
    first: int
    end: int
    forced: bool
    recompute: bool
    begins: bool
    block: int


class Canvases:
    """The canvases of an engine's residents in one array: one operation reads or writes those of a batch."""

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len
        self.flat = np.zeros(8 * max_len, dtype=np.int64)  # what no canvas has covered yet is a token, too
        self._held: dict[int, Resident] = {}  # by place

    def add(self, resident: "Resident") -> None:
        """Its `tokens`, at most `max_len`, are part of `flat` from here on, from `place` on."""
        place = next((i for i in range(0, len(self.flat), self._max_len) if i not in self._held), None)
        if place is None:
            place = len(self.flat)
            self.flat = np.concatenate((self.flat, np.zeros_like(self.flat)))
            for each in self._held.values():
                self._let_in(each)
        resident.place = place
        self._held[place] = resident
        self._let_in(resident)

    def remove(self, resident: "Resident") -> None:
        del self._held[resident.place]

    def _let_in(self, resident: "Resident") -> None:
        mine = self.flat[resident.place : resident.place + len(resident.tokens)]
        mine[:] = resident.tokens
        resident.tokens = mine


class Resident:
    """State of one admitted request. `shifted`: column i's logits come from the hidden state at column i - 1."""

    def __init__(self, admit: Admit, mask_id: int, eos_ids: frozenset[int], shifted: bool) -> None:
        self.request = admit.request
        self.decoding = admit.decoding
        self.threshold = admit.decoding.value
        self.refresh_blocks = admit.decoding.refresh_blocks
        self.tokens = np.array(admit.canvas, dtype=np.int64)
        self.place = 0  # see Canvases
        self.steps_done = admit.steps_done
        self.steps_in_block = admit.steps_in_block
        self.slots: Slots | None = None
        self.release_asked = False
        self.last_step = -1  # number of the instance's step that it last took part in
        self._output_start, self._output_end, self._limit = admit.output_start, admit.output_end, admit.limit
        self._mask_id, self._shifted = mask_id, shifted
        self._eos_ids = frozenset() if admit.decoding.ignore_eos else eos_ids
        self._prefix_end = admit.output_start  # no mask before it
        self.has_end_token = bool(self._eos_ids.intersection(admit.canvas[admit.output_start :]))
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

    @property
    def may_end_in_block(self) -> bool:
        """Its answer may be complete while its block has masks left: after an end token, or before a block's end."""
        return self.has_end_token or self._limit < self._block_end

    def part(self) -> Part:
        """What the next step computes and may unmask.

        With shifted logits the block's first column can only be predicted by a recompute step, which then reveals
        it alone, whatever its confidence.
        """
        first, last = self._block_start, self._block_end
        forced = bool(self._shifted and self.needs_recompute and self.tokens[first] == self._mask_id)
        unit = self._grid.block_length if self._grid.block_causal else 0
        span = Span(self.place, len(self.tokens), *self._columns(), self.slots, unit)
        recompute = self.needs_recompute or self.decoding.cache == "none"
        end = first + 1 if forced else last
        return Part(self, span, first, end, forced, recompute, self.needs_recompute, self.block)

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

    def count_step(self) -> None:
        """A step in which it takes part has begun. Until `settle` says otherwise it stays in its block."""
        self.steps_done += 1
        self.steps_in_block += 1
        self.needs_recompute = False
        self._cache_is_whole = True
        self._num_final = self._block_start

    def see_end_token(self) -> None:
        """One was unmasked."""
        self.has_end_token = bool(self._eos_ids)

    def settle(self) -> Finished:
        """Looks at what is unmasked now and moves on; says whether the request is finished, and why.

        Changes nothing while its block has masks left, unless `may_end_in_block`.
        """
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
