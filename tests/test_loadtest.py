"""`dlmserve bench` against a small HTTP server that answers as dlmserve does, and against none."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from dlmserve.bench import describe, made_up, read_trace, table
from dlmserve.cli import main
from dlmserve.errors import ConfigError
from dlmserve.loadtest import Run, Shot, fire, poisson_times
from dlmserve.simulate import make_config, simulate
from dlmserve.simulation.scenarios import get_scenario

DLM = {"mean_threshold": 0.8, "latency_ms": 1.0}
METRICS = (
    "dlmserve_step_idle_seconds_sum{} {}\ndlmserve_step_idle_seconds_count {}\ndlmserve_migrations_total {}\n"
)


class FakeServer:
    """Refuses the prompt "no"; counts a step, its idle time and a move for each request."""

    def __init__(self, ready: bool = True) -> None:
        self.ready, self.bodies = ready, list[dict]()

    def metrics(self) -> str:
        count = len(self.bodies)
        return METRICS.format("", 0.002 * count, count, count)

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if body["messages"][0]["content"] == "no":
            return web.json_response({"error": {"message": "the queue is full"}}, status=429)
        choice = {"message": {"content": body["messages"][0]["content"].upper()}}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 10}, "dlm": DLM})

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        async def describe(_: web.Request) -> web.Response:
            return web.json_response(cluster)

        async def health(_: web.Request) -> web.Response:
            return web.json_response({})

        app = web.Application()
        cluster = {"instances": [], "policy": "infaas", "layout": [1], "ready": self.ready}
        app.router.add_get("/v1/cluster", describe)
        app.router.add_get("/health", health)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=self.metrics())

        app.router.add_get("/metrics", metrics)
        app.router.add_post("/v1/chat/completions", self.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def shoot(server: FakeServer, shots: list[Shot]) -> Run:
    async def story() -> Run:
        async with server.serve() as url:
            return await fire(url, shots)

    return asyncio.run(story())


def test_every_answer_is_found_at_its_request() -> None:
    server = FakeServer()
    run = shoot(server, [Shot(0.0, "a", 60.0), Shot(0.0, "no", 60.0), Shot(0.0, "c", 60.0, max_tokens=5)])
    assert [answer.text for answer in run.answers] == ["A", "", "C"]
    assert run.errors == {"429: the queue is full": 1}
    assert run.idle_s == pytest.approx(0.002)
    assert {
        "messages": [{"role": "user", "content": "c"}],
        "max_tokens": 5,
        "slo_ms": 60000.0,
    } in server.bodies


def test_the_report_has_the_simulators_schema() -> None:
    run = shoot(FakeServer(), [Shot(0.0, "a", 60.0), Shot(0.0, "no", 60.0), Shot(0.0, "c", 1e-9)])
    result = describe(run, seed=3, rps=2.0, right=[1.0, 0.0, 0.5])
    scenario = get_scenario("gsm8k-4gpu")
    config = make_config(scenario, "infaas")
    simulated = simulate(config, replace(scenario, num_requests=2), 0, "average")
    assert result.keys() == simulated.keys()
    assert result["latency_s"].keys() == simulated["latency_s"].keys()
    assert (result["requests"], result["dropped"], result["migrations"]) == (3, 1, 3)
    assert result["attainment"] == pytest.approx(1 / 3)
    assert result["accuracy"] == pytest.approx(0.75)
    assert result["mean_threshold"] == pytest.approx(0.8)
    assert result["options"]["errors"] == {"429: the queue is full": 1}
    assert table([result]).row_count == 1
    json.dumps(result)


def test_without_an_slo_there_is_no_attainment() -> None:
    result = describe(shoot(FakeServer(), [Shot(0.0, "a")]), 0, 1.0)
    assert result["attainment"] is None and result["accuracy"] is None


def test_a_latency_counts_from_when_the_request_was_due() -> None:
    run = shoot(FakeServer(), [Shot(-5.0, "a")])
    assert run.answers[0].latency_s > 5.0


def test_arrivals_are_poisson_and_repeatable() -> None:
    times = poisson_times(2000, 4.0, seed=1)
    assert times == poisson_times(2000, 4.0, seed=1) != poisson_times(2000, 4.0, seed=2)
    assert times == sorted(times) and times[-1] == pytest.approx(500, rel=0.1)
    assert made_up(3, 0) == made_up(3, 0) != made_up(3, 1)


def test_a_server_that_is_not_ready_is_left_alone() -> None:
    with pytest.raises(ConfigError, match="not ready"):
        shoot(FakeServer(ready=False), [Shot(0.0, "a")])


def test_nothing_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert "no dlmserve answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(
        '{"at_s": 2, "prompt": "b"}\n{"at_s": 1, "prompt": "a", "slo_ms": 500, "max_tokens": 7}\n'
    )
    assert read_trace(str(path)) == [Shot(1.0, "a", 0.5, 7), Shot(2.0, "b")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("--trace", '{"at_s": 1, "prompt": "a"}\n{"at_s": 1}\n', "line 2"),
        ("--trace", "[]\n", "line 1"),
        ("--trace", "", "is empty"),
        ("--prompts", "\n", "is empty"),
    ],
)
def test_bad_files_are_named(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    assert main(["bench", name, str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--rps", "0"], ["--requests", "0"], ["--url", "ftp://x"]])
def test_bad_flags_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *given]) == 2
    assert given[0] in capsys.readouterr().err
