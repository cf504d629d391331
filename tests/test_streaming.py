"""Server-sent events: their format, errors within, readers that are slow, clients that leave."""

import asyncio
import contextlib

import pytest

from dlmserve.errors import NotFinite
from tests.fake_head import FakeHead, scripted
from tests.http_client import (
    CHAT,
    HELLO,
    HI,
    TEXT,
    TOKENIZER,
    Client,
    connect,
    dechunk,
    parse_events,
    read_all,
    run,
    serving,
    small_listener,
    until,
)


def test_a_plain_stream_holds_the_text_then_the_end_then_done() -> None:
    async def story(client: Client) -> None:
        events = await client.events(CHAT, HI)
        assert events.pop() == "[DONE]"
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0]["role"] == "assistant" and all("role" not in delta for delta in deltas[1:])
        assert "".join(delta["content"] for delta in deltas) == "hello world"
        assert [event["choices"][0]["finish_reason"] for event in events][-2:] == [None, "stop"]
        assert "usage" not in events[0] and "dlm" not in events[0]
        assert events[-1]["usage"]["completion_tokens"] == len(HELLO)
        assert events[-1]["dlm"]["steps"] == len(HELLO) + 1

    run(story)


def test_include_usage_adds_a_last_chunk_without_choices() -> None:
    async def story(client: Client) -> None:
        events = await client.events(CHAT, {**HI, "stream_options": {"include_usage": True}})
        assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
        assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == len(HELLO)
        assert events[-3]["choices"][0]["finish_reason"] == "stop"

    run(story)


def test_include_unmask_tells_what_each_step_unmasked_where() -> None:
    script = scripted(HELLO, per_step=2, shuffle=3)
    head = FakeHead(script, paused=True)

    async def story(client: Client) -> None:
        options = {"include_unmask": True}
        body = {"prompt": [7, 8], "max_tokens": 32, "stream": True, "stream_options": options}
        sent = asyncio.ensure_future(client.session.post(TEXT, json=body))
        await until(lambda: bool(head.specs))
        head.step(1)
        chunks = []
        async with await sent as response:
            while head.running:  # a step for each chunk that was read
                chunks += parse_events(await response.content.readuntil(b"\n\n"))
                head.step(1)
            chunks += parse_events(await response.read())[:-1]
        steps = [chunk["dlm"] for chunk in chunks]
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        assert [step["unmasked"] for step in steps] == [
            [
                {
                    "position": unmasked.position,
                    "token_id": unmasked.token,
                    "text": TOKENIZER.token_text(unmasked.token),
                    "confidence": 0.5,
                }
                for unmasked in step
            ]
            for step in script(head.specs[0])[: len(steps)]
        ]
        assert {(step["block"], step["threshold"]) for step in steps} == {(0, 0.9)}
        assert steps[-1]["final_prefix"] == len(HELLO)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"

    run(story, head)


def test_the_chunks_of_several_choices_name_theirs_and_usage_comes_once() -> None:
    async def story(client: Client) -> None:
        events = (await client.events(TEXT, {"prompt": ["a", "b"], "n": 2, "temperature": 1}))[:-1]
        texts = dict.fromkeys(range(4), "")
        for event in events:
            [choice] = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == dict.fromkeys(range(4), "hello world")
        assert ["usage" in event for event in events] == [False] * (len(events) - 1) + [True]

    run(story)


def test_stop_strings_are_never_streamed() -> None:
    async def story(client: Client) -> None:
        for body in ({**HI, "stop": "o w"}, {**HI, "stop": ["zzz", "o w"]}):
            events = await client.events(CHAT, body)
            assert "".join(event["choices"][0]["delta"]["content"] for event in events[:-1]) == "hell"
            assert events[-2]["choices"][0]["finish_reason"] == "stop"
            _, whole = await client.post(CHAT, body)
            assert whole["choices"][0]["message"]["content"] == "hell"
            assert whole["usage"] == events[-2]["usage"]

    run(story)


def test_streamed_logprobs_add_up_to_those_of_the_whole() -> None:
    async def story(client: Client) -> None:
        body = {**HI, "logprobs": True, "top_logprobs": 1}
        events = await client.events(CHAT, body)
        streamed = [entry for event in events[:-1] for entry in event["choices"][0]["logprobs"]["content"]]
        _, whole = await client.post(CHAT, body)
        assert streamed == whole["choices"][0]["logprobs"]["content"]

    run(story)


def test_an_error_before_the_first_event_has_its_own_status_a_later_one_is_an_event() -> None:
    head = FakeHead(scripted(HELLO))

    async def story(client: Client) -> None:
        head.fail_at = {(1, 1): NotFinite("logits are NaN")}
        status, body = await client.post(CHAT, {**HI, "stream": True})
        assert (status, body["error"]["code"]) == (500, "not_finite")
        head.fail_at = {(2, 3): NotFinite("logits are NaN")}
        events = await client.events(CHAT, HI)
        assert events[-1]["error"] == {
            "message": "logits are NaN",
            "type": "server_error",
            "param": None,
            "code": "not_finite",
        }
        assert len(events) > 1 and "[DONE]" not in events

    run(story, head)


# ---- clients that are slow, and clients that leave


def test_the_error_of_one_choice_ends_the_stream_of_all() -> None:
    head = FakeHead(scripted(HELLO), paused=True)
    head.fail_at = {(2, 2): NotFinite("logits are NaN")}

    async def story(client: Client) -> None:
        body = {"prompt": "a", "n": 2, "temperature": 1, "max_tokens": 2, "stream": True}
        sent = asyncio.ensure_future(client.session.post(TEXT, json=body))
        await until(lambda: len(head.specs) == 2)
        head.step(1)
        async with await sent as response:
            await response.content.readuntil(b"\n\n")
            for number in (2, 2, 1):  # the second fails, the first is complete, before a chunk is written
                head.step(number)
            *chunks, error = parse_events(await response.read())
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length", None]
        assert not any("usage" in chunk for chunk in chunks)
        assert error["error"]["code"] == "not_finite"

    run(story, head)


NUM_STEPS = 400
# More than the socket buffers hold: some 1.5 KB of logprobs for each token.
BULKY: dict = {
    **HI,
    "max_tokens": NUM_STEPS,
    "block_length": 1,
    "logprobs": True,
    "top_logprobs": 20,
    "stream": True,
    "stream_options": {"include_unmask": True},
}


def test_a_slow_reader_gets_its_events_merged_and_delays_nobody() -> None:
    tokens = [HELLO[i % len(HELLO)] for i in range(NUM_STEPS)]

    async def main() -> None:
        head = FakeHead(scripted(tokens))
        async with serving(head, small_listener()) as client:
            slow = await connect(client.port, CHAT, BULKY)
            await until(lambda: bool(head.specs))
            _, other = await client.post(CHAT, HI)  # answered while the slow one has read nothing
            assert other["choices"][0]["finish_reason"] == "length"
            await until(lambda: not head.running)
            events = parse_events(dechunk(await read_all(slow)))[:-1]
        assert len(events) < NUM_STEPS
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["delta"]["content"] for choice in choices) == TOKENIZER.decode(tokens)
        assert sum(len(choice["logprobs"]["content"]) for choice in choices) == NUM_STEPS
        columns = [unmasked["position"] for event in events for unmasked in event["dlm"]["unmasked"]]
        start = head.specs[0].output_start
        assert columns == list(range(start, start + NUM_STEPS))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_reader_that_takes_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dlmserve.server.streaming.STALL_LIMIT_S", 0.05)

    async def main() -> None:
        head = FakeHead(scripted(HELLO * NUM_STEPS))
        async with serving(head, small_listener()) as client:
            stuck = await connect(client.port, CHAT, BULKY)
            await until(lambda: "took nothing" in caplog.text)
            with contextlib.suppress(ConnectionResetError):
                assert b"[DONE]" not in await read_all(stuck)
        stuck.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_cancels_all_its_choices(stream: bool) -> None:
    head = FakeHead(scripted(HELLO), paused=True)

    async def story(client: Client) -> None:
        body = {"prompt": "a", "n": 2, "temperature": 1, "stream": stream}
        sock = await connect(client.port, TEXT, body)
        await until(lambda: len(head.specs) == 2)
        head.step(1)
        sock.close()
        await until(lambda: not head.running)
        assert head.cancelled == [(1, "abandoned"), (2, "abandoned")]

    run(story, head)
