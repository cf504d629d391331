"""Block-causal models on the engine: every back end, captured steps and ranks, and under a scheduler."""

from collections.abc import Callable

import pytest
import torch

from dlmserve.control.policy.events import (
    Arrived,
    Cancelled,
    Deliver,
    Event,
    Finish,
    LayoutWanted,
    RankLost,
    Send,
    StepDone,
)
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.policy.request import RequestSpec, Summary
from dlmserve.control.policy.scheduler import Scheduler
from dlmserve.messages import Admit, Cancel, Decoding, Form, ModelSpec
from dlmserve.worker import attention
from dlmserve.worker.attention.varlen import Kernel, plain_kernel
from dlmserve.worker.build import build_engine, build_on
from dlmserve.worker.engine import Engine
from dlmserve.worker.parallel import SOLO
from tests.fake_gpu import FakeGpu
from tests.story import PAGE, Story, make_report, rank
from tests.test_engine import run, tokens_of

MASK, EOS = 318, 301
PROMPTS = [[5, 9, 200, 31], [77] * 19, [3, 250, 8, 8, 90, 41, 17, 260, 111]]


@pytest.fixture
def make_form(golden_folder: Callable[[str], str]) -> Callable[..., Form]:
    def make(**more: object) -> Form:
        model = ModelSpec(golden_folder("sdar/model_A"), "auto", "float32", MASK, [EOS])
        limits = {"max_model_len": 256, "max_num_seqs": 4, "num_pages": 64, "page_size": 8} | more
        return Form("i", 0, 1, [], "", model, collective_timeout_s=10.0, **limits)  # type: ignore[arg-type]

    return make


def admit(request: int, prompt: list[int], num_tokens: int = 16, **options: object) -> Admit:
    decoding = Decoding(
        **{"block_length": 4, "value": 0.6, "ignore_eos": True, "block_causal": True} | options
    )  # type: ignore[arg-type]
    start = len(prompt)
    end = start + decoding.grid.num_masks(start, num_tokens)
    return Admit(request, prompt + [MASK] * (end - start), start, end, start + num_tokens, decoding)


COMMANDS = [
    admit(0, PROMPTS[0]),
    admit(1, PROMPTS[1], num_tokens=30, block_length=8),
    admit(2, PROMPTS[2], cache="none"),
    admit(3, PROMPTS[2], temperature=0.8, seed=7),
    admit(4, PROMPTS[0], max_block_steps=2, value=0.9),
]


def decode(engine: Engine) -> list[dict[int, int]]:
    """After other requests have left holes in the pages."""
    for request in (10, 11, 12):
        engine.apply(admit(request, PROMPTS[request - 10]))
    engine.step()
    for request in (10, 12):
        engine.apply(Cancel(request))
    for command in COMMANDS:
        engine.apply(command)
    results = run(engine)
    return [tokens_of(results, command.request) for command in COMMANDS]


@pytest.mark.parametrize("reads_pages", [False, True])
def test_every_back_end_limits_a_block_to_the_keys_before_its_end(
    reads_pages: bool, make_form: Callable[..., Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decode(build_engine(make_form(), "cpu", SOLO))
    monkeypatch.setattr(attention, "plain_kernel", lambda: plain_kernel(reads_pages=reads_pages))
    device = FakeGpu()
    engine = build_on(device, make_form(attention="varlen"), SOLO, with_graphs=True)
    assert decode(engine) == wanted
    assert "replay" in device.book and engine._runner.num_replays < engine._num_steps, (
        "prompts run as they are"
    )


def test_graphs_replay_recompute_steps_as_well_but_no_prompts(make_form: Callable[..., Form]) -> None:
    device = FakeGpu()
    engine = build_on(device, make_form(attention="varlen"), SOLO, with_graphs=True)
    engine.apply(admit(0, PROMPTS[1]))
    kinds = []
    while engine.has_work():
        device.book.clear()
        [step] = engine.step().requests
        kinds.append((step.recompute, "replay" in device.book))
    assert kinds[0] == (True, False)
    assert set(kinds[1:]) == {(True, True), (False, True)}


def test_a_request_is_not_decoded_as_another_kind_of_model_would(make_form: Callable[..., Form]) -> None:
    engine = build_engine(make_form(), "cpu", SOLO)
    engine.apply(admit(0, PROMPTS[0], block_causal=False))
    [failure] = engine.step().failed
    assert failure.kind == "refused" and "block_causal False; the model's is True" in failure.message


def test_back_ends_that_would_copy_the_keys_of_each_block_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def copying(page_size: int) -> Kernel:
        return plain_kernel(reads_runs=False, reads_pages=False)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for kernel in ("flash_kernel", "torch_kernel"):
        monkeypatch.setattr(attention, kernel, copying)
    chosen = attention.choose("auto", "cuda:0", torch.bfloat16, 64, 32, block_causal=True)
    assert chosen.details.startswith("sdpa") and "would copy the keys of each block" in chosen.details
    assert not attention.choose("auto", "cuda:0", torch.bfloat16, 64, 32).details.startswith("sdpa")


class Cluster(Story):
    """The scheduler over two real engines, which make steps in turn; what it delivers, by request."""

    def __init__(self, form: Form) -> None:
        super().__init__(tp_layout=(1, 1))
        policy = make_policy(self.config)
        self.scheduler = Scheduler(self.config, policy, MASK, form.max_model_len, None, False)
        self.serve(form.num_pages)
        self.engines = {name: build_engine(form, "cpu", SOLO) for name in self.scheduler.cluster.instances}
        self.tokens: dict[int, dict[int, int]] = {}
        self.summaries: dict[int, Summary] = {}
        self.seq = 0

    def happens(self, event: Event) -> None:
        for action in self.at(1.0 + 0.01 * self.seq, event):
            match action:
                case Send(instance, command):
                    self.engines[instance].apply(command)
                case Deliver(request, update):
                    mine = self.tokens.setdefault(request, {})
                    assert mine.keys().isdisjoint(update.did.positions), "a token is delivered twice"
                    mine.update(zip(update.did.positions, update.did.tokens, strict=True))
                case Finish(request, _, summary):
                    self.summaries[request] = summary

    def step(self) -> None:
        for name in list(self.scheduler.cluster.instances):
            if (engine := self.engines[name]).has_work():
                result = engine.step()
                engine.check()
                self.seq += 1
                report = make_report(
                    name, self.seq, *result.requests, released=result.released, failed=result.failed
                )
                self.happens(StepDone(report))


@pytest.mark.parametrize(
    "change",
    [RankLost(rank(0), "killed", exited=True), LayoutWanted((1,))],
    ids=["an instance dies", "one is drained"],
)
def test_requests_go_on_elsewhere_as_if_they_had_stayed(
    change: Event, make_form: Callable[..., Form]
) -> None:
    form = make_form(page_size=PAGE)
    cluster, alone = Cluster(form), build_engine(form, "cpu", SOLO)
    commands = [admit(i, PROMPTS[i % 3], num_tokens=21, rule="steps", value=2.0) for i in range(4)]
    for command in commands:
        alone.apply(command)
        place = (command.canvas, command.output_start, command.output_end, command.limit, command.decoding)
        cluster.happens(Arrived(command.request, RequestSpec("r", *place, pinned=True)))
    for _ in range(3):
        cluster.step()
    cluster.happens(Cancelled(3, "abandoned"))  # inside a block
    cluster.happens(change)
    while cluster.scheduler.requests:
        assert cluster.seq < 200
        cluster.step()
    wanted = run(alone)
    assert [cluster.tokens[i] for i in range(3)] == [tokens_of(wanted, i) for i in range(3)]
    assert 0 < len(cluster.tokens[3]) < len(tokens_of(wanted, 3))
    assert any(len(summary.instances) == 2 for summary in cluster.summaries.values())
