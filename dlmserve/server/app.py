"""The aiohttp application: routes, keys, limits, request ids, and how a generation is served.

Owns what happens between a socket and a Generation. Knows nothing of how tokens are made: it talks to a Head.
"""

import asyncio
import hashlib
import hmac
import logging
import random
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from dlmserve.checkpoint import ModelInfo
from dlmserve.config import ServerConfig
from dlmserve.control.metrics import Metrics
from dlmserve.errors import DlmServeError, QueueFull, RequestError, Unavailable
from dlmserve.logs import request_id
from dlmserve.server.completion import Generation, Head
from dlmserve.server.failures import WrongKey, describe
from dlmserve.server.replies import Reply
from dlmserve.server.schema import Endpoint, Request, decode_json, parse_request
from dlmserve.server.specs import EncodedRequest, context_length, encode_request, plan_runs
from dlmserve.server.streaming import stream
from dlmserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 2**20
BODY_LIMIT_S = 30.0  # for a body to arrive
LONG_BODY_BYTES = 8 * 2**10  # tokenising more than this, some 10 ms, leaves the event loop
PUBLIC = ("/health", "/ready", "/metrics")  # need no key
LAYOUT = "/v1/cluster/layout"  # needs an admin key
HARMLESS_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def make_app(
    head: Head, tokenizer: Tokenizer, info: ModelInfo, config: ServerConfig, metrics: Metrics
) -> web.Application:
    """Run it with `make_runner`."""
    api = Api(head, tokenizer, info, config, metrics)
    app = web.Application(
        middlewares=[identify, render_errors, require_key(config.api_keys, config.admin_keys)],
        client_max_size=MAX_BODY_BYTES,
    )
    app.router.add_get("/health", api.health)
    app.router.add_get("/ready", api.ready)
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/v1/models", api.models)
    app.router.add_get("/v1/cluster", api.cluster)
    app.router.add_post(LAYOUT, api.layout)
    app.router.add_post("/v1/chat/completions", api.chat_completions)
    app.router.add_post("/v1/completions", api.completions)
    app.on_response_prepare.append(_add_request_id)
    return app


def make_runner(app: web.Application, shutdown_timeout: float) -> web.AppRunner:
    """A client that leaves cancels its handler; compressed bodies, which could be bombs, stay as they are."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=shutdown_timeout,
        access_log=None,
    )


class WantedLayout(msgspec.Struct, forbid_unknown_fields=True):
    layout: list[int]


class Api:
    """The handlers."""

    def __init__(
        self, head: Head, tokenizer: Tokenizer, info: ModelInfo, config: ServerConfig, metrics: Metrics
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._info = info
        self._config = config
        self._metrics = metrics
        self._model = config.served_model_name or config.model
        self._context = context_length(info, config)
        self._started_at = int(time.time())
        self._num_open = 0

    async def health(self, request: web.Request) -> web.Response:
        return as_json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        if self._head.draining:
            raise Unavailable("the server is draining: it finishes what runs and takes nothing new")
        if not self._head.ready:
            raise Unavailable("no model instance serves yet")
        return as_json({"status": "ready"})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": self._metrics.content_type})

    async def models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": self._started_at,
            "owned_by": "dlmserve",
            "max_model_len": self._context,
        }
        return as_json({"object": "list", "data": [model]})

    async def cluster(self, request: web.Request) -> web.Response:
        return as_json(self._head.cluster())

    async def layout(self, request: web.Request) -> web.Response:
        """Accepted is not done: GET /v1/cluster says how far the change is."""
        body = await read_body(request)
        try:
            wanted = msgspec.json.decode(body, type=WantedLayout)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise RequestError(
                f'{error}; wanted a body like {{"layout": [1, 1, 2]}}, TP degrees', "layout"
            ) from error
        self._head.want_layout(wanted.layout)
        return as_json(self._head.cluster(), status=202)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "text")

    async def _generate(self, http: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        body = await read_body(http)
        wanted = parse_request(endpoint, decode_json(body))
        self._check_model(wanted.model)
        with self._open():
            encoded = await self._encode(wanted, len(body))
            reply_id = f"{'chatcmpl' if endpoint == 'chat' else 'cmpl'}-{request_id.get()}"
            generation = self._plan(wanted, encoded, reply_id)
            reply = Reply(wanted, encoded.num_prompt_tokens, reply_id, self._model, self._tokenizer)
            with generation:
                if wanted.stream:
                    return await stream(http, generation, reply)
                await generation.finished()
                return as_json(reply.whole(generation))

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self._model:
            message = f"model is '{model[:100]}'; this server serves '{self._model}'"
            raise RequestError(message, "model", "model_not_found")

    @contextmanager
    def _open(self) -> Iterator[None]:
        # Whatever the queue and the instances hold; only responses that nobody reads can exceed it.
        if self._num_open >= self._config.max_queue + self._head.capacity:
            raise QueueFull(
                f"{self._num_open} responses are open, as many as this server holds; try again later"
            )
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def _encode(self, wanted: Request, num_bytes: int) -> EncodedRequest:
        if num_bytes > LONG_BODY_BYTES:
            return await asyncio.to_thread(encode_request, wanted, self._tokenizer, self._info, self._context)
        return encode_request(wanted, self._tokenizer, self._info, self._context)

    def _plan(self, wanted: Request, encoded: EncodedRequest, name: str) -> Generation:
        generation = Generation(self._head)
        runs = plan_runs(wanted, encoded, name, self._info, self._config, lambda: random.getrandbits(63))
        for run in runs:
            generation.add(run, self._tokenizer, self._info.eos_ids, wanted.stop, wanted.include_unmask)
        return generation


async def read_body(request: web.Request) -> bytes:
    """Raises RequestError, HTTPRequestEntityTooLarge, HTTPRequestTimeout."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise RequestError(f"Content-Encoding is '{encoding[:40]}'; wanted a body that is not compressed")
    try:
        return await asyncio.wait_for(request.read(), BODY_LIMIT_S)
    except asyncio.TimeoutError as error:
        raise web.HTTPRequestTimeout from error
    except web.RequestPayloadError as error:
        raise RequestError(f"the body cannot be read: {error}") from error


def as_json(data: dict, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data), status=status, headers=headers, content_type="application/json"
    )


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives each request an id (the client's own X-Request-Id where that is harmless) and logs its end."""
    given = request.headers.get("X-Request-Id", "")
    request_id.set(given if HARMLESS_ID.fullmatch(given) else uuid.uuid4().hex)
    started_at = time.monotonic()
    status: int | str = "left"  # the client went away: the handler is cancelled
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        duration_s = round(time.monotonic() - started_at, 4)
        log.log(
            logging.INFO if request.method == "POST" else logging.DEBUG,
            "%s %s",
            request.method,
            request.rel_url.raw_path,
            extra={"status": status, "duration_s": duration_s},
        )


@web.middleware
async def render_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error becomes OpenAI's error object."""
    try:
        return await handler(request)
    except (DlmServeError, web.HTTPException) as error:
        failure = describe(error)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.rel_url.raw_path)
        failure = describe(error)
    return as_json(failure.body, failure.status, failure.headers)


def require_key(api_keys: tuple[str, ...], admin_keys: tuple[str, ...]) -> Middleware:
    """Bearer keys for all that is not PUBLIC, compared in constant time; no API keys configured: open.

    An admin key opens everything; LAYOUT opens to nothing else.
    """
    admin = [_digest(key) for key in admin_keys]
    users = [*admin, *(_digest(key) for key in api_keys)]

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_admins = request.path == LAYOUT
        if request.path in PUBLIC or not (is_admins or api_keys):
            return await handler(request)
        if is_admins and not admin:
            raise WrongKey("this server has no admin key; start it with --admin-key to change its layout")
        known = admin if is_admins else users
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        given = _digest(key.strip())
        # All keys are compared, whichever fits: how long this takes says nothing.
        matches = sum([hmac.compare_digest(given, digest) for digest in known])
        if scheme.lower() != "bearer" or not matches:
            raise WrongKey(
                "no API key or a wrong one; send 'Authorization: Bearer KEY' with one of this server's keys"
            )
        return await handler(request)

    return check_key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request_id.get() or ""
