"""The engine of one rank: admits requests, runs denoising steps over all of them, reports what was unmasked.

All ranks of an instance run this same deterministic code on the same commands; what a step decides depends only on
values that every rank has after the exchange. Knows nothing of sockets, the head or scheduling.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dlmserve import kernels
from dlmserve.errors import DlmServeError, OutOfPages, WorkerError
from dlmserve.messages import (
    Admit,
    Cancel,
    Command,
    Decoding,
    Failure,
    Release,
    SetRefresh,
    SetThreshold,
)
from dlmserve.worker import decision
from dlmserve.worker.batch import Span
from dlmserve.worker.canvas import Canvases, Part, Resident
from dlmserve.worker.decision import Decided, Rules
from dlmserve.worker.device import Wait
from dlmserve.worker.hidden_reader import HiddenReader, pool_recomputed
from dlmserve.worker.memory import MAX_STEP_TOKENS
from dlmserve.worker.record import StepRecord, StepResult
from dlmserve.worker.runner import Runner
from dlmserve.worker.sampling import RowGroup, Sampler
from dlmserve.worker.shards import Shard
from dlmserve.worker.step_plan import Masked, StepPlan

NOBODY = -1  # in the place of a request's number


@dataclass(frozen=True)
class Flight:
    """A step that was started, and how to wait for its tensors, see `Engine._compute`."""

    plan: StepPlan
    masked: Masked
    wait: Wait


class Engine:
    """A step is `launch()`, then `finish()`; both are collective over the model's group, all else is local.

    On a GPU the step runs between the two, beside whatever the caller does there; on a CPU it runs in `finish`. From
    `finish` to the next `launch` a GPU idles: both do only what must be done there. The next step is planned while this
    one runs, in the belief that each request stays in its block, and what a step did is put into words by
    `StepRecord.result`, which may wait until the next one runs.
    """

    def __init__(self, runner: Runner, mask_id: int, eos_ids: list[int], recompute_tokens: int = 0) -> None:
        """`recompute_tokens`: as in Form."""
        self._runner, self._model, self._cache = runner, runner.model, runner.cache
        self._sampler = Sampler(self._model, mask_id)
        self._mask_id, self._eos_ids = mask_id, frozenset(eos_ids)
        self._mask_array = np.array(mask_id)
        self._residents: dict[int, Resident] = {}
        self._canvases = Canvases(self._model.config.max_len)
        self._failed: list[Failure] = []
        self._num_steps = 0
        self._recompute_tokens = recompute_tokens
        self.token_s = 0.0  # of the warm-up, per token
        self.num_bytes_read = 0  # of weights, when it was built
        self.hidden_reader: HiddenReader | None = None  # local to this rank: nothing is decided by it
        self._record = StepRecord()
        self._flight: Flight | None = None
        # Of the next step, where it is known: with everybody, and nobody at the first step of a block.
        self._next: StepPlan | None = None
        self._next_masked: Masked | None = None

    @property
    def num_pages(self) -> int:
        return self._cache.pages.num_pages

    @property
    def num_pages_in_use(self) -> int:
        return self._cache.pages.num_in_use

    @property
    def details(self) -> str:
        """One line for the log."""
        return (
            f"{self._model.dtype}".removeprefix("torch.")
            + f" on {self._model.device}, {torch.get_num_threads()} threads, {self._runner.details}, "
            f"confidence kernel {kernels.backend_name(self._model.device)}"
        )

    def has_work(self) -> bool:
        return bool(self._residents or self._failed)

    def apply(self, command: Command) -> None:
        """Takes effect at the next step; a request that is gone is ignored. Not between `launch` and `finish`."""
        assert self._flight is None, "a step is running"
        match command:
            case Admit():
                self._admit(command)
            case Cancel(request):
                self._remove(request)
            case SetThreshold(request, threshold):
                if request in self._residents:
                    self._residents[request].threshold = threshold
                    if self._next:
                        self._next.rules = None
            case SetRefresh(request, refresh_blocks):
                if request in self._residents:
                    self._residents[request].refresh_blocks = refresh_blocks
            case Release(request):
                if request in self._residents:
                    self._residents[request].release_asked = True

    def _admit(self, admit: Admit) -> None:
        shifted, block_causal = self._model.config.shifted_logits, self._model.config.block_causal
        try:
            if admit.decoding.block_causal != block_causal:
                raise WorkerError(
                    f"decoding says block_causal {admit.decoding.block_causal}; the model's is {block_causal}"
                )
            resident = Resident(admit, self._mask_id, self._eos_ids, shifted)
            if len(resident.tokens) > self._model.config.max_len:
                raise WorkerError(
                    f"a canvas of {len(resident.tokens)} tokens exceeds {self._model.config.max_len}"
                )
            if admit.decoding.needs_pages:
                resident.slots = self._cache.reserve(admit.request, len(resident.tokens))
        except DlmServeError as error:
            kind = "no_pages" if isinstance(error, OutOfPages) else "refused"
            self._failed.append(Failure(admit.request, kind, str(error)))
        else:
            self._remove_canvas(admit.request)
            self._residents[admit.request] = resident
            self._canvases.add(resident)
            self._next = None

    def _remove(self, request: int) -> None:
        self._remove_canvas(request)
        self._cache.pages.free(request)

    def _remove_canvas(self, request: int) -> None:
        if resident := self._residents.pop(request, None):
            self._canvases.remove(resident)
            self._next = None

    def step(self) -> StepResult:
        """One denoising step over the residents that fit in the step's token budget."""
        self.launch()
        return self.finish().result()

    def launch(self) -> None:
        """Starts a step over the residents that fit in the step's token budget, and plans the next one."""
        failed, released = self._failed, list[int]()
        self._failed = []
        plan, masked, self._next = self._next, self._next_masked, None
        if plan is None or masked is None:
            released = self._release_due()
            parts = self._choose()
            if not parts:
                self._record = StepRecord(released=released, failed=failed)
                return
            plan = self._plan(parts)
            masked = plan.masked(self._canvases.flat, self._mask_array)
        rules, groups, top_rows = plan.current_rules(), plan.row_groups(masked), list[int]()
        with self._runner.device.named_errors():
            work = partial(self._compute, plan, masked, rules, groups, top_rows)
            wait = self._runner.device.start(work)
            # What follows is beside the running step.
            self._num_steps += 1
            self._next = self._plan_ahead(plan)
        self._flight = Flight(plan, masked, wait)
        columns, offsets = plan.columns[masked.at], masked.offsets
        self._record = StepRecord(
            plan.num_tokens, released, failed, plan.parts, offsets, columns, rules.thresholds, top_rows
        )

    def _plan(self, parts: list[Part]) -> StepPlan:
        parts = sorted(parts, key=lambda part: part.span.order)
        placement = self._runner.place([part.span for part in parts])
        return StepPlan(parts, placement, self._model.config.shifted_logits)

    def _plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The plan of the step after `plan`'s, if it leaves each request in its block; None where that is not all there
        is to know: somebody has to wait, or the residents change.
        """
        for part in plan.parts:
            part.resident.count_step()
        if len(plan.parts) < len(self._residents):
            return None
        if not plan.repeats:
            plan = self._plan([resident.part() for resident in self._residents.values()])
        plan.refresh()
        return plan

    @torch.inference_mode()
    def _compute(
        self, plan: StepPlan, masked: Masked, rules: Rules, groups: list[RowGroup], top_rows: list[int]
    ) -> list[torch.Tensor]:
        """Tensors of what is decided, then of what is read of hidden states, then of alternatives.

        The first row of each request with alternatives goes to `top_rows`.
        """
        arrays, on_device = decision.arrays(rules, masked.offsets), self._runner.device.queues
        staged = self._sampler.arrays(groups) | (arrays if on_device else {})
        rows = plan.rows[masked.at]
        hidden, index = self._runner.run(plan.placement, self._canvases.flat, rows, staged)
        drawn = self._sampler.draw(hidden, groups, index)
        if on_device:
            decided = decision.decide_on_device(drawn.parts, index, self._model.config.shifted_logits)
        else:
            decided = decision.decide_on_host(drawn.parts, arrays)
        read = self._read_hidden(hidden, plan, masked)
        top_rows += [top.start for top in drawn.top]
        return decided + read + [tensor for top in drawn.top for tensor in (top.values, top.ids)]

    def _read_hidden(self, hidden: torch.Tensor, plan: StepPlan, masked: Masked) -> list[torch.Tensor]:
        """What is read of the requests at a recompute step, f32 [n, 2], where there is a reader."""
        recomputes = [part.recompute for part in plan.parts]
        if self.hidden_reader is None or not any(recomputes):
            return []
        return [self.hidden_reader(pool_recomputed(hidden, masked.counts, recomputes))]

    def finish(self) -> StepRecord:
        """Waits for what `launch` started and applies it to the canvases."""
        flight, self._flight = self._flight, None
        if flight is not None:
            with self._runner.device.named_errors():
                arrays = flight.wait()
            decided = self._take(arrays, flight)
            # Probabilities: a sum that is not finite has a part that is not.
            if not math.isfinite(decided.confidences.dot(decided.confidences)):
                self._fail_broken(flight, decided)
            self._unmask(flight, decided)
        return self._record

    def _take(self, arrays: list[np.ndarray], flight: Flight) -> Decided:
        """`arrays`: the values of what `_compute` gave."""
        record = self._record
        if self._runner.device.queues:
            sizes = (len(flight.masked.at), len(flight.plan.parts))
            decided, more = decision.from_device(arrays[0], *sizes), arrays[1:]
        else:
            decided, more = Decided(*arrays[:3]), arrays[3:]
        record.decided = decided
        num_top = 2 * len(record.top_rows)
        if len(more) > num_top:
            record.outlooks, *more = more
        record.top = list(zip(more[::2], more[1::2], strict=True))
        return decided

    def _release_due(self) -> list[int]:
        due = [r.request for r in self._residents.values() if r.release_asked and r.needs_recompute]
        for request in due:
            self._remove(request)
        return due

    def _choose(self) -> list[Part]:
        """Who takes part: who waited longest, up to the token budgets, at least one."""
        chosen: list[Part] = []
        num_tokens = recomputed = 0
        for resident in sorted(self._residents.values(), key=lambda r: r.last_step):
            part = resident.part()
            span_tokens = part.span.end - part.span.start
            if resident.needs_recompute and self._recompute_tokens:
                if recomputed and recomputed + span_tokens > self._recompute_tokens:
                    continue
                recomputed += span_tokens
            num_tokens += span_tokens
            if chosen and num_tokens > MAX_STEP_TOKENS:
                break
            resident.last_step = self._num_steps
            chosen.append(part)
        return chosen

    def _fail_broken(self, flight: Flight, decided: Decided) -> None:
        """Those requests whose confidences are not finite; nothing of theirs is unmasked."""
        finite, offsets = np.isfinite(decided.confidences), flight.masked.offsets.tolist()
        for i, part in enumerate(flight.plan.parts):
            rows = slice(offsets[i], offsets[i + 1])
            if not finite[rows].all():
                request = part.resident.request
                decided.chosen[rows] = False
                self._record.broken.add(i)
                self._remove(request)
                message = "the model's logits are not finite (NaN or infinite)"
                self._record.failed.append(Failure(request, "not_finite", message))

    def _unmask(self, flight: Flight, decided: Decided) -> None:
        """Writes what was decided to the canvases, and looks at those requests that may have moved on."""
        canvases = self._canvases.flat
        unmasked = decided.chosen.nonzero()[0]
        tokens = decided.tokens[unmasked]
        canvases[flight.plan.places[flight.masked.at[unmasked]]] = tokens
        saw_end = not self._eos_ids.isdisjoint(tokens.tolist())
        if saw_end:
            ends = unmasked[np.isin(tokens, list(self._eos_ids))]
            for i in flight.masked.parts_of(ends):
                flight.plan.parts[i].resident.see_end_token()
        if self._next is None:
            self._settle(part.resident for part in flight.plan.parts)
            return
        self._next_masked = masked = self._next.masked(canvases, self._mask_array)
        if saw_end or self._next.watched or 0 in masked.counts:
            self._settle(self._next.to_look_at(masked))

    def _settle(self, residents: Iterable[Resident]) -> None:
        for resident in residents:
            if resident.request not in self._residents:
                continue
            finished = resident.settle()
            if finished:
                self._record.finished[resident.request] = finished
                self._remove(resident.request)
            elif resident.needs_recompute:
                self._next = None

    @torch.inference_mode()
    def logits(self, tokens: list[int], block_length: int = 0) -> torch.Tensor:
        """Raw logits of one forward over a canvas, float32 [len(tokens), vocab]; touches no request.

        A block-causal model sees it in blocks of `block_length` (0: in one), and needs free pages: raises OutOfPages.
        """
        canvas = np.array(tokens, dtype=np.int64)
        causal = self._model.config.block_causal
        slots = self._cache.reserve(NOBODY, len(canvas)) if causal else None
        unit = (block_length or len(canvas)) if causal else 0
        placement = self._runner.place([Span(0, len(canvas), 0, len(canvas), slots, unit)])
        hidden, _ = self._runner.run(placement, canvas, np.arange(len(canvas)), {})
        logits = self._sampler.full_logits(hidden)
        self._cache.pages.free(NOBODY)
        self._runner.device.wait()  # whoever comes next writes to the buffer that this canvas is copied from
        return logits

    def warm_up(self, num_tokens: int) -> None:
        """A forward and a step over as many masks: what is made on first use is there then, and a forward's time
        is known.
        """
        began_at = time.perf_counter()
        self.logits([self._mask_id] * num_tokens)
        self.token_s = (time.perf_counter() - began_at) / num_tokens
        causal = self._model.config.block_causal
        decoding = Decoding(block_length=num_tokens, cache="none", block_causal=causal)
        self._admit(Admit(NOBODY, [self._mask_id] * num_tokens, 0, num_tokens, num_tokens, decoding))
        self.step()
        self._remove(NOBODY)

    def shards(self) -> list[Shard]:
        """Its weights, for the next engine of this rank."""
        return list(self._model.shards())

    def check(self) -> None:
        """Raises AssertionError where pages and residents do not fit together."""
        self._cache.check()

    def close(self) -> None:
        self._residents.clear()
        self._runner.close()
