"""Rank processes with a real engine and real sockets: formed, served by, released, killed, formed again."""

import itertools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.errors import CheckpointError, DeviceLost, OutOfMemory, WorkerError
from dlmserve.messages import (
    PROTOCOL_VERSION,
    Admit,
    Cancel,
    Decoding,
    Dissolve,
    Dissolved,
    Form,
    Formed,
    FormFailed,
    ModelSpec,
    RankExited,
    RankHello,
    Release,
    RequestStep,
    SetThreshold,
    Shutdown,
    StepReport,
)
from dlmserve.worker import rank
from dlmserve.worker.rank import is_device_usable
from tests.wire_head import LIMIT_S, WireHead

INFO = read_model_info(resolve("tiny"))
MODEL = ModelSpec(INFO.path, "auto", "float32", INFO.mask_id, list(INFO.eos_ids))
PROMPT = [1, *range(100, 107)]
BLOCK = 8
ONE_PER_STEP, ALL_AT_ONCE = 2.0, 1e-9  # thresholds that no confidence reaches, and each one


class RankProcess:
    """One rank, forked from a process that has imported torch: that makes its start cheap."""

    generations = itertools.count(1)

    def __init__(self, head: WireHead) -> None:
        generation = next(RankProcess.generations)
        self.identity = f"n:0:{generation}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dlmserve.worker.build"])
        flags = ["--node=n", "--index=0", f"--generation={generation}", "--device=cpu"]
        flags += [f"--head={head.endpoint}", f"--run-dir={head.run_dir}"]
        self.process = context.Process(target=run_rank, args=(flags,), daemon=True)
        self.process.start()
        self.hello = head.next(RankHello, generation=generation)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def run_rank(flags: list[str]) -> None:
    rank.main([*flags, f"--parent={os.getppid()}"])


class Instance:
    """An instance of running ranks, known by their hellos, as a head sees it."""

    names = (f"i{number}" for number in itertools.count(1))

    def __init__(self, head: WireHead, hellos: list[RankHello]) -> None:
        self.head, self.name = head, next(Instance.names)
        self.size = len(hellos)
        self.identities = [f"{hello.node}:{hello.device}:{hello.generation}" for hello in hellos]
        self.plan_endpoints = [hello.plan_endpoint for hello in hellos]

    def ask_to_form(self, models: list[ModelSpec] | None = None) -> None:
        for tp_rank, identity in enumerate(self.identities):
            form = Form(
                instance=self.name,
                tp_rank=tp_rank,
                tp_degree=self.size,
                plan_endpoints=self.plan_endpoints,
                key=self.name,
                model=models[tp_rank] if models else MODEL,
                max_model_len=512,
                max_num_seqs=4,
                num_pages=0,
                page_size=32,
                collective_timeout_s=2 * LIMIT_S,
            )
            self.head.send(identity, form)

    def form(self) -> "Instance":
        self.ask_to_form()
        for tp_rank in range(self.size):
            formed = self.head.next(Formed, instance=self.name, tp_rank=tp_rank)
            assert formed.num_pages == 4 * 512 // 32
        return self

    def tell(self, *messages: Admit | SetThreshold | Release | Cancel | Dissolve) -> None:
        self.head.send(self.identities[0], *messages)

    def report(self) -> StepReport:
        return self.head.next(StepReport, instance=self.name)

    def reports_until(self, is_last: Callable[[StepReport], bool]) -> list[StepReport]:
        reports = [self.report()]
        while not is_last(reports[-1]):
            reports.append(self.report())
        return reports

    def dissolve(self) -> None:
        self.tell(Dissolve(self.name))
        for tp_rank in range(self.size):
            left = self.head.next(Dissolved, instance=self.name, tp_rank=tp_rank)
            assert left.error == ""


def admit(request: int, num_blocks: int, threshold: float = ONE_PER_STEP) -> Admit:
    canvas = PROMPT + [INFO.mask_id] * (num_blocks * BLOCK)
    decoding = Decoding(block_length=BLOCK, value=threshold, ignore_eos=True)
    return Admit(request, canvas, len(PROMPT), len(canvas), len(canvas), decoding)


def steps_of(request: int, reports: list[StepReport]) -> list[RequestStep]:
    return [step for report in reports for step in report.requests if step.request == request]


def unmasked(steps: list[RequestStep]) -> dict[int, int]:
    """Token by position; no position twice."""
    pairs = [pair for step in steps for pair in zip(step.positions, step.tokens, strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def finishes(*requests: int) -> Callable[[StepReport], bool]:
    left = set(requests)

    def is_last(report: StepReport) -> bool:
        left.difference_update(step.request for step in report.requests if step.finished)
        return not left

    return is_last


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WireHead]:
    wire_head = WireHead(str(tmp_path_factory.mktemp("run")))
    yield wire_head
    wire_head.close()


@pytest.fixture(scope="module")
def crew(head: WireHead) -> Iterator[list[RankProcess]]:
    """Two ranks, shared by the tests; a test that kills one puts another in its place."""
    members = [RankProcess(head), RankProcess(head)]
    yield members
    for member in members:
        member.kill()


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def instance(request: pytest.FixtureRequest, head: WireHead, crew: list[RankProcess]) -> Iterator[Instance]:
    formed = Instance(head, [member.hello for member in crew[: request.param]]).form()
    yield formed
    formed.dissolve()


@pytest.fixture
def pair(head: WireHead, crew: list[RankProcess]) -> Instance:
    return Instance(head, [member.hello for member in crew]).form()


def test_requests_run_to_their_end_without_another_word_from_the_head(instance):
    instance.tell(admit(1, num_blocks=3), admit(2, num_blocks=1))
    reports = instance.reports_until(finishes(1, 2))
    assert [report.seq for report in reports] == list(range(1, 3 * BLOCK + 1))
    assert len(steps_of(2, reports)) == BLOCK
    for request, num_blocks in ((1, 3), (2, 1)):
        steps = steps_of(request, reports)
        assert sorted(unmasked(steps)) == list(range(len(PROMPT), len(PROMPT) + num_blocks * BLOCK))
        assert [step.recompute for step in steps] == ([True] + [False] * (BLOCK - 1)) * num_blocks
        assert steps[-1].finished == "length"
    assert reports[0].num_pages_in_use > reports[-1].num_pages_in_use == 0


def test_both_tp_degrees_say_the_same(head, crew):
    said = []
    for size in (1, 2):
        instance = Instance(head, [member.hello for member in crew[:size]]).form()
        instance.tell(admit(1, num_blocks=2))
        said.append(unmasked(steps_of(1, instance.reports_until(finishes(1)))))
        instance.dissolve()
    assert said[0] == said[1]


def test_idle_time_counts_only_while_there_is_work(instance):
    instance.tell(admit(1, num_blocks=1))
    first = instance.reports_until(finishes(1))
    instance.tell(admit(2, num_blocks=1))  # whatever passed until now is not the instance's fault
    second = instance.reports_until(finishes(2))
    for reports in (first, second):
        assert reports[0].idle_s == 0.0
        assert all(report.idle_s > 0.0 for report in reports[1:])
        assert all(report.duration_s > 0.0 for report in reports)


def test_a_new_threshold_counts_from_one_of_the_next_steps_on(instance):
    instance.tell(admit(1, num_blocks=20))
    first = instance.report()
    instance.tell(SetThreshold(1, ALL_AT_ONCE))
    steps = steps_of(1, [first, *instance.reports_until(finishes(1))])
    thresholds = [step.threshold for step in steps]
    change = thresholds.index(ALL_AT_ONCE)
    assert set(thresholds[:change]) == {ONE_PER_STEP}
    assert set(thresholds[change:]) == {ALL_AT_ONCE}
    assert {len(step.positions) for step in steps[:change]} == {1}
    assert {len(step.positions) for step in steps[change + 1 :]} == {BLOCK}


def test_a_released_request_leaves_between_two_blocks(instance):
    instance.tell(admit(1, num_blocks=20))
    first = instance.report()
    instance.tell(Release(1))
    reports = [first, *instance.reports_until(lambda report: report.released == [1])]
    last_step = reports[-1]
    assert steps_of(1, [last_step]) == []
    assert last_step.num_pages_in_use == 0
    num_blocks, rest = divmod(len(unmasked(steps_of(1, reports))), BLOCK)
    assert (rest, 1 <= num_blocks < 20) == (0, True)


def test_a_cancelled_request_is_dropped_and_the_others_go_on(instance):
    instance.tell(admit(1, num_blocks=20), admit(2, num_blocks=20))
    instance.report()
    instance.tell(Cancel(1), SetThreshold(2, ALL_AT_ONCE))
    reports = instance.reports_until(finishes(2))
    cancelled = [bool(steps_of(1, [report])) for report in reports]
    assert cancelled == sorted(cancelled, reverse=True)  # never again once it is gone
    assert not cancelled[-1]
    assert reports[-1].num_pages_in_use == 0


def test_an_admission_that_cannot_be_is_reported_and_harms_nobody(instance):
    full = replace(admit(1, num_blocks=1), canvas=PROMPT * 2)
    instance.tell(full, admit(2, num_blocks=1, threshold=ALL_AT_ONCE))
    reports = instance.reports_until(finishes(2))
    [failure] = [failure for report in reports for failure in report.failed]
    assert (failure.request, failure.kind) == (1, "refused")
    assert "no masked position" in failure.message


def test_messages_for_an_instance_that_is_gone_are_ignored(head, crew):
    ranks = [crew[0].hello]
    head.send(crew[0].identity, admit(1, num_blocks=1), Release(1), Dissolve("long-gone"))
    instance = Instance(head, ranks).form()
    instance.tell(Dissolve("long-gone"), admit(2, num_blocks=1))
    reports = instance.reports_until(finishes(2))
    assert steps_of(1, reports) == []
    instance.dissolve()


def test_an_instance_that_cannot_be_built_says_why_on_each_rank_and_another_can_be_formed(head, crew):
    instance = Instance(head, [member.hello for member in crew])
    instance.ask_to_form(models=[MODEL, replace(MODEL, path="/no/such/folder")])
    failed = [head.next(FormFailed, instance=instance.name, tp_rank=tp_rank) for tp_rank in range(2)]
    assert "/no/such/folder" in failed[1].error
    assert "a peer died" in failed[0].error
    Instance(head, [member.hello for member in crew]).form().dissolve()


def test_a_killed_follower_breaks_the_instance_at_once_and_its_leader_serves_again(head, crew, pair):
    pair.tell(admit(1, num_blocks=60))
    pair.report()
    crew[1].kill()
    left = head.next(Dissolved, instance=pair.name, tp_rank=0)
    assert "a peer died" in left.error

    crew[1] = RankProcess(head)
    again = Instance(head, [member.hello for member in crew]).form()
    again.tell(admit(1, num_blocks=1))
    again.reports_until(finishes(1))
    again.dissolve()


@pytest.mark.parametrize("killed", [0, 1], ids=["leader", "follower"])
def test_a_rank_killed_while_there_is_no_work_leaves_a_survivor_that_can_be_dissolved(
    head, crew, pair, killed
):
    crew[killed].kill()
    survivor = 1 - killed
    head.send(pair.identities[survivor], Dissolve(pair.name))
    assert head.next(Dissolved, instance=pair.name) == Dissolved(pair.name, survivor)
    crew[killed] = RankProcess(head)
    Instance(head, [member.hello for member in crew]).form().dissolve()


@pytest.mark.parametrize("size", [0, 1, 2], ids=["free", "tp1", "tp2"])
def test_shutdown_ends_a_rank_in_any_state(head, crew, size):
    if size:
        Instance(head, [member.hello for member in crew[:size]]).form()
    for i in reversed(range(max(1, size))):
        head.send(crew[i].identity, Shutdown())
        crew[i].process.join(LIMIT_S)
        assert crew[i].process.exitcode == 0
        crew[i] = RankProcess(head)


def test_an_agents_ranks_serve_and_a_killed_one_is_replaced(head):
    command = [sys.executable, "-m", "dlmserve.worker.agent", f"--head={head.endpoint}", "--node=real"]
    command += ["--devices=2", "--device=cpu", f"--run-dir={head.run_dir}"]
    agent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        hellos = [head.next(RankHello, node="real", device=device) for device in range(2)]
        assert [hello.version for hello in hellos] == [PROTOCOL_VERSION] * 2
        head.wait_for_beat("real:1:1:hb")
        instance = Instance(head, hellos).form()
        instance.tell(admit(1, num_blocks=60))
        instance.report()
        os.kill(hellos[1].pid, 9)
        assert head.next(RankExited, node="real") == RankExited("real", 1, 1, "killed by SIGKILL")
        assert head.next(Dissolved, instance=instance.name).error
        hellos[1] = head.next(RankHello, node="real", device=1, generation=2)
        Instance(head, hellos).form().dissolve()
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize(
    ("device", "error", "usable"),
    [
        ("cpu", WorkerError("a peer died"), True),
        ("cpu", RuntimeError("anything"), True),
        ("cuda:0", CheckpointError("no such folder"), True),
        ("cuda:0", OutOfMemory("too large"), True),
        ("cuda:0", WorkerError("a peer died"), False),
        ("cuda:0", DeviceLost("an illegal memory access"), False),
        ("cuda:0", RuntimeError("anything"), False),
    ],
)
def test_a_gpu_is_not_used_again_after_an_error_that_may_have_broken_it(device, error, usable):
    assert is_device_usable(device, error) is usable
