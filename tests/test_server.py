"""The table of the API's promises, with OpenAI's own client against a real server and the embedded model."""

import asyncio
import itertools
import json
import math
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.tokenizer import Tokenizer
from tests.server_process import Server, eventually, gather

TOKENIZER = Tokenizer(resolve("tiny"))
MASK = read_model_info(resolve("tiny")).mask_id
REVERSE = [{"role": "user", "content": "Reverse the order of the words: moon river gold"}]
PROMPT = "2+3=5, 4+4="
FREE = {"ignore_eos": True}  # the answer has exactly max_tokens tokens


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--dtype", "float32", "--max-num-seqs", "64") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="module")
def tp2_server() -> Iterator[Server]:
    with Server("--dtype", "float32", "--tp-layout", "2") as server:
        yield server
        assert server.stop() == 0


def chat(server: Server, **fields: Any) -> Any:
    return server.client.chat.completions.create(**{"model": "tiny", "messages": REVERSE, **fields})


def complete(server: Server, **fields: Any) -> Any:
    return server.client.completions.create(**{"model": "tiny", "prompt": PROMPT, **fields})


def text_of(answer: Any) -> str:
    return (
        answer.choices[0].message.content if hasattr(answer.choices[0], "message") else answer.choices[0].text
    )


def streamed(chunks: Any) -> tuple[str, str | None, Any]:
    """(text, finish reason, usage) of a stream."""
    text, reason, usage = "", None, None
    for chunk in chunks:
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            reason = choice.finish_reason or reason
        usage = chunk.usage or usage
    return text, reason, usage


def test_the_curl_line_of_the_start_up_works(server: Server) -> None:
    [line] = [line for line in server.lines if "try: curl" in line]
    out = subprocess.run(shlex.split(line.partition("try: ")[2]), capture_output=True, text=True, check=True)
    assert json.loads(out.stdout)["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_model_answers_right(server: Server) -> None:
    assert text_of(chat(server)) == "gold river moon"


# ---- lengths


def test_max_tokens_33_with_blocks_of_32_gives_33(server: Server) -> None:
    answer = chat(server, max_tokens=33, extra_body={"block_length": 32, **FREE})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (33, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_1_is_exactly_one_token(server: Server, stream: bool) -> None:
    answer = chat(server, max_tokens=1, stream=stream)
    text, reason, usage = (
        streamed(answer) if stream else (text_of(answer), answer.choices[0].finish_reason, answer.usage)
    )
    assert (text, reason, usage.completion_tokens) == ("gold", "length", 1)


def test_max_tokens_0_is_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens is 0"):
        chat(server, max_tokens=0)


def test_an_answer_ends_at_the_first_eos_and_the_blocks_after_it_are_dropped(server: Server) -> None:
    answer = chat(server, max_tokens=64, extra_body={"block_length": 32})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.dlm["recompute_steps"] == 1  # of 2 blocks
    assert "<|" not in text_of(answer)
    full = chat(server, max_tokens=64, extra_body={"block_length": 32, **FREE})
    assert (full.choices[0].finish_reason, full.usage.completion_tokens) == ("length", 64)
    assert text_of(full).startswith(text_of(answer)) and full.dlm["recompute_steps"] == 2


def test_a_canvas_over_the_context_is_refused_at_once(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, prompt=[7] * 470, max_tokens=33)
    assert caught.value.code == "context_length_exceeded"


def test_infilling_meets_its_suffix(server: Server) -> None:
    answer = complete(server, prompt="Dana ", suffix=" 5 apples.", max_tokens=5, extra_body=FREE)
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("Dana ")) + len(TOKENIZER.encode(" 5 apples."))


def test_an_empty_prompt_generates_from_the_start_token(server: Server) -> None:
    assert complete(server, prompt="", max_tokens=8, extra_body=FREE).usage.prompt_tokens == 1


# ---- what is honoured, what is refused


def test_what_clients_send_is_honoured(server: Server) -> None:
    parts = [{"type": "text", "text": REVERSE[0]["content"]}]
    answer = chat(
        server, messages=[{"role": "user", "content": parts}], n=1, top_p=0.9, user="me", stop=["zzz"],
        seed=1, max_completion_tokens=32, presence_penalty=0, logit_bias={},
    )  # fmt: skip
    assert text_of(answer) == "gold river moon"
    assert chat(server, messages=[{"role": "system", "content": "hi"}]).choices[0].message.role == "assistant"
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"extra_body": {"nobody_knows": 1}}, "nobody_knows"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(server: Server, fields: dict, named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, **fields)
    assert caught.value.param == named


def test_an_unknown_model_is_a_404(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(server, model="gpt-4")
    assert caught.value.code == "model_not_found"


def test_the_literal_mask_token_is_text_but_its_id_is_refused(server: Server) -> None:
    answer = complete(server, prompt="<|mdm_mask|>", max_tokens=1, extra_body=FREE)
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("<|mdm_mask|>")) > 1
    chat(server, messages=[{"role": "user", "content": "<|mdm_mask|><|eot_id|>"}], max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="mask"):
        complete(server, prompt=[7, MASK, 8])


# ---- choices, logprobs, stop strings, streams


def test_choices_differ_unless_greedy_and_greedy_ones_are_computed_once(server: Server) -> None:
    drawn = complete(server, prompt="x", n=2, temperature=2, seed=3, max_tokens=32, extra_body=FREE)
    assert drawn.choices[0].text != drawn.choices[1].text
    one, two = chat(server, max_tokens=32), chat(server, n=2, max_tokens=32)
    assert {choice.message.content for choice in two.choices} == {text_of(one)}
    assert two.dlm["steps"] == one.dlm["steps"]


def test_logprobs_are_the_confidences_at_which_tokens_were_unmasked(server: Server) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "max_tokens": 32}
    whole = chat(server, **fields)
    entries = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == text_of(whole)
    assert len(entries) == whole.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob, abs=1e-4)
    confidences: dict[int, float] = {}
    for chunk in chat(server, **fields, stream=True, stream_options={"include_unmask": True}):
        confidences |= {u["position"]: u["confidence"] for u in chunk.dlm["unmasked"]}
    ordered = [confidences[column] for column in sorted(confidences)][: len(entries)]
    assert [math.log(confidence) for confidence in ordered] == pytest.approx(
        [e.logprob for e in entries], abs=1e-4
    )
    legacy = complete(server, logprobs=2, max_tokens=4, extra_body=FREE).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.top_logprobs) == 4


def test_stop_strings_cut_wherever_they_fall(server: Server) -> None:
    options: dict = {"max_tokens": 24, "extra_body": {"block_length": 4, **FREE}}
    full = text_of(complete(server, **options))
    assert len(full) > 8
    for start in range(len(full) - 2):
        stop = full[start : start + 3]
        answer = complete(server, stop=stop, **options)
        cut = full[: full.find(stop)]
        assert (text_of(answer), answer.choices[0].finish_reason) == (cut, "stop")
        text, reason, usage = streamed(complete(server, stop=[stop], stream=True, **options))
        assert (text, reason, usage.completion_tokens) == (cut, "stop", answer.usage.completion_tokens)


def test_a_stop_string_that_only_began_is_released(server: Server) -> None:
    full = text_of(chat(server))
    assert text_of(chat(server, stop=full[-3:] + "!")) == full
    assert streamed(chat(server, stop=full[-3:] + "!", stream=True))[0] == full


def test_streams_say_what_was_unmasked_where_and_add_up_to_the_whole(server: Server) -> None:
    fields: dict = {"max_tokens": 40, "extra_body": {"block_length": 8, "threshold": 0.6, **FREE}}
    whole = chat(server, **fields)
    chunks = list(chat(server, stream=True, stream_options={"include_unmask": True}, **fields))
    assert streamed(chunks)[0] == text_of(whole)
    start = whole.usage.prompt_tokens
    unmasked = [entry for chunk in chunks for entry in chunk.dlm["unmasked"]]
    assert sorted(entry["position"] for entry in unmasked) == list(range(start, start + 40))
    tokens = [entry["token_id"] for entry in sorted(unmasked, key=lambda entry: entry["position"])]
    assert TOKENIZER.decode(tokens) == text_of(whole)
    steps, blocks = ([chunk.dlm[key] for chunk in chunks] for key in ("step", "block"))
    assert steps == sorted(steps) and blocks == sorted(blocks) and blocks[-1] == 4
    assert chunks[-1].dlm["final_prefix"] == 40
    assert chunks[-1].dlm["steps"] == whole.dlm["steps"] == steps[-1]


def test_a_fixed_schedule_takes_as_many_steps_as_asked(server: Server) -> None:
    answer = chat(server, max_tokens=64, extra_body={"steps": 16, "block_length": 32, **FREE})
    assert answer.dlm["steps"] == 16 and answer.dlm["mean_threshold"] is None


def test_the_account_of_an_answer(server: Server) -> None:
    dlm = chat(server, max_tokens=64, extra_body={"slo_ms": 60_000, "threshold": 0.8, "priority": 3}).dlm
    assert dlm["slo_ms"] == 60_000 and dlm["slo_met"] is True and 0 < dlm["latency_ms"] < 60_000
    assert dlm["mean_threshold"] == pytest.approx(0.8)
    assert dlm["tokens_per_step"] > 1 and len(dlm["instances"]) == 1


# ---- batches


BODIES: dict[str, dict] = {
    "long": {"prompt": "Work out: 3+4, 8-2, 5+5, 9-1", "max_tokens": 64},
    "short": {"prompt": "1", "max_tokens": 3},
    "middle": {"prompt": "List 3 days after Monday.", "max_tokens": 33},
    "padded": {"prompt": [7] * 150, "max_tokens": 20},
    "infill": {"prompt": "Anna has ", "suffix": " apples.", "max_tokens": 7},
}


async def together(server: Server, bodies: list[dict]) -> list[str]:
    async with server.async_client() as client:
        answers = await gather(*(client.completions.create(model="tiny", **body) for body in bodies))
    return [answer.choices[0].text for answer in answers]


def alone(server: Server, bodies: list[dict]) -> list[str]:
    return [text_of(complete(server, **body)) for body in bodies]


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_ragged_prompts_batched_equal_their_solo_results(server: Server, cache: str) -> None:
    extra = {"threshold": 0.7, "block_length": 8, "cache": cache, **FREE}
    bodies = [body | {"extra_body": extra} for body in BODIES.values()]
    assert asyncio.run(together(server, bodies)) == alone(server, bodies)


def test_a_seed_gives_the_same_text_alone_in_any_batch_and_on_two_ranks(
    server: Server, tp2_server: Server
) -> None:
    extra = {"threshold": 0.7, "block_length": 8, **FREE}
    bodies = [body | {"temperature": 0.8, "seed": 11, "extra_body": extra} for body in BODIES.values()]
    expected = alone(server, bodies)
    assert asyncio.run(together(server, bodies)) == expected
    assert asyncio.run(together(server, bodies[::-1]))[::-1] == expected
    assert alone(tp2_server, bodies) == expected


def test_a_greedy_request_keeps_its_text_beside_hot_ones(server: Server) -> None:
    greedy = {"prompt": PROMPT, "max_tokens": 32, "extra_body": {"threshold": 0.7, **FREE}}
    [expected] = alone(server, [greedy])
    hot = [greedy | {"temperature": 1.5, "seed": seed} for seed in range(8)]
    texts = asyncio.run(together(server, [*hot[:4], greedy, *hot[4:]]))
    assert texts[4] == expected
    assert len(set(texts)) > 1


def long_body(num_steps: int = 128, **fields: Any) -> dict:
    """One token a step."""
    extra = {"block_length": 32, "steps": num_steps, **FREE}
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": num_steps, "extra_body": extra, **fields}


def test_a_short_request_leaves_while_long_ones_run_and_the_server_stays_responsive(server: Server) -> None:
    async def story() -> None:
        async with server.async_client() as client:
            long = [asyncio.ensure_future(client.completions.create(**long_body())) for _ in range(4)]
            short = await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
            assert short.choices[0].finish_reason == "length"
            for _ in range(20):
                await asyncio.to_thread(server.get, "/health")
            assert not any(task.done() for task in long)
            answers = await gather(*long)
            assert [answer.usage.completion_tokens for answer in answers] == [128] * 4

    asyncio.run(story())


def test_clients_that_leave_free_their_pages_and_stop_their_steps(server: Server) -> None:
    async def leave(client: openai.AsyncOpenAI) -> None:
        chunks = await client.completions.create(**long_body(stream=True))
        async for _ in chunks:
            break
        await chunks.close()

    async def story() -> None:
        async with server.async_client() as client:
            await gather(*(leave(client) for _ in range(50)))

    chat(server)  # a counter is there once it has counted
    before = server.metric("requests_total")
    asyncio.run(story())
    for gauge in ("requests_running", "requests_waiting", "kv_pages_in_use"):
        eventually(lambda gauge=gauge: server.metric(gauge) == 0, f"{gauge} is 0")
    assert server.metric("requests_total") == before + 50
    num_steps = server.metric("steps_total")
    assert text_of(chat(server)) == "gold river moon"
    assert server.metric("steps_total") < num_steps + 20


def test_repeated_tokens_of_a_random_model_are_no_reason_to_stop() -> None:
    with Server("--load-format", "dummy", "--dtype", "float32") as server:
        answer = chat(server, max_tokens=64, extra_body=FREE)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (64, "length")


def test_all_metrics_are_there(server: Server) -> None:
    text = server.get("/metrics")
    for name in [
        "requests_running", "requests_waiting", "requests_total", "request_seconds",
        "slo_requests_total", "slo_met_total", "first_unmask_seconds", "steps_total",
        "step_seconds", "step_idle_seconds", "tokens_unmasked_total", "threshold_used",
        "threshold_cap", "kv_pages_in_use", "kv_pages", "instance_requests",
        "predictor_error_ratio", "migrations_total", "reconfigurations_total",
        "rank_restarts_total",
    ]:  # fmt: skip
        assert f"# TYPE dlmserve_{name} " in text
    assert "process_resident_memory_bytes" in text


def test_two_instances_share_the_load() -> None:
    async def story(server: Server) -> list[str]:
        async with server.async_client() as client:
            answers = await gather(*(client.completions.create(**long_body(32)) for _ in range(4)))
        return list(itertools.chain.from_iterable(answer.dlm["instances"] for answer in answers))

    with Server("--dtype", "float32", "--tp-layout", "1,1") as server:
        eventually(lambda: server.get("/v1/cluster").count('"serving"') == 2, "two instances serve")
        assert len(set(asyncio.run(story(server)))) == 2
