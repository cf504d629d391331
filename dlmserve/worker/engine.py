"""The engine of one rank: admits requests, runs denoising steps over all of them, reports what was unmasked.

All ranks of an instance run this same deterministic code on the same commands; what a step decides depends only on
values that every rank has after the exchange. Knows nothing of sockets, the head or scheduling.
"""

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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
    RequestStep,
    SetRefresh,
    SetThreshold,
)
from dlmserve.worker import decision
from dlmserve.worker.batch import Span
from dlmserve.worker.canvas import Resident, StepPlan
from dlmserve.worker.device import Wait
from dlmserve.worker.hidden_reader import HiddenOutlook, HiddenReader, pool_recomputed
from dlmserve.worker.memory import MAX_STEP_TOKENS
from dlmserve.worker.runner import Runner
from dlmserve.worker.sampling import RowGroup, Sampler, Top
from dlmserve.worker.shards import Shard

NOBODY = -1  # in the place of a request's number
Alternatives = list[tuple[int, float]]  # (token, log probability), best first


@dataclass
class StepResult:
    """num_tokens: packed tokens of the step; `failed`: requests that are gone now."""

    num_tokens: int = 0
    requests: list[RequestStep] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)


@dataclass(frozen=True)
class Flight:
    """A step that was started: who takes part, and how to wait for what is decided, see decision.py."""

    plans: list[StepPlan]
    groups: list[RowGroup]
    wait: Wait
    top: list[Top]  # filled in while the step runs


class Engine:
    """A step is `launch()`, then `finish()`; both are collective over the model's group, all else is local.

    On a GPU the step runs between the two, beside whatever the caller does there; on a CPU it runs in `finish`.
    """

    def __init__(self, runner: Runner, mask_id: int, eos_ids: list[int], recompute_tokens: int = 0) -> None:
        """`recompute_tokens`: as in Form."""
        self._runner, self._model, self._cache = runner, runner.model, runner.cache
        self._sampler = Sampler(self._model, mask_id)
        self._mask_id, self._eos_ids = mask_id, frozenset(eos_ids)
        self._residents: dict[int, Resident] = {}
        self._failed: list[Failure] = []
        self._num_steps = 0
        self._recompute_tokens = recompute_tokens
        self.token_s = 0.0  # of the warm-up, per token
        self.num_bytes_read = 0  # of weights, when it was built
        self.hidden_reader: HiddenReader | None = None  # local to this rank: nothing is decided by it
        self._result = StepResult()
        self._flight: Flight | None = None

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
        """Takes effect at the next step; a request that is gone is ignored."""
        match command:
            case Admit():
                self._admit(command)
            case Cancel(request):
                self._remove(request)
            case SetThreshold(request, threshold):
                if request in self._residents:
                    self._residents[request].threshold = threshold
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
            self._residents[admit.request] = resident

    def _remove(self, request: int) -> None:
        self._residents.pop(request, None)
        self._cache.pages.free(request)

    def step(self) -> StepResult:
        """One denoising step over the residents that fit in the step's token budget."""
        self.launch()
        return self.finish()

    @torch.inference_mode()
    def launch(self) -> None:
        """Plans a step over the residents that fit in the step's token budget, and starts it."""
        self._result = StepResult(failed=self._failed, released=self._release_due())
        self._failed = []
        plans = self._choose()
        if not plans:
            return
        self._num_steps += 1
        self._result.num_tokens = sum(plan.span.end - plan.span.start for plan in plans)
        groups, top = _row_groups(plans), list[Top]()
        with self._runner.device.named_errors():
            wait = self._runner.device.start(partial(self._compute, plans, groups, top))
        self._flight = Flight(plans, groups, wait, top)

    def _compute(self, plans: list[StepPlan], groups: list[RowGroup], top: list[Top]) -> list[torch.Tensor]:
        rules, on_device = decision.rules(plans, groups), self._runner.device.queues
        staged = self._sampler.arrays(groups) | (rules if on_device else {})
        hidden, index = self._runner.run([plan.span for plan in plans], staged)
        drawn = self._sampler.draw(hidden, groups, index)
        top += drawn.top
        read = self._read_hidden(hidden, plans)
        if on_device:
            return decision.decide_on_device(drawn.parts, index, self._model.config.shifted_logits) + read
        return decision.decide_on_host(drawn.parts, rules) + read

    def _read_hidden(self, hidden: torch.Tensor, plans: list[StepPlan]) -> list[torch.Tensor]:
        """What is read of the requests at a recompute step, f32 [n, 2], where there is a reader."""
        if self.hidden_reader is None or not any(plan.recompute for plan in plans):
            return []
        return [self.hidden_reader(pool_recomputed(hidden, plans))]

    @torch.inference_mode()
    def finish(self) -> StepResult:
        """Waits for what `launch` started and applies it to the canvases."""
        flight, self._flight = self._flight, None
        if flight is not None:
            with self._runner.device.named_errors():
                tokens, confidences, chosen, *read = flight.wait()
                top = _alternatives(flight.top)
            outlooks = _by_request(flight.plans, read)
            self._unmask(flight, tokens, confidences, chosen, top, outlooks)
        return self._result

    def _release_due(self) -> list[int]:
        due = [r.request for r in self._residents.values() if r.release_asked and r.needs_recompute]
        for request in due:
            self._remove(request)
        return due

    def _choose(self) -> list[StepPlan]:
        """Who takes part, in the order of a batch: who waited longest, up to the token budgets, at least one."""
        chosen: list[StepPlan] = []
        num_tokens = recomputed = 0
        for resident in sorted(self._residents.values(), key=lambda r: r.last_step):
            plan = resident.plan()
            span_tokens = plan.span.end - plan.span.start
            if resident.needs_recompute and self._recompute_tokens:
                if recomputed and recomputed + span_tokens > self._recompute_tokens:
                    continue
                recomputed += span_tokens
            num_tokens += span_tokens
            if chosen and num_tokens > MAX_STEP_TOKENS:
                break
            resident.last_step = self._num_steps
            chosen.append(plan)
        return sorted(chosen, key=lambda plan: plan.span.order)

    def _unmask(
        self,
        flight: Flight,
        tokens: np.ndarray,
        confidences: np.ndarray,
        chosen: np.ndarray,
        top: dict[int, Alternatives],
        outlooks: dict[int, HiddenOutlook],
    ) -> None:
        """Applies to each canvas what was decided for its rows."""
        finite = np.isfinite(confidences)
        all_finite = finite.all()
        for plan, group in zip(flight.plans, flight.groups, strict=True):
            rows = slice(group.start, group.end)
            request = plan.resident.request
            if not all_finite and not finite[rows].all():
                self._remove(request)
                message = "the model's logits are not finite (NaN or infinite)"
                self._result.failed.append(Failure(request, "not_finite", message))
                continue
            picked, confidence = chosen[rows], confidences[rows]
            places = np.flatnonzero(picked) if group.decoding.num_top else ()
            step = _apply(
                plan,
                plan.columns[picked],
                tokens[rows][picked],
                confidence[picked],
                top=[top[group.start + place] for place in places] if group.decoding.num_top else None,
                masked_confidences=confidence[~picked].tolist(),
                hidden=outlooks.get(request),
            )
            if step.finished:
                self._remove(request)
            self._result.requests.append(step)

    @torch.inference_mode()
    def logits(self, tokens: list[int], block_length: int = 0) -> torch.Tensor:
        """Raw logits of one forward over a canvas, float32 [len(tokens), vocab]; touches no request.

        A block-causal model sees it in blocks of `block_length` (0: in one), and needs free pages: raises OutOfPages.
        """
        canvas = np.array(tokens, dtype=np.int64)
        causal = self._model.config.block_causal
        slots = self._cache.reserve(NOBODY, len(canvas)) if causal else None
        unit = (block_length or len(canvas)) if causal else 0
        span = Span(canvas, 0, len(canvas), np.arange(len(canvas)), slots, unit)
        logits = self._sampler.full_logits(self._runner.run([span], {})[0])
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


def _row_groups(plans: list[StepPlan]) -> list[RowGroup]:
    groups, at = [], 0
    for plan in plans:
        end = at + len(plan.columns)
        groups.append(RowGroup(at, end, plan.columns, plan.resident.steps_done, plan.resident.decoding))
        at = end
    return groups


def _alternatives(top: list[Top]) -> dict[int, Alternatives]:
    """By row. A copy from the device for each request that asked for logprobs."""
    found: dict[int, Alternatives] = {}
    for part in top:
        pairs = zip(part.values.tolist(), part.ids.tolist(), strict=True)
        for row, (values, ids) in enumerate(pairs, part.start):
            found[row] = list(zip(ids, values, strict=True))
    return found


def _by_request(plans: list[StepPlan], read: list[np.ndarray]) -> dict[int, HiddenOutlook]:
    """`read`: what `Engine._read_hidden` gave, on the host."""
    if not read:
        return {}
    recomputed = [plan.resident.request for plan in plans if plan.recompute]
    return {request: (row[0], row[1]) for request, row in zip(recomputed, read[0].tolist(), strict=True)}


def _apply(
    plan: StepPlan,
    positions: np.ndarray,
    tokens: np.ndarray,
    confidences: np.ndarray,
    **more: Any,
) -> RequestStep:
    """`more`: fields of RequestStep that go there as they are."""
    block = plan.resident.block  # before the canvas moves on
    return RequestStep(
        request=plan.resident.request,
        recompute=plan.recompute,
        block=block,
        threshold=plan.resident.threshold,
        positions=positions.tolist(),
        tokens=tokens.tolist(),
        confidences=confidences.tolist(),
        finished=plan.resident.unmask(positions, tokens),
        **more,
    )
