"""Real ranks that hang or die under a real head: requests go on elsewhere, token for token."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.control.loop import Head
from dlmserve.control.metrics import Metrics
from dlmserve.control.policy.request import RequestSpec
from dlmserve.messages import Decoding
from tests.test_head import LIMIT_S, Client

INFO = read_model_info(resolve("tiny"))
# One token a step; without a cache the text does not depend on where a block was begun.
DECODING = Decoding(block_length=8, cache="none", rule="steps", value=8, ignore_eos=True)


def spec(num_tokens: int) -> RequestSpec:
    canvas = [1, *range(100, 107)] + [INFO.mask_id] * num_tokens
    return RequestSpec("r", canvas, 8, len(canvas), len(canvas), DECODING, pinned=True)


def serve(run_dir: Path, story: Callable[[Head], Awaitable[None]], **settings) -> None:
    async def told() -> None:
        config = ServerConfig(run_dir=str(run_dir), device="cpu", dtype="float32", **settings)
        head = Head(config, INFO, Metrics())
        await head.start()
        try:
            await head.wait_ready()
            await until(lambda: len(serving(head)) == len(config.tp_layout))
            await story(head)
        finally:
            await head.stop()

    asyncio.run(asyncio.wait_for(told(), LIMIT_S))


def serving(head: Head) -> list[str]:
    return [each["name"] for each in head.cluster()["instances"] if each["state"] == "serving"]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


@pytest.fixture
def hanging_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Head._agent_command
    ranks = [sys.executable, "-m", "tests.hanging_rank"]
    program = ["-c", f"from dlmserve.worker.agent import main; main({ranks!r}, None)"]

    def agent_command(head: Head, endpoint: str) -> list[str]:
        python, _, _, *flags = command(head, endpoint)
        return [python, *program, *flags]

    monkeypatch.setattr(Head, "_agent_command", agent_command)


@pytest.mark.usefixtures("hanging_ranks")
def test_a_rank_that_hangs_inside_a_step_is_replaced_and_its_requests_go_on_elsewhere(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        clients = [Client(), Client()]
        for client in clients:
            head.submit(spec(64), client)
        summaries = [(await client.end)[1] for client in clients]
        assert any(summary.instances[0] == "i0.1" and len(summary.instances) > 1 for summary in summaries)
        assert clients[0].tokens == clients[1].tokens and len(clients[0].tokens) == 64
        await until(lambda: b"dlmserve_rank_restarts_total 1.0" in head._metrics.render())

    serve(tmp_path, story, tp_layout=(1, 1), step_timeout_s=2.0)


def test_the_layout_changes_under_load_and_no_token_is_lost_or_repeated(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        lives = lives_of(head)
        alone = Client()
        head.submit(spec(40), alone)
        await alone.end
        clients = []
        for layout in ([1, 1], [2], [1]):
            clients += [Client() for _ in range(3)]
            for client in clients[-3:]:
                head.submit(spec(40), client)
            head.want_layout(layout)
            await until(lambda: not head.cluster()["changing"])
            assert head.cluster()["layout"] == sorted(layout)
        summaries = [(await client.end)[1] for client in clients]
        assert all(client.tokens == alone.tokens for client in clients)
        assert any(len(summary.instances) > 1 for summary in summaries), "no request was handed over"
        assert lives_of(head) == lives, "a process was started"

    serve(tmp_path, story, tp_layout=(2,))


def lives_of(head: Head) -> list[int]:
    """How often each device's process was started."""
    return [device["generation"] for device in head.cluster()["devices"]]
