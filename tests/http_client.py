"""The HTTP application on a real socket over a FakeHead, and clients of all manners."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.control.metrics import Metrics
from dlmserve.server.app import make_app, make_runner
from dlmserve.tokenizer import Tokenizer
from tests.fake_head import FakeHead, scripted

INFO = read_model_info(resolve("tiny"), "tiny")
TOKENIZER = Tokenizer(INFO.path)
HELLO = TOKENIZER.encode("hello world")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: dict = {"messages": [{"role": "user", "content": "hi"}]}


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
    runner = make_runner(app, shutdown_timeout=1)
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


def small_listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


async def connect(port: int, path: str, body: dict) -> socket.socket:
    """A client with a small receive buffer that has sent its request and reads nothing."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
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
