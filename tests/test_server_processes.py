"""Signals and losses: what ends, what goes on, and that no process stays behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

import openai
import pytest

from tests.server_process import LIMIT_S, Server, alive, eventually, gather

LONG: dict = {
    "model": "tiny",
    "prompt": "2+3=5, 4+4=",
    "max_tokens": 128,
    "stream": True,
    "stream_options": {"include_unmask": True},
    # One token a step. Without a cache, as a move refreshes the cache: the text could be another.
    "extra_body": {"block_length": 32, "ignore_eos": True, "steps": 128, "cache": "none"},
}


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server("--dtype", "float32", *getattr(request, "param", ())) as server:
        yield server


async def read(client: openai.AsyncOpenAI, first: asyncio.Event) -> list[Any]:
    """All chunks of one long stream; sets `first` with the first of them."""
    chunks = []
    async for chunk in await client.completions.create(**LONG):
        chunks.append(chunk)
        first.set()
    return chunks


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def test_sigterm_finishes_what_runs_refuses_the_rest_and_leaves_nothing(server: Server) -> None:
    below = server.descendants()
    assert len(below) >= 2  # an agent and a rank

    async def story() -> list[Any]:
        async with server.async_client() as client:
            first = asyncio.Event()
            stream = asyncio.ensure_future(read(client, first))
            await asyncio.wait_for(first.wait(), LIMIT_S)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(eventually, lambda: "draining" in server.lines[-1], "the signal is seen")
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(**LONG)
            assert caught.value.status_code == 503
            with pytest.raises(HTTPError) as not_ready:
                await asyncio.to_thread(server.get, "/ready")
            assert not_ready.value.code == 503
            return await asyncio.wait_for(stream, LIMIT_S)

    chunks = asyncio.run(story())
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 128
    assert server.process.wait(LIMIT_S) == 0
    eventually(lambda: not alive(below), "no process is left")


def test_a_second_signal_stops_at_once(server: Server) -> None:
    below = server.descendants()

    async def story() -> None:
        async with server.async_client() as client:
            first = asyncio.Event()
            stream = asyncio.ensure_future(read(client, first))
            await asyncio.wait_for(first.wait(), LIMIT_S)
            server.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(eventually, lambda: "draining" in server.lines[-1], "the signal is seen")
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(openai.APIError, match="stops"):
                await asyncio.wait_for(stream, LIMIT_S)

    asyncio.run(story())
    assert server.process.wait(LIMIT_S) == 0
    eventually(lambda: not alive(below), "no process is left")


@pytest.mark.parametrize("server", [("--tp-layout", "1,2")], indirect=True)
def test_sigkill_of_the_server_leaves_no_process(server: Server) -> None:
    eventually(lambda: len(server.ranks()) == 3, "three ranks run")
    below = server.descendants()
    server.stop(signal.SIGKILL)
    eventually(lambda: not alive(below), "no process is left")


@pytest.mark.parametrize("server", [("--tp-layout", "1,1")], indirect=True)
def test_a_killed_rank_costs_no_stream_anything(server: Server) -> None:
    async def one() -> list[Any]:
        async with server.async_client() as client:
            return await read(client, asyncio.Event())

    expected = text_of(asyncio.run(one()))

    async def story() -> list[list[Any]]:
        async with server.async_client() as client:
            firsts = [asyncio.Event() for _ in range(6)]
            streams = [asyncio.ensure_future(read(client, first)) for first in firsts]
            await gather(*(first.wait() for first in firsts))
            os.kill(server.ranks()[0], signal.SIGKILL)
            return await gather(*streams)

    eventually(lambda: server.get("/v1/cluster").count('"serving"') == 2, "both instances serve")
    streams = asyncio.run(story())
    for chunks in streams:
        assert text_of(chunks) == expected
        columns = [entry["position"] for chunk in chunks for entry in chunk.dlm["unmasked"]]
        assert len(columns) == len(set(columns)) == 128
        assert chunks[-1].choices[0].finish_reason == "length"
    assert any(len(chunks[-1].dlm["instances"]) == 2 for chunks in streams), "no stream lost its instance"
    assert server.metric("rank_restarts_total") >= 1
    eventually(lambda: len(server.ranks()) == 2, "the rank is started again")


def test_a_port_in_use_is_an_error_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "dlmserve", "--port", port]
        out = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert out.returncode == 2
    assert f"--port {port} cannot be listened on" in out.stderr.splitlines()[-1]
