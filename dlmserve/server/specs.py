"""From a validated Request to the canvases that decode it: prompts to tokens, lengths, decoding settings.

Owns the defaults that come from the checkpoint and from the server's settings, and how choices share work.
Knows nothing of HTTP, of the head or of texts that come back.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dlmserve.checkpoint import ModelInfo
from dlmserve.config import ServerConfig
from dlmserve.control.policy.request import RequestSpec
from dlmserve.errors import ContextTooLong, RequestError
from dlmserve.grid import Grid
from dlmserve.messages import Decoding, RuleName
from dlmserve.server.schema import Prompt, Request
from dlmserve.tokenizer import Tokenizer

MAX_RUNS = 128  # prompts * n
MOST_CHARS_PER_TOKEN = 128  # the longest tokens of any vocabulary are runs of so many spaces


@dataclass(frozen=True)
class Run:
    """One decoding, and the choices of the response that show its text (several at temperature 0)."""

    spec: RequestSpec
    choices: list[int]


@dataclass(frozen=True)
class EncodedRequest:
    """Token ids of what the client wrote."""

    prompts: list[list[int]]
    suffix: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts)) + len(self.suffix) * len(self.prompts)


def encode_request(request: Request, tokenizer: Tokenizer, info: ModelInfo, context: int) -> EncodedRequest:
    """Raises RequestError for ids that are no tokens or are masks, and for texts that cannot be encoded.

    Texts that no tokenizer could fit into `context` tokens are not tokenised at all.
    """
    for text in [*request.prompts, request.suffix or ""]:
        num_chars = _num_chars(text)
        if num_chars > context * MOST_CHARS_PER_TOKEN:
            raise ContextTooLong(
                f"a prompt of {num_chars} characters cannot fit the context of {context} tokens; shorten it",
                _prompt_field(request),
            )
    prompts = [_encode_prompt(prompt, tokenizer, info) for prompt in request.prompts]
    return EncodedRequest(prompts, tokenizer.encode(request.suffix or ""))


def _encode_prompt(prompt: Prompt, tokenizer: Tokenizer, info: ModelInfo) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    if prompt and isinstance(prompt[0], dict):
        return tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
    for token in prompt:
        if not 0 <= token < info.vocab_size:  # type: ignore[operator]
            raise RequestError(f"prompt has token id {token}; wanted 0 to {info.vocab_size - 1}", "prompt")
        if token == info.mask_id:
            raise RequestError(
                f"prompt has token id {token}, the model's mask; leave masks to the server", "prompt"
            )
    return prompt  # type: ignore[return-value]


def plan_runs(
    request: Request,
    encoded: EncodedRequest,
    name: str,
    info: ModelInfo,
    config: ServerConfig,
    draw_seed: Callable[[], int],
) -> list[Run]:
    """The decodings of a request. Raises RequestError, ContextTooLong.

    Choice j of each prompt uses seed + j, so that a prompt's choices do not depend on its neighbours; at
    temperature 0 all n choices of a prompt are one run.
    """
    if len(encoded.prompts) * request.n > MAX_RUNS:
        message = (
            f"{len(encoded.prompts)} prompts times n {request.n}; wanted at most {MAX_RUNS} choices at once"
        )
        raise RequestError(message, "n")
    seed = draw_seed() if request.seed is None else request.seed
    num_runs = 1 if request.temperature == 0 else request.n
    runs = []
    for i, prompt in enumerate(encoded.prompts):
        first = i * request.n
        for j in range(num_runs):
            choices = list(range(first, first + request.n)) if num_runs == 1 else [first + j]
            spec = _make_spec(request, prompt, encoded.suffix, f"{name}-{first + j}", info, config, seed + j)
            runs.append(Run(spec, choices))
    return runs


def _make_spec(
    request: Request,
    prompt: list[int],
    suffix: list[int],
    name: str,
    info: ModelInfo,
    config: ServerConfig,
    seed: int,
) -> RequestSpec:
    grid = Grid(request.block_length or default_block_length(info, config), info.block_causal)
    if suffix and info.block_causal:
        message = (
            f"suffix is given, but {info.name} is block-causal: its answer cannot see what comes after it"
        )
        raise RequestError(message, "suffix")
    num_masks, num_tokens = _lengths(request, len(prompt), len(suffix), grid, info, config)
    num_blocks = -(-num_tokens // grid.block_length)
    rule, value = _rule(request, num_blocks, num_masks if suffix else num_blocks * grid.block_length, config)
    slo_ms = request.slo_ms if request.slo_ms is not None else config.slo_ms
    start = len(prompt)
    return RequestSpec(
        name=name,
        canvas=[*prompt, *[info.mask_id] * num_masks, *suffix],
        output_start=start,
        output_end=start + num_masks,
        limit=start + num_tokens,
        decoding=Decoding(
            block_length=grid.block_length,
            cache=request.cache or config.cache,
            refresh_blocks=config.refresh_blocks,
            rule=rule,
            value=value,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=seed % 2**63,
            ignore_eos=request.ignore_eos,
            num_top=request.logprobs or 0,
            block_causal=grid.block_causal,
        ),
        slo_s=None if slo_ms is None else slo_ms / 1000,
        priority=request.priority,
        min_threshold=request.min_threshold,
        pinned=request.threshold is not None or request.steps is not None,
    )


def _prompt_field(request: Request) -> str:
    return "messages" if request.endpoint == "chat" else "prompt"


def _num_chars(prompt: Prompt) -> int:
    """Characters to be tokenised; 0 for token ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(item["content"]) for item in prompt if isinstance(item, dict))


def context_length(info: ModelInfo, config: ServerConfig) -> int:
    """Most tokens of prompt + masks + suffix."""
    return config.max_model_len or info.max_model_len


def default_block_length(info: ModelInfo, config: ServerConfig) -> int:
    return config.block_length or info.default_block_length


def _lengths(
    request: Request,
    num_prompt: int,
    num_suffix: int,
    grid: Grid,
    info: ModelInfo,
    config: ServerConfig,
) -> tuple[int, int]:
    """(masks on the canvas, tokens of the answer).

    The masks are whole blocks, but for infilling: there the answer must meet the suffix, so there are as many
    masks as tokens and the last block may be short.
    """
    context = context_length(info, config)
    room = context - num_prompt - num_suffix
    if num_suffix:
        grid = grid._replace(block_length=1)
    num_tokens = request.max_tokens
    if num_tokens is None:
        num_tokens = max(1, min(info.default_gen_length, grid.most_masks(num_prompt, room)))
    num_masks = grid.num_masks(num_prompt, num_tokens)
    if num_masks > room:
        rounded = (
            f" ({num_tokens} rounded up to blocks of {grid.block_length})" if num_masks != num_tokens else ""
        )
        suffix = f" + {num_suffix} of suffix" if num_suffix else ""
        raise ContextTooLong(
            f"{num_prompt} tokens of prompt + {num_masks} to generate{rounded}{suffix} do not fit "
            f"the context of {context}; shorten the prompt or lower max_tokens",
            _prompt_field(request),
        )
    return num_masks, num_tokens


def _rule(request: Request, num_blocks: int, most_steps: int, config: ServerConfig) -> tuple[RuleName, float]:
    """The unmasking rule and its first value. Decoding counts steps per block, the API in total."""
    if request.steps is not None:
        if request.steps % num_blocks or request.steps > most_steps:
            wanted = f"a multiple of the number of blocks, {num_blocks}, and at most {most_steps}"
            raise RequestError(f"steps is {request.steps}; wanted {wanted}", "steps")
        return "steps", request.steps // num_blocks
    if request.threshold is not None:
        return "threshold", request.threshold
    return "threshold", max(*config.thresholds, request.min_threshold or 0.0)
