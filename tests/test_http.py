"""Whole answers, errors, keys, limits and the small routes, over a head that decodes from a script."""

import asyncio
import gzip
from typing import Any

import pytest

from dlmserve.errors import OutOfPages, QueueFull, Unavailable
from dlmserve.server.app import LAYOUT, MAX_BODY_BYTES
from tests.fake_head import FakeHead, scripted
from tests.http_client import CHAT, HELLO, HI, TEXT, TOKENIZER, Client, connect, run, until

# ---- whole answers


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
    [
        (QueueFull("full", 7), 429, "queue_full"),
        (Unavailable("draining"), 503, "unavailable"),
        (OutOfPages("no pages"), 503, "unavailable"),
    ],
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


def test_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlmserve.server.app.BODY_LIMIT_S", 0.05)

    async def story(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()

    run(story)


def test_a_compressed_body_is_refused_unread() -> None:
    async def story(client: Client) -> None:
        bomb = gzip.compress(b" " * 10 * MAX_BODY_BYTES)
        for encoding, body in [("gzip", bomb), ("gzip", b"no gzip"), ("br", b"x"), ("x" * 1000, b"x")]:
            headers = {"Content-Encoding": encoding}
            async with client.session.post(TEXT, data=body, headers=headers) as response:
                assert response.status == 400
                assert "Content-Encoding" in (await response.json())["error"]["message"]

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


def test_an_admin_key_opens_the_layout_and_nothing_else_does() -> None:
    head = FakeHead(scripted(HELLO))
    body = {"layout": [1, 2]}

    def bearer(key: str) -> dict:
        return {"Authorization": f"Bearer {key}"}

    async def story(client: Client) -> None:
        for headers in ({}, bearer("user"), bearer("wrong")):
            assert (await client.post(LAYOUT, body, headers=headers))[0] == 401
        assert head.layouts == []
        assert (await client.post(LAYOUT, body, headers=bearer("admin")))[0] == 202
        assert head.layouts == [[1, 2]]
        assert (await client.post(CHAT, HI, headers=bearer("admin")))[0] == 200

    run(story, head, api_keys=("user",), admin_keys=("admin",))


def test_without_an_admin_key_the_layout_stays() -> None:
    async def story(client: Client) -> None:
        status, answer = await client.post(LAYOUT, {"layout": [1]})
        assert status == 401 and "--admin-key" in answer["error"]["message"]
        assert (await client.get("/v1/cluster"))[0] == 200  # no API key: open

    run(story)


@pytest.mark.parametrize(
    "body", [[], {}, {"layout": 1}, {"layout": [True]}, {"layout": ["1"]}, {"layout": [1], "x": 1}]
)
def test_a_layout_that_is_none_is_refused_by_name(body: Any) -> None:
    async def story(client: Client) -> None:
        status, answer = await client.post(LAYOUT, body, headers={"Authorization": "Bearer admin"})
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"

    run(story, admin_keys=("admin",))


def test_as_many_responses_are_open_as_queue_and_instances_hold() -> None:
    head = FakeHead(scripted(HELLO), paused=True)

    async def story(client: Client) -> None:
        stuck = [await connect(client.port, TEXT, {"prompt": "a"}) for _ in range(2)]
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
