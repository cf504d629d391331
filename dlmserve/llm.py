"""LLM: offline generation in this process, with the same engine that the server's instances run.

No server, no scheduler: all prompts are handed to the engine and stepped until done. With tp_degree > 1 the other
ranks are child processes that follow this one.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeGuard

from dlmserve.checkpoint import ModelInfo, read_model_info, resolve
from dlmserve.errors import CheckpointError, ContextTooLong, RequestError
from dlmserve.messages import Admit, CacheMode, Decoding, Form, ModelSpec, RequestStep, RuleName
from dlmserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dlmserve.worker.hidden_reader import HiddenReader

Prompt = str | list[int]


@dataclass(frozen=True)
class DecodingParams:
    """How to decode. At most one of threshold, factor and steps; none of them: threshold 0.9.

    gen_length: output positions, rounded up to whole blocks on the canvas. steps: denoising steps in all, a
    multiple of the number of blocks. max_steps: the same as a bound where a threshold decides: each step then
    unmasks at least what the fixed schedule would. refresh: "full" or "response:K" (dual cache). None: the
    model's default.
    """

    gen_length: int | None = None
    block_length: int | None = None
    threshold: float | None = None
    factor: float | None = None
    steps: int | None = None
    max_steps: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    cache: CacheMode | None = None
    refresh: str = "full"


@dataclass(frozen=True)
class Step:
    """One denoising step of one request; unmasked: (canvas column, token, confidence)."""

    kind: str  # "recompute" | "cache"
    unmasked: list[tuple[int, int, float]]


@dataclass
class Completion:
    """text is "" where the model folder has no tokenizer. finish_reason: "stop" | "length"."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    steps: list[Step] = field(default_factory=list)
    finish_reason: str = "length"


class LLM:
    """A loaded model. Raises CheckpointError for a folder that cannot be used, ConfigError for options."""

    def __init__(
        self,
        model: str = "tiny",
        *,
        device: str = "auto",
        dtype: str = "auto",
        cache: CacheMode = "dual",
        load_format: Literal["auto", "dummy"] = "auto",
        tp_degree: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
    ) -> None:
        from dlmserve.worker.local import LocalInstance, pick_device

        self.info: ModelInfo = read_model_info(resolve(model), model)
        self.tokenizer = _tokenizer(self.info.path)
        self._cache: CacheMode = cache
        self._max_num_seqs = max_num_seqs
        device = pick_device(device)
        self._max_len = min(max_model_len or self.info.max_model_len, self.info.max_model_len)
        spec = ModelSpec(self.info.path, load_format, dtype, self.info.mask_id, list(self.info.eos_ids))
        form = Form(
            instance="local",
            tp_rank=0,
            tp_degree=tp_degree,
            plan_endpoints=[],
            key="",
            model=spec,
            max_model_len=self._max_len,
            max_num_seqs=max_num_seqs,
            num_pages=max_num_seqs * -(-min(self._max_len, 4096) // 32),
            page_size=32,
            collective_timeout_s=60.0,
        )
        self._instance = LocalInstance(form, device)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: DecodingParams | None = None,
        on_step: Callable[[int, RequestStep], None] | None = None,
    ) -> list[Completion]:
        """Completions in the prompts' order; on_step(prompt index, step) is called after each denoising step.

        Raises RequestError for what a prompt or the parameters get wrong, NotFinite where logits are.
        """
        params = params or DecodingParams()
        batch: list[Prompt] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)  # type: ignore[arg-type]
        admits = [self._admit(i, prompt, params) for i, prompt in enumerate(batch)]
        outs = [Completion() for _ in admits]
        waiting, running = list(admits), 0
        while waiting or running:
            while waiting and running < self._max_num_seqs:
                self._instance.apply(waiting.pop(0))
                running += 1
            result = self._instance.step()
            if result.failed:
                failure = result.failed[0]
                raise type(failure.error)(f"prompt {failure.request}: {failure.message}")
            for step in result.requests:
                outs[step.request].steps.append(_as_step(step))
                _fill(admits[step.request].canvas, step)
                if on_step:
                    on_step(step.request, step)
                if step.finished:
                    outs[step.request].finish_reason = step.finished
                    running -= 1
        for admit, out in zip(admits, outs, strict=True):
            self._finish(admit, out, params)
        return outs

    def logits(self, token_ids: list[int], block_length: int | None = None):  # noqa: ANN201  (torch is imported lazily)
        """Raw logits of one forward over a canvas: float32 tensor [len(token_ids), vocabulary].

        A block-causal model sees it in blocks of `block_length`, its own where None; other models see it whole.
        """
        self._check_ids(token_ids, allow_mask=True)
        return self._instance.logits(token_ids, block_length or self.info.default_block_length)

    @property
    def details(self) -> str:
        """Dtype, device, threads, kernel: one line for a log."""
        return self._instance.details

    def read_hidden(self, reader: "HiddenReader") -> None:
        """From now on `reader` is given the pooled hidden states of each recompute step's requests."""
        self._instance.read_hidden(reader)

    def close(self) -> None:
        """Ends the other ranks' processes, if there are any."""
        self._instance.close()

    def _admit(self, index: int, prompt: Prompt, params: DecodingParams) -> Admit:
        ids = self._encode(prompt)
        decoding, gen_length = make_decoding(params, self.info, self._cache, index)
        num_masks = decoding.grid.num_masks(len(ids), gen_length)
        if len(ids) + num_masks > self._max_len:
            raise ContextTooLong(
                f"prompt of {len(ids)} tokens + canvas of {num_masks} exceeds the context of {self._max_len}",
                "gen_length",
            )
        return Admit(
            request=index,
            canvas=ids + [self.info.mask_id] * num_masks,
            output_start=len(ids),
            output_end=len(ids) + num_masks,
            limit=len(ids) + gen_length,
            decoding=decoding,
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "this model folder has no tokenizer.json: give prompts as token ids", "prompts"
                )
            return self.tokenizer.encode_prompt(prompt)
        self._check_ids(prompt, allow_mask=False)
        return list(prompt)

    def _check_ids(self, ids: list[int], allow_mask: bool) -> None:
        for token in ids:
            if not 0 <= token < self.info.vocab_size:
                raise RequestError(f"token id {token} is outside 0..{self.info.vocab_size - 1}", "prompts")
        if not allow_mask and self.info.mask_id in ids:
            raise RequestError(f"the prompt holds the mask token {self.info.mask_id}", "prompts")
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one", "prompts")

    def _finish(self, admit: Admit, out: Completion, params: DecodingParams) -> None:
        ids = admit.canvas[admit.output_start : admit.limit]
        if out.finish_reason == "stop":
            ids = ids[: next(i for i, token in enumerate(ids) if token in self.info.eos_ids)]
        out.token_ids = ids
        if self.tokenizer is not None:
            out.text = self.tokenizer.decode(ids)
            self._cut_at_stop(out, [params.stop] if isinstance(params.stop, str) else list(params.stop))

    def _cut_at_stop(self, out: Completion, stops: list[str]) -> None:
        found = [at for at in (out.text.find(stop) for stop in stops if stop) if at >= 0]
        if found:
            out.text, out.finish_reason = out.text[: min(found)], "stop"
            assert self.tokenizer is not None
            while out.token_ids and len(self.tokenizer.decode(out.token_ids[:-1])) >= len(out.text):
                out.token_ids = out.token_ids[:-1]


def make_decoding(
    params: DecodingParams, info: ModelInfo, cache: CacheMode, index: int
) -> tuple[Decoding, int]:
    """The wire form of `params`, and the output length. Raises RequestError naming the parameter."""
    from dlmserve.config import parse_refresh

    gen_length = params.gen_length if params.gen_length is not None else info.default_gen_length
    block = params.block_length if params.block_length is not None else info.default_block_length
    if gen_length < 1 or block < 1:
        raise RequestError(
            f"gen_length is {gen_length} and block_length {block}; wanted at least 1", "gen_length"
        )
    given = {"threshold": params.threshold, "factor": params.factor, "steps": params.steps}
    rules: list[RuleName] = [name for name, value in given.items() if value is not None]  # type: ignore[misc]
    if len(rules) > 1:
        raise RequestError(f"{' and '.join(rules)} are given; wanted at most one of them", rules[1])
    rule: RuleName = rules[0] if rules else "threshold"
    value = given[rule] if rules else info.generation.get("threshold", 0.9)
    if params.max_steps is not None and rule != "threshold":
        raise RequestError(
            f"max_steps is {params.max_steps} and {rule} given; it bounds a threshold", "max_steps"
        )
    num_blocks = -(-gen_length // block)
    for name, steps in (("steps", params.steps), ("max_steps", params.max_steps)):
        if steps is not None and (steps < num_blocks or steps % num_blocks):
            raise RequestError(f"{name} is {steps}; wanted a multiple of the {num_blocks} blocks", name)
    if rule == "steps":
        value //= num_blocks
    elif value <= 0.0:
        raise RequestError(f"{rule} is {value}; wanted a positive number", rule)
    seed = params.seed if params.seed is not None else secrets.randbits(62)
    return (
        Decoding(
            block_length=block,
            cache=params.cache or cache,
            refresh_blocks=parse_refresh(params.refresh),
            rule=rule,
            value=float(value),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=seed + index,
            ignore_eos=params.ignore_eos,
            max_block_steps=(params.max_steps or 0) // num_blocks,
            block_causal=info.block_causal,
        ),
        gen_length,
    )


def _tokenizer(folder: str) -> Tokenizer | None:
    try:
        return Tokenizer(folder)
    except CheckpointError:
        return None


def _is_ids(prompts: object) -> TypeGuard[list[int]]:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)


def _as_step(step: RequestStep) -> Step:
    unmasked = list(zip(step.positions, step.tokens, step.confidences, strict=True))
    return Step("recompute" if step.recompute else "cache", unmasked)


def _fill(canvas: list[int], step: RequestStep) -> None:
    for position, token in zip(step.positions, step.tokens, strict=True):
        canvas[position] = token
