"""The engine of one rank: admits requests, runs denoising steps over all of them, reports what was unmasked.

All ranks of an instance run this same deterministic code on the same commands; what a step decides depends only on
values that every rank has after the exchange. Knows nothing of sockets, the head or scheduling.
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dlmserve import kernels
from dlmserve.checkpoint import read_model_info
from dlmserve.errors import ConfigError, DlmServeError, OutOfPages, WorkerError
from dlmserve.messages import (
    Admit,
    Cancel,
    Command,
    Failure,
    Form,
    Release,
    RequestStep,
    SetRefresh,
    SetThreshold,
)
from dlmserve.worker.batch import Span, pack
from dlmserve.worker.canvas import Resident, StepPlan
from dlmserve.worker.kv_cache import KVCache
from dlmserve.worker.models import Decoder, load_model
from dlmserve.worker.parallel import Group
from dlmserve.worker.sampling import Drawn, RowGroup, Sampler

# Bounds the activations of a step; whoever does not fit takes part in the next step, first come first.
MAX_STEP_TOKENS = 16384
WARM_UP_TOKENS = 32
RULES = {"threshold": kernels.THRESHOLD, "factor": kernels.FACTOR, "steps": kernels.QUOTA}


@dataclass
class StepResult:
    """num_tokens: packed tokens of the step; `failed`: requests that are gone now."""

    num_tokens: int = 0
    requests: list[RequestStep] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)


class Engine:
    """`step()` is collective over the model's group; everything else is local."""

    def __init__(self, model: Decoder, cache: KVCache, mask_id: int, eos_ids: list[int]) -> None:
        self._model, self._cache = model, cache
        self._sampler = Sampler(model, mask_id)
        self._mask_id, self._eos_ids = mask_id, frozenset(eos_ids)
        self._residents: dict[int, Resident] = {}
        self._failed: list[Failure] = []
        self._num_steps = 0
        self.token_s = 0.0  # of the warm-up, per token

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
            + f" on {self._model.device}, {torch.get_num_threads()} threads, "
            f"attention sdpa per request, confidence kernel {kernels.backend_name()}"
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
        shifted = self._model.config.shifted_logits
        try:
            resident = Resident(admit, self._mask_id, self._eos_ids, shifted)
            if len(resident.tokens) > self._model.config.max_len:
                raise WorkerError(
                    f"a canvas of {len(resident.tokens)} tokens exceeds {self._model.config.max_len}"
                )
            if admit.decoding.cache != "none":
                resident.slots = self._cache.reserve(admit.request, len(resident.tokens))
        except DlmServeError as error:
            kind = "no_pages" if isinstance(error, OutOfPages) else "refused"
            self._failed.append(Failure(admit.request, kind, str(error)))
        else:
            self._residents[admit.request] = resident

    def _remove(self, request: int) -> None:
        self._residents.pop(request, None)
        self._cache.pages.free(request)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """One denoising step over the residents that fit in the step's token budget."""
        result = StepResult(failed=self._failed, released=self._release_due())
        self._failed = []
        plans = self._choose()
        if plans:
            self._num_steps += 1
            batch = pack([plan.span for plan in plans], self._model.device)
            result.num_tokens = batch.num_tokens
            hidden = self._model.forward(batch, self._cache)
            groups = _row_groups(plans)
            self._unmask(plans, groups, self._sampler.draw(hidden, groups), result)
        return result

    def _release_due(self) -> list[int]:
        due = [r.request for r in self._residents.values() if r.release_asked and r.needs_recompute]
        for request in due:
            self._remove(request)
        return due

    def _choose(self) -> list[StepPlan]:
        """Who takes part: those that waited longest first, up to the token budget, at least one."""
        chosen: list[StepPlan] = []
        num_tokens = 0
        for resident in sorted(self._residents.values(), key=lambda r: r.last_step):
            plan = resident.plan()
            num_tokens += plan.span.end - plan.span.start
            if chosen and num_tokens > MAX_STEP_TOKENS:
                break
            resident.last_step = self._num_steps
            chosen.append(plan)
        return chosen

    def _unmask(
        self, plans: list[StepPlan], groups: list[RowGroup], drawn: Drawn, result: StepResult
    ) -> None:
        """Decides for all requests at once, then applies to each canvas."""
        confidence = drawn.confidence.cpu()
        chosen = _select(plans, groups, confidence).numpy()
        tokens, confidences = drawn.token.cpu().numpy(), confidence.numpy()
        for plan, group in zip(plans, groups, strict=True):
            rows = np.arange(group.start, group.end)
            request = plan.resident.request
            if not np.isfinite(confidences[rows]).all():
                self._remove(request)
                message = "the model's logits are not finite (NaN or infinite)"
                result.failed.append(Failure(request, "not_finite", message))
                continue
            picked = rows[chosen[rows]]
            top = [drawn.top[row] for row in picked.tolist()] if group.decoding.num_top else None
            step = _apply(plan, plan.columns[picked - group.start], tokens[picked], confidences[picked], top)
            if step.finished:
                self._remove(request)
            result.requests.append(step)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Raw logits of one forward over a canvas, float32 [len(tokens), vocab]; touches no request."""
        canvas = np.array(tokens, dtype=np.int64)
        span = Span(canvas, 0, len(canvas), np.arange(len(canvas)), None)
        return self._sampler.full_logits(self._model.forward(pack([span], self._model.device), None))

    def warm_up(self, num_tokens: int) -> None:
        """One forward over as many masks: what is made on first use is there then, and its time is known."""
        began_at = time.perf_counter()
        self.logits([self._mask_id] * num_tokens)
        self.token_s = (time.perf_counter() - began_at) / num_tokens

    def check(self) -> None:
        """Raises AssertionError where pages and residents do not fit together."""
        self._cache.check()

    def close(self) -> None:
        self._residents.clear()


def _row_groups(plans: list[StepPlan]) -> list[RowGroup]:
    groups, at = [], 0
    for plan in plans:
        end = at + len(plan.columns)
        groups.append(RowGroup(at, end, plan.columns, plan.resident.steps_done, plan.resident.decoding))
        at = end
    return groups


def _select(plans: list[StepPlan], groups: list[RowGroup], confidence: torch.Tensor) -> torch.Tensor:
    """Which rows are unmasked, bool [M], by each request's own rule."""
    rules, values = [], []
    for plan in plans:
        resident = plan.resident
        rule = resident.decoding.rule
        rules.append(kernels.ALL if plan.forced else RULES[rule])
        values.append(float(resident.steps_quota) if rule == "steps" else resident.threshold)
    return kernels.select(
        confidence,
        torch.tensor([0, *(group.end for group in groups)]),
        torch.tensor(rules),
        torch.tensor(values, dtype=torch.float64),
    )


def _apply(
    plan: StepPlan,
    positions: np.ndarray,
    tokens: np.ndarray,
    confidences: np.ndarray,
    top: list[list[tuple[int, float]]] | None,
) -> RequestStep:
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
        top=top,
    )


def build_engine(form: Form, device: str, group: Group) -> Engine:
    """Loads this rank's weights, allocates KV pages, runs one step to warm up. Raises DlmServeError."""
    info = replace(read_model_info(form.model.path), max_model_len=form.max_model_len)
    dtype = _dtype(form.model.dtype, device)
    with torch.inference_mode():
        model = load_model(info, form.model.load_format, dtype, device, group)
        num_pages = form.num_pages or form.max_num_seqs * -(-form.max_model_len // form.page_size)
        kv_heads = model.shard.kv_heads[1] - model.shard.kv_heads[0]
        cache = KVCache(
            model.config.num_layers, num_pages, form.page_size, kv_heads, model.config.head_dim, dtype, device
        )
        engine = Engine(model, cache, form.model.mask_id, form.model.eos_ids)
        engine.warm_up(min(WARM_UP_TOKENS, form.max_model_len))
    return engine


def _dtype(name: str, device: str) -> torch.dtype:
    """ "auto": float32 on CPUs, where it is the fastest and exact, bfloat16 on GPUs."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {name!r}; wanted auto, float32, bfloat16 or float16")
    return getattr(torch, name)
