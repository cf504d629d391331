"""Open-loop load on a running server: each request is sent at its own time, whatever became of those before.

Owns the client's side: what is sent when, what came back, how late. A latency counts from the time when the
request was due, so a client that falls behind hides nothing. Knows nothing of prompts' meaning or of tables.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from dlmserve.errors import ConfigError
from dlmserve.simulation.results import Ledger, Outcome

PROBE_S = 0.1  # between two questions to /health
COUNTERS = ("migrations_total", "reconfigurations_total", "step_idle_seconds_sum", "step_idle_seconds_count")


@dataclass(frozen=True)
class Shot:
    """One request: `at_s` after the start; `slo_s` None: whatever the server's default is, not judged here."""

    at_s: float
    prompt: str
    slo_s: float | None = None
    max_tokens: int | None = None

    def body(self) -> dict[str, Any]:
        fields = {
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.max_tokens,
            "slo_ms": None if self.slo_s is None else 1e3 * self.slo_s,
        }
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(frozen=True)
class Answer:
    """`latency_s` from when the request was due; `error` "" where it was answered. `dlm`: the reply's own."""

    latency_s: float
    error: str = ""
    text: str = ""
    num_tokens: int = 0
    dlm: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """`counters`: how far the server's metrics went up meanwhile; `health_s`: answers of GET /health."""

    shots: Sequence[Shot]
    answers: Sequence[Answer]
    health_s: Sequence[float]
    counters: dict[str, float]
    cluster: dict[str, Any]  # GET /v1/cluster, afterwards

    def ledger(self, right: Sequence[float] | None = None) -> Ledger:
        """`right`: what each answer is worth (0..1), where somebody knows."""
        ledger = Ledger(
            num_migrations=int(self.counters["migrations_total"]),
            num_reconfigurations=int(self.counters["reconfigurations_total"]),
        )
        for i, (shot, answer) in enumerate(zip(self.shots, self.answers, strict=True)):
            slo_s = float("inf") if shot.slo_s is None else shot.slo_s
            if answer.error:
                ledger.outcomes.append(Outcome(shot.at_s, slo_s, None))
                continue
            threshold = answer.dlm.get("mean_threshold")
            worth = None if right is None else right[i]
            outcome = Outcome(shot.at_s, slo_s, answer.latency_s, answer.num_tokens, threshold or 0.0, worth)
            ledger.outcomes.append(outcome)
            ledger.num_tokens += answer.num_tokens
            ledger.ended_at = max(ledger.ended_at, shot.at_s + answer.latency_s)
        return ledger

    @property
    def errors(self) -> dict[str, int]:
        """How often each error came."""
        texts = [answer.error for answer in self.answers if answer.error]
        return {text: texts.count(text) for text in dict.fromkeys(texts)}

    @property
    def idle_s(self) -> float | None:
        """Mean time between two steps of a busy instance; None where there were none."""
        count = self.counters["step_idle_seconds_count"]
        return self.counters["step_idle_seconds_sum"] / count if count else None


def poisson_times(num_requests: int, rps: float, seed: int) -> list[float]:
    return np.cumsum(np.random.default_rng([seed, 3]).exponential(1 / rps, num_requests)).tolist()


async def fire(url: str, shots: Sequence[Shot], api_key: str | None = None, timeout_s: float = 120.0) -> Run:
    """Sends all shots, each at its time. Raises ConfigError where no dlmserve answers at `url`."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout) as session:
        server = Server(session, url.rstrip("/"))
        if not (await server.describe()).get("ready"):
            raise ConfigError(f"the server at {url} is not ready; GET /ready says when it is")
        before = await server.counters()
        prober = asyncio.create_task(server.probe_forever())
        began_at = time.monotonic()
        answers = await asyncio.gather(*(server.send(shot, began_at + shot.at_s) for shot in shots))
        prober.cancel()
        after = await server.counters()
        counters = {name: after[name] - before[name] for name in COUNTERS}
        return Run(shots, answers, server.health_s, counters, await server.describe())


class Server:
    """The server as a client sees it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.health_s: list[float] = []

    async def describe(self) -> dict[str, Any]:
        try:
            async with self._session.get(f"{self._url}/v1/cluster") as response:
                if response.status == 401:
                    raise ConfigError(f"{self._url} wants an API key; give it with --api-key")
                content = await response.json()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ConfigError(
                f"no dlmserve answers at {self._url} ({error}); start one with `python -m dlmserve`, or name "
                "another with --url"
            ) from error
        if not isinstance(content, dict) or "instances" not in content:
            raise ConfigError(f"what answers at {self._url} is no dlmserve: GET /v1/cluster has no instances")
        return content

    async def counters(self) -> dict[str, float]:
        """Those of COUNTERS, 0 where the server has none. Raises ConfigError where it is gone."""
        try:
            async with self._session.get(f"{self._url}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise ConfigError(f"the server at {self._url} went away during the test: {error}") from error
        values: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        for name, value in re.findall(r"^dlmserve_(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
            if name in values:
                values[name] += float(value)
        return values

    async def probe_forever(self) -> None:
        while True:
            began_at = time.monotonic()
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"{self._url}/health") as response:
                    await response.read()
                self.health_s.append(time.monotonic() - began_at)
            await asyncio.sleep(PROBE_S)

    async def send(self, shot: Shot, due_at: float) -> Answer:
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        try:
            async with self._session.post(f"{self._url}/v1/chat/completions", json=shot.body()) as response:
                content = await response.json()
        except asyncio.TimeoutError:
            return Answer(time.monotonic() - due_at, "no answer in time")
        except (aiohttp.ClientError, json.JSONDecodeError) as error:
            return Answer(time.monotonic() - due_at, f"{type(error).__name__}: {error}")
        latency_s = time.monotonic() - due_at
        if response.status != 200:
            return Answer(latency_s, f"{response.status}: {content['error']['message']}")
        text = content["choices"][0]["message"]["content"]
        return Answer(latency_s, "", text, content["usage"]["completion_tokens"], content["dlm"])
