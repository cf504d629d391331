"""The head with real sockets and a real child process; only what a rank computes is fake (fake_node.py)."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dlmserve.checkpoint import ModelInfo
from dlmserve.config import ServerConfig
from dlmserve.control import loop
from dlmserve.control.loop import Head
from dlmserve.control.metrics import Metrics
from dlmserve.control.policy import cluster
from dlmserve.control.policy.cluster import RankId
from dlmserve.control.policy.events import NodeUp, RankLost, RankUp
from dlmserve.control.policy.request import RequestSpec, StepUpdate, Summary
from dlmserve.errors import ConfigError, ContextTooLong, DlmServeError, NotFinite, Unavailable, WorkerError
from dlmserve.messages import Decoding
from tests.fake_node import DEADLY, NAN

LIMIT_S = 60  # only a broken test gets there
MASK = 9999


class Client:
    """A sink that remembers; `on_token` is called with each position."""

    def __init__(self, on_token: Callable[[int], None] = lambda position: None) -> None:
        self.tokens: list[int] = []
        self.on_token = on_token
        self.end: asyncio.Future[tuple[str, Summary]] = asyncio.get_running_loop().create_future()

    def on_step(self, update: StepUpdate) -> None:
        for unmasked in update.unmasked:
            self.tokens.append(unmasked.token)
            self.on_token(unmasked.position)

    def on_finish(self, reason: str, summary: Summary) -> None:
        self.end.set_result((reason, summary))

    def on_error(self, error: DlmServeError) -> None:
        self.end.set_exception(error)


def spec(num_tokens: int = 8, first: int = 1, **fields) -> RequestSpec:
    """Four tokens of prompt, then masks."""
    canvas = [first, 2, 3, 4] + [MASK] * num_tokens
    return RequestSpec("r", canvas, 4, len(canvas), len(canvas), Decoding(block_length=4), **fields)


def make_head(run_dir: Path, path: str = "fake", **settings) -> Head:
    info = ModelInfo(path, "fake", "llada", MASK, (), None, vocab_size=10000, max_model_len=4096, num_heads=4)
    config = ServerConfig(run_dir=str(run_dir), device="cpu", **settings)
    return Head(config, info, Metrics())


@pytest.fixture(autouse=True)
def fake_node(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Head._agent_command

    def fake_command(head: Head, endpoint: str) -> list[str]:
        fake = {"dlmserve.worker.agent": "tests.fake_node"}
        return [fake.get(word, word) for word in command(head, endpoint)]

    monkeypatch.setattr(Head, "_agent_command", fake_command)
    monkeypatch.setattr(loop, "TICK_S", 0.02)
    monkeypatch.setattr(cluster, "RETRY_S", 0.0)


def serve(run_dir: Path, story: Callable[[Head], Awaitable[None]], **settings) -> None:
    """Tells `story` with a head that serves; in the end everything is stopped."""

    async def told() -> None:
        head = make_head(run_dir, **settings)
        await head.start()
        try:
            await head.wait_ready()
            await story(head)
        finally:
            await head.stop()

    asyncio.run(asyncio.wait_for(told(), LIMIT_S))


def agent_pid(head: Head) -> int:
    """The process that this head started."""
    process = head._agent._process
    assert process
    return process.pid


@pytest.mark.parametrize(
    ("node_heard_at", "lost"),
    [(0.5, []), (10.0, [RankLost(RankId("n", 0, 1), "no heartbeat for 10.2 s", False)])],
)
def test_a_rank_is_not_restarted_because_its_whole_node_is_silent(tmp_path, node_heard_at, lost) -> None:
    head, told = make_head(tmp_path, heartbeat_timeout_s=10.0), []
    rank = RankId("n", 0, 1)
    for event in (NodeUp("n", 1), RankUp(rank, "plan")):
        head._scheduler.on_event(0.0, event)
    head._peers.hear(rank, 0.0)
    head._peers.hear("n", node_heard_at)
    head._feed = told.append
    head._lose_silent(10.2)
    assert told == lost


def test_requests_run_and_are_told_everything(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        clients = [Client() for _ in range(5)]
        for client in clients:
            head.submit(spec(slo_s=60.0), client)
        for client in clients:
            reason, summary = await client.end
            assert client.tokens == list(range(4, 12))
            assert (reason, summary.steps, summary.slo_met) == ("length", 8, True)

    serve(tmp_path, story)


def test_a_cancelled_request_is_silent_and_its_pages_are_free(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        heard, client = asyncio.Event(), Client(lambda position: heard.set())
        number = head.submit(spec(2000), client)
        await heard.wait()
        summary = head.cancel(number, "abandoned")
        num_tokens = len(client.tokens)
        assert summary and summary.num_unmasked == num_tokens
        assert head.cancel(number, "abandoned") is None
        other = Client()
        head.submit(spec(), other)
        await other.end
        assert len(client.tokens) == num_tokens and not client.end.done()
        assert head.cluster()["instances"][0]["kv_pages_in_use"] == 0

    serve(tmp_path, story)


@pytest.mark.parametrize("at", [7, 11], ids=["on the way", "in its last step"])
def test_a_client_may_cancel_from_inside_its_step(tmp_path: Path, at: int) -> None:
    async def story(head: Head) -> None:
        summaries = []

        def stop(position: int) -> None:
            if position == at:
                summaries.append(head.cancel(1, "stop"))

        client, other = Client(stop), Client()
        assert head.submit(spec(), client) == 1
        head.submit(spec(40), other)
        await other.end
        assert [summary.num_unmasked for summary in summaries] == [at - 3]
        assert client.tokens[-1] == at and not client.end.done()

    serve(tmp_path, story)


def test_a_failing_client_does_not_disturb_others(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        def fail(position: int) -> None:
            raise RuntimeError("a client's bug")

        other = Client()
        head.submit(spec(), Client(fail))
        head.submit(spec(), other)
        assert (await other.end)[0] == "length"

    serve(tmp_path, story)


def test_requests_survive_the_death_of_the_whole_node(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        killed = []

        def kill_once(position: int) -> None:
            if position == 60 and not killed:
                killed.append(agent_pid(head))
                os.kill(killed[0], signal.SIGKILL)

        client = Client(kill_once)
        head.submit(spec(600), client)
        _, summary = await client.end
        assert sorted(client.tokens) == list(range(4, 604))
        assert summary.instances == ["i0.1", "i0.2"] and killed

    serve(tmp_path, story, tp_layout=(2,))


def test_a_request_that_kills_its_node_fails_in_the_end(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        client = Client()
        head.submit(spec(first=DEADLY), client)
        with pytest.raises(WorkerError, match="3 instances were lost"):
            await client.end
        other = Client()
        head.submit(spec(), other)
        await other.end

    serve(tmp_path, story)


def test_bad_requests_fail_alone(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        client, other = Client(), Client()
        head.submit(spec(first=NAN), client)
        head.submit(spec(), other)
        with pytest.raises(NotFinite):
            await client.end
        with pytest.raises(ContextTooLong):
            head.submit(spec(5000), Client())
        await other.end

    serve(tmp_path, story)


def test_draining_refuses_new_requests_and_waits_for_the_others(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        client = Client()
        head.submit(spec(100), client)
        draining = asyncio.ensure_future(head.drain(LIMIT_S))
        await asyncio.sleep(0)
        assert head.draining and not head.ready
        with pytest.raises(Unavailable, match="shutting down"):
            head.submit(spec(), Client())
        await draining
        assert client.end.done()

    serve(tmp_path, story)


def test_stopping_ends_requests_and_processes(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        client = Client()
        head.submit(spec(2000), client)
        pid = agent_pid(head)
        await head.stop()
        with pytest.raises(Unavailable):
            await client.end
        assert not Path(f"/proc/{pid}").exists()

    serve(tmp_path, story)


def test_stopping_before_the_node_is_up_leaves_no_process_either(tmp_path: Path) -> None:
    async def story() -> None:
        head = make_head(tmp_path)
        await head.start()
        pid = agent_pid(head)
        await head.stop()
        assert not Path(f"/proc/{pid}").exists()

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))


def test_nothing_is_taken_before_an_instance_serves(tmp_path: Path) -> None:
    async def story() -> None:
        head = make_head(tmp_path)
        with pytest.raises(Unavailable):
            head.submit(spec(), Client())

    asyncio.run(story())


def start(run_dir: Path, **settings) -> None:
    async def told() -> None:
        head = make_head(run_dir, **settings)
        await head.start()
        try:
            await head.wait_ready()
        finally:
            await head.stop()

    asyncio.run(asyncio.wait_for(told(), LIMIT_S))


def test_a_model_that_cannot_be_loaded_is_reported_by_its_own_message(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="broken: no weights there"):
        start(tmp_path, path="broken")


def test_an_agent_that_cannot_start_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Head, "_agent_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(WorkerError, match="exit code 3"):
        start(tmp_path)


def test_an_open_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="CURVE"):
        asyncio.run(make_head(tmp_path, listen="tcp://0.0.0.0:5570").start())


def test_what_happened_can_be_read_in_the_metrics(tmp_path: Path) -> None:
    async def story(head: Head) -> None:
        client = Client()
        head.submit(spec(slo_s=60.0), client)
        await client.end
        lines = set(head._metrics.render().decode().splitlines())
        assert lines >= {
            'dlmserve_requests_total{outcome="length"} 1.0',
            'dlmserve_steps_total{kind="cache"} 8.0',
            "dlmserve_tokens_unmasked_total 8.0",
            "dlmserve_slo_met_total 1.0",
            'dlmserve_kv_pages{instance="i0.1"} 64.0',
            'dlmserve_kv_pages_in_use{instance="i0.1"} 0.0',
            'dlmserve_instance_requests{instance="i0.1",tp_degree="1"} 0.0',
            'dlmserve_step_seconds_count{kind="cache",tp_degree="1"} 8.0',
            "dlmserve_first_unmask_seconds_count 1.0",
        }

    serve(tmp_path, story)
