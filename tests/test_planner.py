"""The planner's process: asked, answered, killed, replaced."""

import asyncio
import io
import os
import signal
import struct
import sys

import msgspec
import pytest

from dlmserve.control.planner import COMMAND, PlannerProcess
from dlmserve.control.planning.process import serve
from dlmserve.control.policy.events import Planned
from dlmserve.control.policy.plan import Plan
from tests.planning_data import make_problem

# A planner that needs no solver: answers each problem with its number of nodes, dies on one with three.
FAKE = """
import struct, sys, msgspec
from dlmserve.control.policy.plan import Plan, Problem
while head := sys.stdin.buffer.read(4):
    problem = msgspec.msgpack.decode(sys.stdin.buffer.read(*struct.unpack("<I", head)), type=Problem)
    if len(problem.nodes) == 3:
        sys.exit(1)
    data = msgspec.msgpack.encode(Plan("optimal", {}, {1: len(problem.nodes)}))
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()
"""


def frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def test_one_answer_for_each_problem_whatever_it_is() -> None:
    problems = frame(msgspec.msgpack.encode(make_problem(1.0))) + frame(b"nonsense")
    answers = io.BytesIO()
    serve(io.BytesIO(problems + frame(msgspec.msgpack.encode(make_problem(500.0)))), answers)
    answers.seek(0)
    frames = []
    while head := answers.read(4):
        frames.append(answers.read(*struct.unpack("<I", head)))
    first, nothing, last = frames
    plan = msgspec.msgpack.decode(first, type=Plan)
    assert plan.layout == {4: 2} and plan.solve_s > 0
    assert nothing == b""
    assert msgspec.msgpack.decode(last, type=Plan).status == "infeasible"


def run_with_planner(
    story, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...] = (sys.executable, "-c", FAKE)
) -> None:
    monkeypatch.setattr("dlmserve.control.planner.RETRY_S", 0.01)

    async def run() -> None:
        answers: asyncio.Queue[Planned] = asyncio.Queue()
        planner = PlannerProcess(answers.put_nowait, command)
        planner.start()
        try:
            await asyncio.wait_for(story(planner, answers), 60)
        finally:
            await planner.stop()
        assert planner.pid is None

    asyncio.run(run())


async def new_pid(planner: PlannerProcess, old: int | None) -> int:
    while planner.pid is None or planner.pid == old:
        await asyncio.sleep(0.01)
    return planner.pid


def test_it_is_started_again_when_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(planner: PlannerProcess, answers: asyncio.Queue[Planned]) -> None:
        planner.ask(make_problem(1.0))
        assert (await answers.get()).plan.layout == {1: 2}
        first = await new_pid(planner, None)
        os.kill(first, signal.SIGKILL)
        second = await new_pid(planner, first)
        planner.ask(make_problem(1.0, nodes=[1]))
        assert (await answers.get()).plan.layout == {1: 1}
        planner.ask(make_problem(1.0, nodes=[1, 1, 1]))  # it dies of that: no answer
        await new_pid(planner, second)
        planner.ask(make_problem(1.0))
        assert (await answers.get()).plan.layout == {1: 2}
        assert answers.empty()

    run_with_planner(story, monkeypatch)


def test_only_the_newest_problem_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(planner: PlannerProcess, answers: asyncio.Queue[Planned]) -> None:
        for num_nodes in (1, 2, 4):
            planner.ask(make_problem(1.0, nodes=[1] * num_nodes))
        assert (await answers.get()).plan.layout == {1: 4}
        assert answers.empty()

    run_with_planner(story, monkeypatch)


def test_the_real_process_answers_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []

    async def story(planner: PlannerProcess, answers: asyncio.Queue[Planned]) -> None:
        planner.ask(make_problem(1.0))
        pids.append(await new_pid(planner, None))
        assert (await answers.get()).plan.layout == {4: 2}

    run_with_planner(story, monkeypatch, COMMAND)
    assert not os.path.exists(f"/proc/{pids[0]}")
