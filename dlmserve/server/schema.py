"""The bodies of POST /v1/chat/completions and /v1/completions, validated into one Request.

Owns every field's meaning, bounds and default that need no model to be known. Knows nothing of tokens,
canvases or the server's settings: what is None here, `specs.py` fills in. Fields of OpenAI's API that this
server has no use for are accepted with the value that asks for nothing, and refused with any other.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from dlmserve.errors import RequestError
from dlmserve.messages import CacheMode
from dlmserve.server.fields import Fields, is_integer, shown

Endpoint = Literal["chat", "text"]
Prompt = list[dict[str, str]] | str | list[int]  # a conversation, a text, or token ids

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Request:
    """What a client asked for. `logprobs`: None for none, else how many alternatives per token."""

    endpoint: Endpoint
    model: str | None
    prompts: list[Prompt]
    suffix: str | None
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    logprobs: int | None
    stream: bool
    include_usage: bool
    include_unmask: bool
    threshold: float | None
    min_threshold: float | None
    steps: int | None
    block_length: int | None
    cache: CacheMode | None
    ignore_eos: bool
    slo_ms: float | None
    priority: int


def decode_json(body: bytes) -> object:
    """Raises RequestError for what is no JSON in UTF-8."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(
            f"the body of {len(body)} bytes is not JSON in UTF-8: {error}", None, "invalid_json"
        ) from error


def parse_request(endpoint: Endpoint, body: object) -> Request:
    """Raises RequestError naming the first field that is wrong, its value and what is wanted."""
    fields = Fields(body)
    if endpoint == "chat":
        prompts, suffix, max_tokens, logprobs = _chat_fields(fields)
    else:
        prompts, suffix, max_tokens, logprobs = _text_fields(fields)
    stream = fields.boolean("stream")
    include_usage, include_unmask = _stream_options(fields, stream)
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    _accept_neutral(fields, endpoint, n)
    request = Request(
        endpoint=endpoint,
        model=fields.string("model"),
        prompts=prompts,
        suffix=suffix,
        max_tokens=max_tokens,
        n=n,
        stop=_stop(fields),
        temperature=fields.number("temperature", "a number from 0 to 2", lambda x: 0 <= x <= 2) or 0.0,
        top_p=_fraction(fields, "top_p") or 1.0,
        top_k=fields.integer("top_k", 0, 2**31 - 1) or 0,
        seed=fields.integer("seed", -(2**63), 2**63 - 1),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        include_unmask=include_unmask,
        threshold=_fraction(fields, "threshold"),
        min_threshold=_fraction(fields, "min_threshold"),
        steps=fields.integer("steps", 1, 2**31 - 1),
        block_length=fields.integer("block_length", 1, 1024),
        cache=fields.choice("cache", ("none", "prefix", "dual")),  # type: ignore[arg-type]
        ignore_eos=fields.boolean("ignore_eos"),
        slo_ms=fields.number(
            "slo_ms", "a number of milliseconds above 0, at most a day", lambda x: 0 < x <= 86_400_000
        ),
        priority=fields.integer("priority", -(2**31), 2**31 - 1) or 0,
    )
    fields.close()
    _check_schedule(request)
    return request


def _check_schedule(request: Request) -> None:
    if request.threshold is not None and request.steps is not None:
        raise RequestError(
            f"threshold is {request.threshold} and steps is {request.steps}; wanted at most one of them",
            "steps",
        )
    if request.min_threshold is None:
        return
    if request.steps is not None:
        raise RequestError(
            "min_threshold bounds a threshold, but steps asks for a fixed schedule: leave one out",
            "min_threshold",
        )
    if request.threshold is not None and request.threshold < request.min_threshold:
        raise RequestError(
            f"threshold is {request.threshold}; wanted at least min_threshold, {request.min_threshold}",
            "threshold",
        )


def _fraction(fields: Fields, key: str) -> float | None:
    return fields.number(key, "a number above 0 and at most 1", lambda x: 0 < x <= 1)


def _chat_fields(fields: Fields) -> tuple[list[Prompt], None, int | None, int | None]:
    max_tokens = fields.integer("max_tokens", 1, 2**31 - 1)
    newer = fields.integer("max_completion_tokens", 1, 2**31 - 1)
    if None not in (max_tokens, newer) and max_tokens != newer:
        raise RequestError(
            f"max_tokens is {max_tokens} and max_completion_tokens {newer}; give one", "max_tokens"
        )
    wants_logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, 20)
    if top and not wants_logprobs:
        raise RequestError(
            f"top_logprobs is {top} but logprobs is not true; set logprobs to true", "top_logprobs"
        )
    return [_messages(fields)], None, newer or max_tokens, (top or 0) if wants_logprobs else None


def _text_fields(fields: Fields) -> tuple[list[Prompt], str | None, int | None, int | None]:
    suffix = fields.string("suffix") or None
    return (
        _prompts(fields),
        suffix,
        fields.integer("max_tokens", 1, 2**31 - 1),
        fields.integer("logprobs", 0, 5),
    )


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.any("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise RequestError(f"stop is {shown(value)}; wanted a string or at most {MAX_STOPS} strings", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop has {shown(stop)}; wanted strings of 1 to {MAX_STOP_CHARS} characters", "stop"
            )
    return tuple(stops)


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """(include_usage, include_unmask)."""
    raw = fields.any("stream_options")
    if raw is None:
        return False, False
    options = Fields(raw, "stream_options")
    include_usage, include_unmask = options.boolean("include_usage"), options.boolean("include_unmask")
    options.neutral("include_obfuscation", False)
    options.close()
    if not stream:
        raise RequestError(
            "stream_options is given but stream is not true; set stream to true", "stream_options"
        )
    return include_usage, include_unmask


def _accept_neutral(fields: Fields, endpoint: Endpoint, n: int) -> None:
    """OpenAI's other fields: those that change nothing here, and the one value of those that would."""
    fields.string("user")
    fields.neutral("frequency_penalty", 0)
    fields.neutral("presence_penalty", 0)
    fields.neutral("logit_bias", {})
    if endpoint == "text":
        fields.neutral("echo", False)
        fields.neutral("best_of", n)
        return
    fields.string("safety_identifier")
    fields.string("prompt_cache_key")
    fields.get("metadata", "a JSON object", lambda value: isinstance(value, dict))
    fields.boolean("parallel_tool_calls")
    fields.neutral("response_format", {"type": "text"})
    for key in ("tools", "functions"):
        fields.neutral(key, [])
    for key in ("tool_choice", "function_call"):
        fields.neutral(key, "none", "auto")
    fields.neutral("modalities", ["text"])
    fields.neutral("service_tier", "auto", "default")
    fields.neutral("store", False)
    fields.neutral("reasoning_effort", "none")
    fields.neutral("verbosity", "medium")
    for key in (
        "audio",
        "prediction",
        "web_search_options",
        "moderation",
        "prompt_cache_options",
        "prompt_cache_retention",
    ):
        fields.neutral(key)


def _messages(fields: Fields) -> list[dict[str, str]]:
    wanted = "a list of at least one message"
    raw = fields.required("messages", wanted, lambda value: isinstance(value, list) and bool(value))
    return [_message(Fields(message, f"messages[{i}]")) for i, message in enumerate(raw)]


def _message(fields: Fields) -> dict[str, str]:
    role = fields.required("role", "one of: " + ", ".join(ROLES), lambda value: value in tuple(ROLES))
    content = _content(fields)
    # What clients send back when they append a message object of an earlier answer.
    for key in ("name", "refusal", "audio", "function_call"):
        fields.neutral(key)
    for key in ("tool_calls", "annotations"):
        fields.neutral(key, [])
    fields.close()
    return {"role": ROLES[role], "content": content}


def _content(fields: Fields) -> str:
    """A message's text: a string, or content parts of type text, put together."""
    raw = fields.required(
        "content", "a string or a list of content parts", lambda value: isinstance(value, str | list)
    )
    if isinstance(raw, str):
        return raw
    texts = []
    for i, item in enumerate(raw):
        part = Fields(item, f"{fields.name('content')}[{i}]")
        part.required("type", "'text'", lambda value: value == "text")
        texts.append(part.required("text", "a string", lambda value: isinstance(value, str)))
        part.close()
    return "".join(texts)


def _prompts(fields: Fields) -> list[Prompt]:
    """A string, token ids, or a list of at most MAX_PROMPTS of either."""
    wanted = "a string, token ids, or a list of these"
    raw = fields.required("prompt", wanted, lambda value: isinstance(value, str | list) and value != [])
    if isinstance(raw, str) or _is_ids(raw):
        return [raw]
    if len(raw) > MAX_PROMPTS:
        raise RequestError(f"prompt is a list of {len(raw)}; wanted at most {MAX_PROMPTS} prompts", "prompt")
    for i, item in enumerate(raw):
        if not isinstance(item, str) and not _is_ids(item):
            raise RequestError(
                f"prompt[{i}] is {shown(item)}; wanted a string or a list of token ids", f"prompt[{i}]"
            )
    return raw


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(is_integer(item) for item in value)
