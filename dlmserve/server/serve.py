"""`dlmserve serve`: start-up, signals, shutdown. Owns the order in which things come and go.

First signal: refuse new requests (503), finish what runs within --drain-s, end everything, exit 0. Second:
end everything at once. The port stays open while draining, so that /ready can say so.
"""

import asyncio
import contextlib
import json
import logging
import signal

import uvloop
from aiohttp import web

from dlmserve import __version__
from dlmserve.checkpoint import ModelInfo, read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.control.loop import Head
from dlmserve.control.metrics import Metrics
from dlmserve.errors import ConfigError, RequestError
from dlmserve.logs import setup_logging
from dlmserve.server.app import make_app, make_runner
from dlmserve.server.specs import context_length, default_block_length
from dlmserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WRITE_OUT_S = 5.0  # for responses that are complete but not yet read by their clients


def run_server(config: ServerConfig) -> int:
    """Serves until a signal; 0 after an orderly end. Raises DlmServeError where it cannot start."""
    setup_logging(config.log_format)
    log.info("dlmserve %s loads %s", __version__, config.model)
    info = read_model_info(resolve(config.model), config.model)
    tokenizer = Tokenizer(info.path)
    check_against_model(config, info)
    return uvloop.run(serve(config, info, tokenizer))


def check_against_model(config: ServerConfig, info: ModelInfo) -> None:
    """Raises ConfigError where the settings do not fit the checkpoint."""
    if config.max_model_len is not None and not 1 <= config.max_model_len <= info.max_model_len:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}; wanted 1 to {info.max_model_len}, "
            f"the context of {info.name}"
        )
    if default_block_length(info, config) > context_length(info, config):
        raise ConfigError(
            f"--block-length is {default_block_length(info, config)}; wanted at most the context, "
            f"{context_length(info, config)}"
        )
    for degree in config.tp_layout:
        if info.num_heads % degree:
            raise ConfigError(
                f"--tp-layout has TP degree {degree}; wanted a divisor of the model's {info.num_heads} heads"
            )


async def serve(config: ServerConfig, info: ModelInfo, tokenizer: Tokenizer) -> int:
    """The server's life. Raises ConfigError, and WorkerError where no instance could be formed."""
    signals = Signals()
    metrics = Metrics()
    head = Head(config, info, metrics)
    app = make_app(head, tokenizer, info, config, metrics)
    runner = make_runner(app, WRITE_OUT_S)
    await runner.setup()
    try:
        url = await _listen(runner, config)
        _describe(config, info)
        log.info("policy: %s; step predictor: %s", config.policy, head.predictor_choice)
        await head.start()
        try:
            if await signals.interrupt(head.wait_ready()):
                return 0
            _invite(url, config, tokenizer)
            await signals.wait()
            log.info("draining for at most %.0f s; a second signal stops at once", config.drain_s)
            await signals.interrupt(head.drain(config.drain_s))
        finally:
            await head.stop()
    finally:
        await runner.cleanup()
    log.info("stopped")
    return 0


class Signals:
    """SIGINT and SIGTERM as something to wait for."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._arrived.set)

    async def wait(self) -> None:
        await self._arrived.wait()
        self._arrived.clear()

    async def interrupt(self, work) -> bool:  # noqa: ANN001  (any coroutine)
        """Runs `work`; True where a signal came first and it was cancelled. Raises what it raises."""
        task, arrival = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        await asyncio.wait({task, arrival}, return_when=asyncio.FIRST_COMPLETED)
        finished = task.done()
        for unwanted in (task, arrival):
            unwanted.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await unwanted
        return not finished


async def _listen(runner: web.AppRunner, config: ServerConfig) -> str:
    """Binds the port; returns the address for clients."""
    try:
        await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        raise ConfigError(
            f"--host {config.host} --port {config.port} cannot be listened on: {error.strerror or error}; "
            "choose another port (0: any free one), or end what uses it"
        ) from error
    port = runner.addresses[0][1]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"http://{host}:{port}"


def _describe(config: ServerConfig, info: ModelInfo) -> None:
    layout = ",".join(map(str, config.tp_layout))
    log.info(
        "model: %s, context %d, vocabulary %d, from %s",
        info.family,
        context_length(info, config),
        info.vocab_size,
        info.path,
    )
    log.info(
        "layout: TP degrees %s on %d devices (%s), up to %d requests each",
        layout,
        config.num_devices,
        config.device,
        config.max_num_seqs,
    )
    if info.block_causal:
        log.info("%s is block-causal: its cache is exact, and nothing is refreshed", info.name)
    log.info(
        "decoding: cache %s, refresh %s, block length %d, thresholds %s",
        config.cache,
        config.refresh,
        default_block_length(info, config),
        config.thresholds,
    )


def _invite(url: str, config: ServerConfig, tokenizer: Tokenizer) -> None:
    """The last lines of the start-up: the address, and a request to try."""
    question = "Write as a JSON list: Anna Oslo baker"
    path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": question}]}
    try:
        tokenizer.encode_chat(body["messages"])
    except RequestError:  # a base model has no chat template
        path, body = "/v1/completions", {"prompt": question}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_keys else ""
    log.info("serving %s on %s", config.served_model_name or config.model, url)
    log.info("try: curl %s%s -H 'Content-Type: application/json'%s -d '%s'", url, path, key, json.dumps(body))
