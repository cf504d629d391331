"""The node agent with real processes and sockets: ranks start, die, come back, and never outlive it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from dlmserve.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    Cancel,
    RankExited,
    RankHello,
    RestartRank,
    Shutdown,
)
from dlmserve.worker import agent
from dlmserve.worker.agent import backoff_s, rank_environment
from tests.wire_head import LIMIT_S, WireHead

ROOT = Path(__file__).parent.parent
LIGHT_RANK = [sys.executable, "-m", "tests.light_rank"]
LIGHT_SPARE = [
    sys.executable,
    "-c",
    "import json, runpy, sys; print('here is a spare one', flush=True); "
    "sys.argv[1:] = json.loads(sys.stdin.readline()); runpy.run_module('tests.light_rank', run_name='__main__')",
]
RUN_AGENT = [sys.executable, "-c", f"from dlmserve.worker.agent import main; main({LIGHT_RANK!r}, None)"]
RUN_AND_WAIT = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
StartAgent = Callable[..., subprocess.Popen]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireHead]:
    wire_head = WireHead(str(tmp_path_factory.mktemp("run")))
    yield wire_head
    wire_head.close()


@pytest.fixture
def start_agent(head: WireHead) -> Iterator[StartAgent]:
    started: list[subprocess.Popen] = []

    def start(node: str, devices: int, command: list[str] = RUN_AGENT) -> subprocess.Popen:
        flags = [f"--head={head.endpoint}", f"--node={node}", f"--devices={devices}", "--device=cpu"]
        process = subprocess.Popen(
            [*command, *flags, f"--run-dir={head.run_dir}"], cwd=ROOT, stderr=subprocess.PIPE
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def hellos(head: WireHead, node: str, devices: int) -> list[RankHello]:
    return [head.next(RankHello, node=node, device=device) for device in range(devices)]


def wait_until_gone(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        poller = zmq.Poller()
        poller.register(pidfd, zmq.POLLIN)
        assert poller.poll(LIMIT_S * 1000), f"a process still runs after {LIMIT_S} s"
        os.close(pidfd)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_an_agent_starts_one_rank_per_device(head, start_agent):
    process = start_agent("up", devices=2)
    assert head.next(AgentHello, node="up") == AgentHello(PROTOCOL_VERSION, "up", 2, process.pid)
    for device, hello in enumerate(hellos(head, "up", 2)):
        assert (hello.device, hello.generation, hello.device_name) == (device, 1, "cpu")
    head.wait_for_beat("up:agent")


def test_a_killed_rank_is_reported_and_started_again(head, start_agent):
    start_agent("kill", devices=2)
    victim, other = hellos(head, "kill", 2)
    os.kill(victim.pid, signal.SIGKILL)
    assert head.next(RankExited, node="kill") == RankExited("kill", 0, 1, "killed by SIGKILL")
    successor = head.next(RankHello, node="kill")
    assert (successor.device, successor.generation) == (0, 2)
    assert is_running(other.pid)


def with_spare(spare: list[str]) -> list[str]:
    settings = "agent.SPARE_AFTER_S = 0.0"
    script = f"from dlmserve.worker import agent; {settings}; agent.main({LIGHT_RANK!r}, {spare!r})"
    return [sys.executable, "-c", script]


def test_a_spare_process_takes_a_lost_ranks_place_and_is_replaced_in_turn(head, start_agent):
    process = start_agent("spare", 1, command=with_spare(LIGHT_SPARE))
    assert process.stderr
    for generation in (1, 2, 3):
        hello = head.next(RankHello, node="spare")
        assert (hello.device, hello.generation) == (0, generation)
        assert (b"a spare one" in Path(f"/proc/{hello.pid}/cmdline").read_bytes()) == (generation > 1)
        while process.stderr.readline() != b"[spare:spare] here is a spare one\n":
            pass
        os.kill(hello.pid, signal.SIGKILL)


def test_a_spare_process_becomes_a_real_rank(head, start_agent):
    start_agent("real", 1, command=with_spare(agent.SPARE_COMMAND))
    (first,) = hellos(head, "real", 1)
    head.wait_for_beat("real:agent")  # the spare one is started by now
    os.kill(first.pid, signal.SIGKILL)
    second = head.next(RankHello, node="real")
    assert (second.device, second.generation) == (0, 2)
    assert b"dlmserve.worker.spare" in Path(f"/proc/{second.pid}/cmdline").read_bytes()
    head.wait_for_beat("real:0:2:hb")
    head.send("real:0:2", Shutdown())
    assert head.next(RankExited, node="real", generation=2).reason == "exit status 0"


def test_a_rank_that_fails_is_reported_with_its_last_words(head, start_agent):
    start_agent("fail", devices=1)
    hellos(head, "fail", 1)
    head.send("fail:0:1", Cancel(7))
    reason = head.next(RankExited, node="fail").reason
    assert reason == "exit status 7: told to end with status 7"


def test_a_rank_that_was_told_to_go_is_not_replaced(head, start_agent):
    start_agent("go", devices=2)
    _, other = hellos(head, "go", 2)
    head.send("go:0:1", Cancel(0))
    assert head.next(RankExited, node="go").reason == "exit status 0"
    os.kill(other.pid, signal.SIGKILL)
    assert head.next(RankHello, node="go").device == 1  # and none of device 0 before it


def test_the_head_can_have_a_rank_restarted_but_only_the_one_it_means(head, start_agent):
    start_agent("stuck", devices=2)
    hellos(head, "stuck", 2)
    head.send("stuck:agent", RestartRank("stuck", 0, generation=9), RestartRank("stuck", 1, generation=1))
    assert head.next(RankExited, node="stuck") == RankExited("stuck", 1, 1, "killed by SIGKILL")
    assert head.next(RankHello, node="stuck").device == 1


def test_what_ranks_print_goes_to_the_agents_stderr_line_by_line(head, start_agent):
    process = start_agent("print", devices=1)
    assert process.stderr
    assert process.stderr.readline() == b"[print:0] a line on stdout\n"
    assert process.stderr.readline().startswith(b"[print:0] OMP_NUM_THREADS is ")


def test_shutdown_ends_the_agent_and_its_ranks(head, start_agent):
    process = start_agent("down", devices=2)
    ranks = [os.pidfd_open(hello.pid) for hello in hellos(head, "down", 2)]
    head.send("down:agent", Shutdown())
    assert process.wait(LIMIT_S) == 0
    wait_until_gone(ranks)


def test_nothing_outlives_a_killed_head(head, start_agent):
    parent = start_agent("orphan", 2, command=RUN_AND_WAIT + RUN_AGENT)
    pids = [head.next(AgentHello, node="orphan").pid, *(hello.pid for hello in hellos(head, "orphan", 2))]
    assert parent.pid not in pids
    processes = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    wait_until_gone(processes)


def test_the_signals_of_a_terminal_and_of_a_service_manager_are_left_to_the_head(head, start_agent):
    process = start_agent("signal", devices=1)
    (rank,) = hellos(head, "signal", 1)
    for signum in (signal.SIGINT, signal.SIGTERM):
        os.kill(process.pid, signum)
    head.wait_for_beat("signal:agent")
    head.wait_for_beat("signal:agent")
    assert process.poll() is None
    assert is_running(rank.pid)


def test_an_agent_whose_head_falls_silent_gives_up_and_leaves_nothing(head, start_agent):
    settings = "agent.HEAD_SILENCE_S, agent.HEARTBEAT_S = 1.0, 0.1"
    script = f"from dlmserve.worker import agent; {settings}; agent.main({LIGHT_RANK!r}, None)"
    process = start_agent("lonely", 1, command=[sys.executable, "-c", script])
    (rank,) = hellos(head, "lonely", 1)  # heartbeats are answered while this waits, and no longer
    pidfd = os.pidfd_open(rank.pid)
    assert process.wait(LIMIT_S) == 1
    assert b"no word from the head" in process.stderr.read()
    wait_until_gone([pidfd])


def test_a_rank_without_its_parent_does_not_start():
    flags = ["--head=ipc:///nowhere", "--node=n", "--index=0", "--generation=1", "--parent=1"]
    ended = subprocess.run([*LIGHT_RANK, *flags], cwd=ROOT, stderr=subprocess.PIPE, timeout=LIMIT_S)
    assert ended.returncode == 1
    assert b"is an orphan" in ended.stderr


def test_only_a_rank_that_keeps_dying_young_has_to_wait():
    assert [backoff_s(num_deaths) for num_deaths in (0, 1, 2, 3, 4)] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert backoff_s(100) == agent.MAX_BACKOFF_S


@pytest.mark.parametrize(("cores", "num_ranks", "wanted"), [(8, 2, "4"), (2, 4, "1")])
def test_ranks_share_the_cores(monkeypatch, cores, num_ranks, wanted):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    environment = rank_environment(num_ranks)
    assert environment["OMP_NUM_THREADS"] == wanted
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_threads_that_the_user_chose_stay(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert rank_environment(8)["OMP_NUM_THREADS"] == "3"
