"""Request bodies: what each field may be, what each error says, and what becomes of it on the canvas."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.errors import ContextTooLong, RequestError
from dlmserve.server.schema import Endpoint, Request, decode_json, parse_request
from dlmserve.server.specs import Run, encode_request, plan_runs
from dlmserve.tokenizer import Tokenizer

INFO = read_model_info(resolve("tiny"), "tiny")  # context 512, block length 32, 128 tokens by default
TOKENIZER = Tokenizer(INFO.path)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}


def parse(endpoint: Endpoint = "text", **fields: Any) -> Request:
    return parse_request(endpoint, {**(CHAT if endpoint == "chat" else TEXT), **fields})


def plan(endpoint: Endpoint = "text", config: ServerConfig | None = None, **fields: Any) -> list[Run]:
    request = parse(endpoint, **fields)
    encoded = encode_request(request, TOKENIZER, INFO, 512)
    return plan_runs(request, encoded, "cmpl-1", INFO, config or ServerConfig(), lambda: 7)


def refusal(endpoint: Endpoint = "text", **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        plan(endpoint, **fields)
    return caught.value


# ---- bodies

BODIES = [
    b"",
    b"{",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"a": NaN}',
    b'{"a": 1e999}',
    b"[" * 9999,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:20]))
def test_what_is_no_json_in_utf8_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match=f"body of {len(body)} bytes is not JSON"):
        decode_json(body)


@pytest.mark.parametrize("body", [[], "text", 1, None])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(RequestError, match="wanted a JSON object"):
        parse_request("chat", body)


TEXTS = st.text("ab\0\n\u20ac\U0001f600", max_size=4) | st.sampled_from(["type", "text", "user", "dual"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
KNOWN = [
    "model", "messages", "prompt", "suffix", "max_tokens", "max_completion_tokens", "n", "stop", "seed",
    "temperature", "top_p", "top_k", "logprobs", "top_logprobs", "stream", "stream_options", "threshold",
    "min_threshold", "steps", "block_length", "cache", "ignore_eos", "slo_ms", "priority", "user",
    "logit_bias", "tools", "response_format", "echo", "best_of", "metadata",
]  # fmt: skip


@given(st.sampled_from(["chat", "text"]), st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=4))
def test_any_json_is_a_request_or_refused_by_name(endpoint: Endpoint, fields: dict) -> None:
    try:
        plan(endpoint, **fields)
    except RequestError as error:
        named = error.param is None or error.param.split("[")[0].split(".")[0] in KNOWN
        assert named and str(error)


# ---- errors name the field, the value and what is wanted


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "said"),
    [
        ("text", {"max_tokens": 0}, "max_tokens", "max_tokens is 0; wanted an integer from 1"),
        ("text", {"max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5; wanted an integer"),
        ("text", {"max_tokens": True}, "max_tokens", "max_tokens is true"),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "max_tokens is 3 and"),
        ("text", {"max_completion_tokens": 4}, "max_completion_tokens", "did you mean 'max_tokens'"),
        ("text", {"n": 17}, "n", "n is 17; wanted an integer from 1 to 16"),
        ("text", {"temperature": -1}, "temperature", "temperature is -1; wanted a number from 0 to 2"),
        ("text", {"temperature": "hot"}, "temperature", 'temperature is "hot"'),
        ("text", {"top_p": 0}, "top_p", "wanted a number above 0 and at most 1"),
        ("text", {"seed": 2**63}, "seed", f"seed is {2**63}; wanted an integer from"),
        ("text", {"stop": ""}, "stop", 'stop has ""; wanted strings of 1 to 256'),
        ("text", {"stop": ["a"] * 17}, "stop", "at most 16 strings"),
        ("text", {"stop": 3}, "stop", "stop is 3"),
        ("text", {"threshold": 1.01}, "threshold", "threshold is 1.01"),
        ("text", {"threshold": 0.9, "steps": 2}, "steps", "wanted at most one of them"),
        ("text", {"threshold": 0.5, "min_threshold": 0.6}, "threshold", "wanted at least min_threshold, 0.6"),
        ("text", {"steps": 2, "min_threshold": 0.6}, "min_threshold", "leave one out"),
        ("text", {"max_tokens": 64, "steps": 3}, "steps", "multiple of the number of blocks, 2, and at"),
        ("text", {"max_tokens": 32, "steps": 33}, "steps", "at most 32"),
        ("text", {"block_length": 1025}, "block_length", "wanted an integer from 1 to 1024"),
        ("text", {"cache": "triple"}, "cache", "wanted one of: none, prefix, dual"),
        ("text", {"slo_ms": 0}, "slo_ms", "slo_ms is 0"),
        ("text", {"priority": 0.5}, "priority", "priority is 0.5"),
        ("text", {"ignore_eos": 1}, "ignore_eos", "wanted true or false"),
        ("text", {"logprobs": 6}, "logprobs", "wanted an integer from 0 to 5"),
        ("text", {"logprobs": True}, "logprobs", "logprobs is true"),
        ("chat", {"logprobs": 3}, "logprobs", "wanted true or false"),
        ("chat", {"top_logprobs": 3}, "top_logprobs", "set logprobs to true"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
        ("chat", {"stream": True, "stream_options": {"unmask": True}}, "stream_options.unmask",
         "did you mean 'include_unmask'"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format", "not supported"),
        ("chat", {"tools": [{"type": "function"}]}, "tools", "not supported"),
        ("chat", {"tool_choice": "required"}, "tool_choice", "not supported"),
        ("text", {"logit_bias": {"5": 100}}, "logit_bias", "not supported"),
        ("text", {"presence_penalty": 0.1}, "presence_penalty", "wanted 0"),
        ("text", {"echo": True}, "echo", "not supported"),
        ("text", {"best_of": 2}, "best_of", "wanted 1"),
        ("chat", {"prompt_logprobs": 1}, "prompt_logprobs", "unknown field"),
        ("text", {"treshold": 0.5, "zzz": 1}, "treshold", "did you mean 'threshold'"),
        ("text", {"x" * 5000: 1}, "x" * 100, "unknown field"),
        ("chat", {"messages": []}, "messages", "wanted a list of at least one message"),
        ("chat", {"messages": None}, "messages", "messages is missing"),
        ("chat", {"messages": ["hi"]}, "messages[0]", 'messages[0] is "hi"; wanted a JSON object'),
        ("chat", {"messages": [{"role": "robot"}]}, "messages[0].role", "wanted one of: system"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type", "wanted 'text'"),
        ("chat", {"messages": [{"role": "user", "content": "", "name": "B"}]}, "messages[0].name", "support"),
        ("text", {"prompt": None}, "prompt", "prompt is missing"),
        ("text", {"prompt": []}, "prompt", "prompt is []"),
        ("text", {"prompt": [[]]}, "prompt[0]", "prompt[0] is []"),
        ("text", {"prompt": ["a", 3]}, "prompt[1]", "prompt[1] is 3"),
        ("text", {"prompt": [5]}, "prompt", "the model's mask"),
        ("text", {"prompt": [[7], [1088]]}, "prompt", "token id 1088; wanted 0 to 1087"),
        ("text", {"prompt": [-1]}, "prompt", "token id -1"),
        ("text", {"prompt": ["a"] * 65}, "prompt", "at most 64 prompts"),
        ("text", {"prompt": ["a"] * 64, "n": 3, "temperature": 1}, "n", "64 prompts times n 3"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_the_value_and_what_is_wanted(
    endpoint: Endpoint, fields: dict, param: str, said: str
) -> None:
    error = refusal(endpoint, **fields)
    assert error.param == param
    assert said in str(error)


def test_all_unknown_fields_are_named_at_once() -> None:
    said = str(refusal("chat", foo=1, temprature=0.5))
    assert '"foo"' in said and "\"temprature\" (did you mean 'temperature'?)" in said


def test_null_means_absent() -> None:
    others = {"messages", "prompt", "max_completion_tokens", "tools", "top_logprobs", "metadata"} | {
        "response_format"
    }
    fields = [field for field in KNOWN if field not in others]
    assert parse_request("text", TEXT | dict.fromkeys(fields)) == parse()


def test_openai_fields_that_ask_for_nothing_are_accepted() -> None:
    plain = parse("chat")
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "functions": None,
        "response_format": {"type": "text"}, "tool_choice": "none", "function_call": "auto", "user": "u",
        "parallel_tool_calls": True, "modalities": ["text"], "service_tier": "auto", "store": False,
        "metadata": {"run": "1"}, "prediction": None, "reasoning_effort": None,
    }  # fmt: skip
    assert parse("chat", **neutral) == plain
    assert parse("text", echo=False, best_of=1, user="u") == parse("text")


# ---- what is honoured


def test_content_parts_of_type_text_are_put_together() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert parse("chat", messages=[message]).prompts == [[{"role": "user", "content": "ab"}]]


def test_a_developer_is_the_system_and_an_echoed_answer_is_taken_back() -> None:
    echoed = {"role": "assistant", "content": "4", "refusal": None, "tool_calls": None, "annotations": []}
    request = parse("chat", messages=[{"role": "developer", "content": "short"}, echoed])
    assert request.prompts == [
        [{"role": "system", "content": "short"}, {"role": "assistant", "content": "4"}]
    ]


def test_text_that_spells_a_mask_is_text() -> None:
    for run in plan(prompt="<|mdm_mask|>") + plan(
        "chat", messages=[{"role": "user", "content": "<|mdm_mask|>"}]
    ):
        assert INFO.mask_id not in run.spec.canvas[: run.spec.output_start]


def test_an_empty_prompt_generates_from_the_start_token() -> None:
    [run] = plan(prompt="")
    assert run.spec.canvas[: run.spec.output_start] == [INFO.bos_id]


# ---- canvases


def layout(run: Run) -> tuple[int, int, int, int]:
    """(prompt, masks, answer, suffix) in tokens."""
    spec = run.spec
    assert spec.canvas.count(INFO.mask_id) == spec.output_end - spec.output_start
    return (
        spec.output_start,
        spec.output_end - spec.output_start,
        spec.limit - spec.output_start,
        len(spec.canvas) - spec.output_end,
    )


@pytest.mark.parametrize(
    ("fields", "masks", "answer"),
    [
        ({"max_tokens": 33}, 64, 33),
        ({"max_tokens": 1}, 32, 1),
        ({"max_tokens": 5, "block_length": 4}, 8, 5),
        ({}, 128, 128),
    ],
)
def test_the_masks_are_whole_blocks_and_the_answer_is_what_was_asked(
    fields: dict, masks: int, answer: int
) -> None:
    [run] = plan(prompt=[7, 8, 9], **fields)
    assert layout(run) == (3, masks, answer, 0)


def test_infilling_has_exactly_as_many_masks_as_tokens() -> None:
    [run] = plan(prompt=[7, 8, 9], suffix="end", max_tokens=33)
    suffix = TOKENIZER.encode("end")
    assert layout(run) == (3, 33, 33, len(suffix))
    assert run.spec.canvas[run.spec.output_end :] == suffix


def test_without_max_tokens_the_answer_is_clipped_to_whole_blocks_of_the_room_left() -> None:
    assert layout(plan(prompt=[7] * (512 - 63))[0]) == (449, 32, 32, 0)
    assert layout(plan(prompt=[7] * 500, suffix="a")[0]) == (500, 11, 11, 1)
    assert refusal(prompt=[7] * (512 - 31)).code == "context_length_exceeded"


def test_a_canvas_over_the_context_is_refused_though_its_tokens_would_fit() -> None:
    error = refusal(prompt=[7] * 470, max_tokens=33)
    assert isinstance(error, ContextTooLong) and error.param == "prompt"
    assert str(error).startswith(
        "470 tokens of prompt + 64 to generate (33 rounded up to blocks of 32) do not fit"
    )


@given(
    st.integers(1, 520), st.integers(0, 20), st.none() | st.integers(1, 600), st.none() | st.integers(1, 600)
)
def test_any_canvas_fits_the_context_and_holds_its_answer(
    num_prompt: int, num_suffix: int, max_tokens: int | None, block: int | None
) -> None:
    fields = {
        "prompt": [7] * num_prompt,
        "suffix": "a" * num_suffix,
        "max_tokens": max_tokens,
        "block_length": block,
    }
    try:
        [run] = plan(**fields)
    except ContextTooLong:
        assert num_prompt + (max_tokens or 1) + (block or 32) > 512 - 20
        return
    prompt, masks, answer, suffix = layout(run)
    assert prompt + masks + suffix <= 512 and 1 <= answer <= masks
    assert suffix or masks % (block or 32) == 0
    assert answer == max_tokens or max_tokens is None


# ---- decoding


def test_the_first_threshold_is_the_highest_unless_the_client_says_otherwise() -> None:
    asked: list[dict] = [{}, {"min_threshold": 0.95}, {"threshold": 0.3}, {"max_tokens": 64, "steps": 8}]
    specs = [plan(**fields)[0].spec for fields in asked]
    assert [(s.decoding.rule, s.decoding.value, s.pinned) for s in specs] == [
        ("threshold", 0.9, False),
        ("threshold", 0.95, False),
        ("threshold", 0.3, True),
        ("steps", 4, True),  # per block
    ]
    assert specs[1].min_threshold == 0.95


def test_the_settings_give_the_defaults_and_the_request_wins() -> None:
    config = ServerConfig(block_length=8, cache="prefix", slo_ms=500, thresholds=(0.6, 0.7))
    default, own = (
        plan(config=config)[0].spec,
        plan(config=config, block_length=16, cache="none", slo_ms=90)[0].spec,
    )
    assert (default.decoding.block_length, default.decoding.cache, default.slo_s) == (8, "prefix", 0.5)
    assert default.decoding.value == 0.7
    assert (own.decoding.block_length, own.decoding.cache, own.slo_s) == (16, "none", 0.09)


def test_each_choice_has_a_seed_of_its_own_and_each_prompt_the_same_ones() -> None:
    runs = plan(prompt=["a", "b"], n=2, temperature=0.8, seed=40)
    assert [(run.spec.decoding.seed, run.choices) for run in runs] == [
        (40, [0]),
        (41, [1]),
        (40, [2]),
        (41, [3]),
    ]


def test_without_a_seed_one_is_drawn() -> None:
    assert [run.spec.decoding.seed for run in plan(n=2, temperature=1)] == [7, 8]


def test_at_temperature_0_the_choices_of_a_prompt_are_one_run() -> None:
    assert [run.choices for run in plan(prompt=["a", "b"], n=3)] == [[0, 1, 2], [3, 4, 5]]


def test_a_negative_seed_is_a_seed() -> None:
    assert plan(seed=-1)[0].spec.decoding.seed == 2**63 - 1
