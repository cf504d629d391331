"""The HTTP application on a real socket, over a head that decodes from a script."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.control.metrics import Metrics
from dlmserve.errors import NotFinite, QueueFull, Unavailable
from dlmserve.server.app import MAX_BODY_BYTES, make_app
from dlmserve.tokenizer import Tokenizer
from tests.fake_head import FakeHead, scripted

INFO = read_model_info(resolve("tiny"), "tiny")
TOKENIZER = Tokenizer(INFO.path)
HELLO = TOKENIZER.encode("hello world")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


class Client:
    """One server and a session with it."""

    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self.session, self.port = session, port

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(path, **options) as response:
            return response.status, json.loads(await response.text())

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.session.post(path, json=body, **options) as response:
            return response.status, json.loads(await response.text())

    async def events(self, path: str, body: dict) -> list[Any]:
        """The data of all events of a stream."""
        async with self.session.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.read())


def parse_events(raw: bytes) -> list[Any]:
    events = raw.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]


@asynccontextmanager
async def serving(
    head: FakeHead, sock: socket.socket | None = None, **settings: Any
) -> AsyncIterator[Client]:
    app = make_app(head, TOKENIZER, INFO, ServerConfig(**settings), Metrics())
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1, access_log=None)
    await runner.setup()
    if sock is None:
        sock = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, sock).start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield Client(session, port)
    await runner.cleanup()


def run(story: Callable[[Client], Awaitable[None]], head: FakeHead | None = None, **settings: Any) -> None:
    async def main() -> None:
        async with serving(head or FakeHead(scripted(HELLO)), **settings) as client:
            await story(client)

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until something holds; the test's own time limit ends a wait in vain."""
    while not condition():
        await asyncio.sleep(0)


# ---- plain answers


def test_a_chat_answer_has_openais_shape_and_the_account() -> None:
    async def story(client: Client) -> None:
        status, body = await client.post(CHAT, {**HI, "model": "tiny", "max_tokens": 32, "slo_ms": 900})
        assert status == 200
        assert (
            body["object"] == "chat.completion"
            and body["model"] == "tiny"
            and body["id"].startswith("chatcmpl-")
        )
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello world", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        num_prompt = len(TOKENIZER.encode_chat(HI["messages"]))
        assert body["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": len(HELLO),
            "total_tokens": num_prompt + len(HELLO),
        }
        num_steps = len(HELLO) + 1  # one token a step, and the EOS
        assert body["dlm"] == {
            "steps": num_steps,
            "recompute_steps": 1,
            "tokens_per_step": 1.0,
            "mean_threshold": 0.9,
            "threshold_cap": None,
            "slo_ms": 900.0,
            "latency_ms": 250.0,
            "slo_met": True,
            "instances": ["a"],
        }

    run(story)


def test_a_text_answer_has_one_choice_per_prompt_and_n() -> None:
    async def story(client: Client) -> None:
        body = {"prompt": ["a", [7, 8]], "n": 2, "temperature": 1, "max_tokens": 2, "block_length": 2}
        status, body = await client.post(TEXT, body)
        assert status == 200 and body["object"] == "text_completion"
        text = TOKENIZER.decode(HELLO[:2])
        assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
            (i, text, "length") for i in range(4)
        ]
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
        assert body["dlm"]["steps"] == 8
        assert [choice["dlm"]["steps"] for choice in body["choices"]] == [2, 2, 2, 2]

    run(story)


def test_at_temperature_0_all_choices_come_from_one_decoding() -> None:
    head = FakeHead(scripted(HELLO))

    async def story(client: Client) -> None:
        _, body = await client.post(CHAT, {**HI, "n": 3})
        assert [choice["message"]["content"] for choice in body["choices"]] == ["hello world"] * 3
        assert body["usage"]["completion_tokens"] == 3 * len(HELLO)
        assert len(head.specs) == 1

    run(story, head)


def test_logprobs_of_both_endpoints() -> None:
    token = HELLO[0]

    async def story(client: Client) -> None:
        _, body = await client.post(CHAT, {**HI, "logprobs": True, "top_logprobs": 2, "max_tokens": 1})
        [entry] = body["choices"][0]["logprobs"]["content"]
        assert entry["token"] == TOKENIZER.token_text(token)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["logprob"] == pytest.approx(-0.6931, abs=1e-4)
        assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [
            (TOKENIZER.token_text(token), -0.5),
            (TOKENIZER.token_text(token + 1), -1.5),
        ]
        _, body = await client.post(TEXT, {"prompt": "a", "logprobs": 1, "max_tokens": 2})
        logprobs = body["choices"][0]["logprobs"]
        assert logprobs["tokens"] == [TOKENIZER.token_text(token) for token in HELLO[:2]]
        assert logprobs["text_offset"] == [0, len(TOKENIZER.token_text(token))]
        assert logprobs["token_logprobs"] == pytest.approx([-0.6931, -0.6931], abs=1e-4)
        assert [set(top) for top in logprobs["top_logprobs"]] == [{text} for text in logprobs["tokens"]]
        _, body = await client.post(TEXT, {"prompt": "a", "logprobs": 0, "max_tokens": 1})
        assert body["choices"][0]["logprobs"]["top_logprobs"] is None

    run(story)


def test_a_confidence_of_zero_is_a_logprob_that_json_can_hold() -> None:
    async def story(client: Client) -> None:
        _, body = await client.post(TEXT, {"prompt": "a", "logprobs": 0, "max_tokens": 1})
        assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]

    run(story, FakeHead(scripted(HELLO, confidence=0.0)))


# ---- streams


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
        head.fail_at = {1: NotFinite("logits are NaN")}
        status, body = await client.post(CHAT, {**HI, "stream": True})
        assert (status, body["error"]["code"]) == (500, "not_finite")
        head.fail_at = {3: NotFinite("logits are NaN")}
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


async def connect(port: int, body: dict, receive_bytes: int) -> socket.socket:
    """A client with a small receive buffer that has sent its request and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    raw = json.dumps(body).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    await loop.sock_sendall(sock, head.encode() + raw)
    return sock


async def read_all(sock: socket.socket) -> bytes:
    raw = b""
    while part := await asyncio.get_running_loop().sock_recv(sock, 65536):
        raw += part
    sock.close()
    return raw


def dechunk(raw: bytes) -> bytes:
    """The body of a response in chunked encoding."""
    rest, body = raw.partition(b"\r\n\r\n")[2], b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def test_a_slow_reader_gets_its_events_merged_and_delays_nobody() -> None:
    num_steps = 400
    tokens = [HELLO[i % len(HELLO)] for i in range(num_steps)]

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        head = FakeHead(scripted(tokens))
        async with serving(head, listener) as client:
            options = {"include_unmask": True}
            body = {"prompt": [7], "max_tokens": num_steps, "block_length": 1, "logprobs": 5}
            slow = await connect(client.port, body | {"stream": True, "stream_options": options}, 4096)
            await until(lambda: bool(head.specs))
            _, other = await client.post(CHAT, HI)  # answered while the slow one has read nothing
            assert other["choices"][0]["finish_reason"] == "length"
            await until(lambda: not head.running)
            events = parse_events(dechunk(await read_all(slow)))[:-1]
        assert len(events) < num_steps
        assert "".join(event["choices"][0]["text"] for event in events) == TOKENIZER.decode(tokens)
        columns = [unmasked["position"] for event in events for unmasked in event["dlm"]["unmasked"]]
        assert columns == list(range(1, num_steps + 1))
        assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == num_steps

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_cancels_all_its_choices(stream: bool) -> None:
    head = FakeHead(scripted(HELLO), paused=True)

    async def story(client: Client) -> None:
        body = {"prompt": "a", "n": 2, "temperature": 1, "stream": stream}
        sock = await connect(client.port, body, 4096)
        await until(lambda: len(head.specs) == 2)
        head.step(1)
        sock.close()
        await until(lambda: not head.running)
        assert head.cancelled == [(1, "abandoned"), (2, "abandoned")]

    run(story, head)


# ---- errors, keys, limits


def test_errors_have_openais_shape() -> None:
    async def story(client: Client) -> None:
        status, body = await client.post(CHAT, {**HI, "temprature": 1})
        assert status == 400
        assert body["error"]["type"] == "invalid_request_error" and body["error"]["param"] == "temprature"
        for path, code, wanted in [("/v1/nothing", "not_found", 404), (CHAT, "method_not_allowed", 405)]:
            status, body = await client.get(path)
            assert (status, body["error"]["code"]) == (wanted, code)
        status, body = await client.post(CHAT, {**HI, "model": "gpt-4"})
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")

    run(story)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(QueueFull("full", 7), 429, "queue_full"), (Unavailable("draining"), 503, "unavailable")],
)
def test_what_the_head_refuses(error: Exception, status: int, code: str) -> None:
    head = FakeHead(scripted(HELLO))
    head.refuse = error  # type: ignore[assignment]

    async def story(client: Client) -> None:
        async with client.session.post(CHAT, json=HI) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == code
            assert response.headers["Retry-After"] == ("7" if status == 429 else "5")

    run(story, head)


def test_an_unforeseen_error_is_a_500_that_tells_nothing() -> None:
    head = FakeHead(scripted(HELLO))
    head.script = lambda spec: [][0]  # type: ignore[index,misc]

    async def story(client: Client) -> None:
        status, body = await client.post(CHAT, HI)
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert "list index" not in body["error"]["message"]

    run(story, head)


@pytest.mark.parametrize(
    "body", [b"", b"nonsense", b'{"prompt": "\xff"}', b"[" * 100_000, b"[]", b'{"prompt": "\\udc00"}']
)
def test_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    async def story(client: Client) -> None:
        async with client.session.post(TEXT, data=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"

    run(story)


def test_a_body_over_the_limit_is_a_413_and_one_below_it_is_read() -> None:
    async def story(client: Client) -> None:
        async with client.session.post(TEXT, data=b" " * (20 * 2**20)) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "body_too_large"
        status, body = await client.post(TEXT, {"prompt": "word " * (MAX_BODY_BYTES // 6)})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")

    run(story)


def test_keys_guard_v1_and_nothing_else() -> None:
    async def story(client: Client) -> None:
        for header in (None, "Bearer wrong", "Basic one", "one", "Bearer ", "Bearer \u00e9"):
            headers = {} if header is None else {"Authorization": header}
            status, body = await client.get("/v1/models", headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key"), header
            assert (await client.post(CHAT, HI, headers=headers))[0] == 401
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers))[0] == 200
            assert (await client.post(CHAT, HI, headers=headers))[0] == 200
        assert (await client.get("/health"))[0] == 200

    run(story, api_keys=("one", "two"))


def test_as_many_responses_are_open_as_queue_and_instances_hold() -> None:
    head = FakeHead(scripted(HELLO), paused=True)

    async def story(client: Client) -> None:
        stuck = [await connect(client.port, {"prompt": "a"}, 4096) for _ in range(2)]
        await until(lambda: len(head.specs) == 2)
        status, body = await client.post(TEXT, {"prompt": "a"})
        assert (status, body["error"]["code"]) == (429, "queue_full")
        stuck[0].close()
        await until(lambda: len(head.running) == 1)
        head.paused = False
        assert (await client.post(TEXT, {"prompt": "a"}))[0] == 200
        stuck[1].close()

    run(story, head, max_queue=1, max_num_seqs=1)


def test_request_ids_are_the_clients_own_where_harmless() -> None:
    async def story(client: Client) -> None:
        for given, taken in [("abc-1", True), ("a b", False), ("x" * 65, False)]:
            async with client.session.post(CHAT, json=HI, headers={"X-Request-Id": given}) as response:
                seen = response.headers["X-Request-Id"]
                assert (seen == given) == taken
                assert (await response.json())["id"] == f"chatcmpl-{seen}"
        async with client.session.get("/v1/nothing") as response:
            assert len(response.headers["X-Request-Id"]) == 32

    run(story)


# ---- the other routes


def test_ready_says_whether_a_request_would_be_served() -> None:
    head = FakeHead(scripted(HELLO))

    async def story(client: Client) -> None:
        assert (await client.get("/ready"))[0] == 200
        head.ready = False
        status, body = await client.get("/ready")
        assert status == 503 and "no model instance" in body["error"]["message"]
        head.draining = True
        status, body = await client.get("/ready")
        assert status == 503 and "draining" in body["error"]["message"]
        assert (await client.get("/health")) == (200, {"status": "ok"})

    run(story, head)


def test_models_metrics_and_cluster() -> None:
    async def story(client: Client) -> None:
        _, body = await client.get("/v1/models")
        [model] = body["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("mine", "model", 512)
        assert (await client.post(CHAT, {**HI, "model": "mine"}))[0] == 200
        assert (await client.get("/v1/cluster")) == (200, {"running": 0})
        async with client.session.get("/metrics") as response:
            assert response.content_type == "text/plain"
            assert "dlmserve_requests_running" in await response.text()

    run(story, served_model_name="mine")
