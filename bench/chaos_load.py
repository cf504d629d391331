"""The clients of the chaos run: open-loop load whose answers can be checked, and the account of what became of it.

A request's answer is *right* if it equals the undisturbed one (greedy, fixed threshold, no cache), or, for those
with a cache, which may take another path after a move, if nothing that was streamed ever changes and no mask is
left. Everything that is neither right nor an error which says why counts as wrong or lost.
"""

import asyncio
import collections
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench import tasks

ANSWER_LIMIT_S = 300.0  # no answer within this: lost
CHECKED = {"threshold": 0.9, "cache": "none", "temperature": 0}
MODEL = "tiny"


@dataclass
class Account:
    """`right` holds the instants of right answers; `errors` counts by code; `excused` failed with a killed head."""

    sent: int = 0
    right: list[float] = field(default_factory=list)
    errors: collections.Counter = field(default_factory=collections.Counter)
    excused: int = 0
    left: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    scores: list[bool] = field(default_factory=list)  # of streamed answers to verifiable tasks

    def report(self) -> dict:
        return {
            "sent": self.sent,
            "right": len(self.right),
            "errors": dict(self.errors),
            "failed_with_killed_head": self.excused,
            "left_by_client": self.left,
            "wrong": self.wrong[:20],
            "num_wrong": len(self.wrong),
            "lost": self.lost[:20],
            "num_lost": len(self.lost),
            "accuracy": sum(self.scores) / len(self.scores) if self.scores else None,
        }


class Clients:
    """`outages`: (from, to) of a head that was down; `to` is infinite while it lasts."""

    def __init__(self, base: str, num_problems: int, seed: int) -> None:
        self.base, self.rng = base, random.Random(seed)
        self.problems = tasks.problems("test", num_problems, seed)
        self.account, self.outages = Account(), [(0.0, 0.0)]
        self.undisturbed_accuracy = 0.0
        self._expected: dict[int, str] = {}
        self._running: set[asyncio.Task] = set()

    async def __aenter__(self) -> "Clients":
        limits = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self.session = aiohttp.ClientSession(self.base, timeout=limits, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def learn(self) -> None:
        """The undisturbed answers, one after another."""
        scores = []
        for index, problem in enumerate(self.problems):
            status, body = await self._post(self._checked_body(index))
            assert status == 200, body
            self._expected[index] = body["choices"][0]["text"]
            scores.append(tasks.score(problem, (await self._stream(index))[0]))
        self.undisturbed_accuracy = sum(scores) / len(scores)

    async def offer(self, rate: float, stop: asyncio.Event) -> None:
        """Poisson arrivals until `stop` is set, whatever becomes of them; then waits for all answers."""
        at = time.monotonic()
        while not stop.is_set():
            at += self.rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            self.start()
        while self._running:
            await asyncio.wait(self._running)

    def start(self) -> None:
        """One more request."""
        self.account.sent += 1
        index = self.rng.randrange(len(self.problems))
        work = self._check_answer(index) if self.rng.random() < 0.7 else self._check_stream(index)
        task = asyncio.get_running_loop().create_task(self._accounted(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def leave(self, count: int) -> None:
        """So many clients open a stream, read a little and go."""
        self.account.sent += count
        self.account.left += count
        await asyncio.gather(*(self._read_a_little() for _ in range(count)))

    async def poison(self, token: int) -> bool:
        """One request whose logits are NaN; whether it was told so."""
        status, body = await self._post({"prompt": [token, 10, 11, 12], "max_tokens": 8, "model": MODEL})
        return (status, body["error"]["code"]) in ((500, "not_finite"), (429, "queue_full"))

    # ---- one request

    async def _accounted(self, work) -> None:  # noqa: ANN001  (a coroutine)
        began_at = time.monotonic()
        try:
            await work
            return
        except asyncio.TimeoutError:
            what = f"no answer within {ANSWER_LIMIT_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            what = f"{type(error).__name__}: {error}"
        if any(began_at <= to and time.monotonic() >= start for start, to in self.outages):
            self.account.excused += 1
        else:
            self.account.lost.append(what)

    async def _check_answer(self, index: int) -> None:
        status, body = await self._post(self._checked_body(index))
        if status != 200:
            self.account.errors[body["error"]["code"]] += 1
        elif body["choices"][0]["text"] != self._expected[index]:
            self.account.wrong.append(f"{body['choices'][0]['text']!r} for {self._expected[index]!r}")
        else:
            self.account.right.append(time.monotonic())

    async def _check_stream(self, index: int) -> None:
        text, wrong, error = await self._stream(index)
        if error:
            self.account.errors[error] += 1
        elif wrong:
            self.account.wrong.append(wrong)
        else:
            self.account.right.append(time.monotonic())
            self.account.scores.append(tasks.score(self.problems[index], text))

    def _checked_body(self, index: int) -> dict:
        return CHECKED | {"prompt": self.problems[index].prompt, "max_tokens": 32, "model": MODEL}

    async def _post(self, body: dict) -> tuple[int, dict]:
        async with self.session.post("/v1/completions", json=body) as response:
            return response.status, await response.json()

    async def _stream(self, index: int) -> tuple[str, str, str]:
        """Text, what was wrong with the stream, the code of its error; "" where there is none."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": self.problems[index].prompt}],
            "stream": True,
            "stream_options": {"include_unmask": True},
        }
        text, tokens, finish, prefix = "", {}, None, 0
        async with self.session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return "", "", (await response.json())["error"]["code"]
            async for line in response.content:
                data = line.decode().removeprefix("data: ").strip()
                if data == "[DONE]":
                    whole = finish and all(min(tokens) + i in tokens for i in range(prefix))
                    return text, "" if whole else "it ended with masks left or without a reason", ""
                chunk: dict[str, Any] = json.loads(data) if data else {"choices": []}
                if "error" in chunk:
                    return text, "", chunk["error"]["code"]
                step = chunk.get("dlm") or {}
                prefix = step.get("final_prefix", prefix)
                for entry in step.get("unmasked", []):
                    if entry["position"] in tokens:
                        return text, f"position {entry['position']} was unmasked twice", ""
                    tokens[entry["position"]] = entry["token_id"]
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
        raise aiohttp.ClientPayloadError("the stream ended without [DONE]")

    async def _read_a_little(self) -> None:
        body = {"model": MODEL, "prompt": "Count on from 3:", "max_tokens": 128, "stream": True}
        try:
            async with self.session.post("/v1/completions", json=body) as response:
                await response.content.readline()
        except aiohttp.ClientError:
            pass
