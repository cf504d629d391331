"""The GPU's path of a step on a device that only pretends: buckets, padding, copies, waits; the same result."""

from collections.abc import Callable
from multiprocessing import Pipe

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlmserve.errors import DeviceLost, OutOfMemory
from dlmserve.kernels import chunked
from dlmserve.messages import Admit, Cancel, Decoding, Form, ModelSpec
from dlmserve.worker import attention, local, memory
from dlmserve.worker.attention.varlen import plain_kernel
from dlmserve.worker.batch import Span
from dlmserve.worker.build import build_engine, build_on
from dlmserve.worker.device import Device, Staging
from dlmserve.worker.engine import Engine, StepResult
from dlmserve.worker.graphs import MAX_TOKENS, bucket_of, usual_buckets
from dlmserve.worker.kv_cache import PageAllocator, Slots
from dlmserve.worker.parallel import SOLO
from tests.fake_gpu import FakeGpu

MASK, EOS = 318, 301
PROMPTS = [[5, 9, 200, 31], [77] * 19, [3, 250, 8, 8, 90, 41, 17, 260, 111]]


@pytest.fixture
def make_form(golden_folder: Callable[[str], str]) -> Callable[..., Form]:
    def make(page_size: int = 8, num_pages: int = 64, family: str = "llada", **more: object) -> Form:
        spec = ModelSpec(golden_folder(f"{family}/model_A"), "auto", "float32", MASK, [EOS])
        options = {"attention": "varlen", **more}
        return Form("i", 0, 1, [], "", spec, 512, 8, num_pages, page_size, 10.0, **options)  # type: ignore[arg-type]

    return make


def admit(request: int, prompt: list[int], masks: int = 16, **decoding: object) -> Admit:
    options = {"block_length": 8, "ignore_eos": True, "value": 0.6, **decoding}
    start, end = len(prompt), len(prompt) + masks
    return Admit(request, [*prompt, *[MASK] * masks], start, end, end, Decoding(**options))  # type: ignore[arg-type]


def run(engine: Engine) -> list[StepResult]:
    results = []
    while engine.has_work():
        results.append(engine.step())
        engine.check()
        assert len(results) < 200
    return results


def unmasked(results: list[StepResult]) -> dict[int, list[tuple]]:
    """By request: per step its kind, positions and tokens, and the confidences, rounded."""
    found: dict[int, list[tuple]] = {}
    for result in results:
        for step in result.requests:
            confidences = [round(confidence, 3) for confidence in step.confidences]
            entry = (step.recompute, sorted(zip(step.positions, step.tokens, confidences, strict=True)))
            found.setdefault(step.request, []).append(entry)
    return found


def decode(engine: Engine, commands: list[Admit]) -> dict[int, list[tuple]]:
    for command in commands:
        engine.apply(command)
    return unmasked(run(engine))


MIXED = [
    admit(0, PROMPTS[0]),
    admit(1, PROMPTS[1], masks=32, block_length=16),
    admit(2, PROMPTS[2], cache="prefix"),
    admit(3, PROMPTS[2], cache="none"),
    admit(4, PROMPTS[0], temperature=0.8, seed=7),
    admit(5, PROMPTS[1], temperature=1.0, top_p=0.9, seed=8),
    admit(6, PROMPTS[0], num_top=3),
]


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_gpus_step_unmasks_what_a_cpus_does(
    graphs: bool, family: str, make_form: Callable[..., Form]
) -> None:
    wanted = decode(build_engine(make_form(family=family, attention="sdpa"), "cpu", SOLO), MIXED)
    device = FakeGpu()
    engine = build_on(device, make_form(family=family), SOLO, with_graphs=graphs)
    assert decode(engine, MIXED) == wanted
    assert ("replay" in device.book) is graphs


@pytest.mark.parametrize("num_rows", [1, 12, 100])
def test_drawing_in_chunks_of_rows_changes_nothing(
    num_rows: int, make_form: Callable[..., Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decode(build_engine(make_form(), "cpu", SOLO), MIXED)
    monkeypatch.setattr(chunked, "LOGITS_BYTES", 4 * num_rows * 320)
    engine = build_engine(make_form(), "cpu", SOLO)
    assert engine._sampler._rows_at_once == num_rows, "the vocabulary has 320 tokens"
    assert decode(engine, MIXED) == wanted


def test_each_step_is_one_copy_there_one_back_and_one_wait(make_form: Callable[..., Form]) -> None:
    device = FakeGpu()
    engine = build_on(device, make_form(), SOLO, with_graphs=True)
    decode(engine, MIXED)  # captures what is rare
    for command in MIXED:
        engine.apply(command)
    while engine.has_work():
        device.book.clear()
        engine.launch()
        assert device.book in (["upload", "download"], ["upload", "replay", "download"])
        device.book.clear()
        engine.finish()
        assert device.book == ["wait"]


def test_a_canvas_is_not_written_over_another_that_is_on_its_way(make_form: Callable[..., Form]) -> None:
    engine = build_on(FakeGpu(), make_form(), SOLO, with_graphs=True)
    plain = build_engine(make_form(), "cpu", SOLO)
    for prompt in PROMPTS:
        assert torch.equal(engine.logits(prompt), plain.logits(prompt))
    assert decode(engine, MIXED[:1]) == decode(plain, MIXED[:1])


def test_a_child_rank_makes_its_device_the_current_one_first(
    make_form: Callable[..., Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"set {device}"))
    monkeypatch.setattr(local, "make_group", lambda *args: done.append(f"group on {args[3]}"))
    monkeypatch.setattr(local, "build_engine", lambda form, device, group: done.append(f"engine on {device}"))
    ours, theirs = Pipe()
    ours.close()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # leaves the number of threads alone
    local._follow(theirs, make_form(), "cuda:1")
    assert done == ["set cuda:1", "group on cuda:1", "engine on cuda:1"]


def test_steps_of_cache_spans_replay_and_others_do_not(make_form: Callable[..., Form]) -> None:
    device = FakeGpu()
    engine = build_on(device, make_form(), SOLO, with_graphs=True)
    num_captures = device.num_captures
    for request, prompt in enumerate(PROMPTS):
        engine.apply(admit(request, prompt, masks=32, block_length=32, value=0.9 - 0.2 * request))
    while engine.has_work():
        device.book.clear()
        kinds = {step.recompute for step in engine.step().requests}
        assert ("replay" in device.book) is (kinds == {False})
    assert device.num_captures == num_captures, "what usually comes is captured beforehand"


def test_members_that_leave_and_join_get_their_own_place_in_a_graph(make_form: Callable[..., Form]) -> None:
    """A graph keeps where its rows are while its members stay; here they change under it."""
    commands = [admit(i, PROMPTS[i % 3], masks=24, value=1.0) for i in range(4)]
    plain = build_engine(make_form(attention="sdpa"), "cpu", SOLO)
    engine = build_on(FakeGpu(), make_form(), SOLO, with_graphs=True)
    outcomes = []
    for each in (plain, engine):
        each.apply(commands[0])
        each.apply(commands[1])
        results = [each.step() for _ in range(5)]
        each.apply(Cancel(0))
        each.apply(commands[2])
        results += [each.step() for _ in range(5)]
        each.apply(commands[3])
        outcomes.append(unmasked(results + run(each)))
    assert outcomes[0] == outcomes[1]


def test_scattered_pages_are_read_through_tables_or_gathered(
    make_form: Callable[..., Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decode(build_engine(make_form(attention="sdpa"), "cpu", SOLO), MIXED[:2])
    monkeypatch.setattr(PageAllocator, "_first_run", lambda self, count: 0)
    for kinds in ({}, {"reads_pages": False}, {"reads_pages": False, "reads_runs": False}):
        monkeypatch.setattr(attention, "plain_kernel", lambda kinds=kinds: plain_kernel(**kinds))
        engine = build_on(FakeGpu(), make_form(), SOLO, with_graphs=True)
        for request in range(50, 56):
            engine.apply(admit(request, PROMPTS[0]))
        for request in (50, 52, 54):
            engine.apply(Cancel(request))
        for command in MIXED[:2]:
            engine.apply(command)
        found = unmasked(run(engine))
        assert {request: found[request] for request in (0, 1)} == wanted


lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300)), min_size=1, max_size=70)


@given(lengths, st.sampled_from([1, 16, 32, 256]))
def test_a_bucket_holds_its_spans_and_little_more(pairs: list[tuple[int, int]], page_size: int) -> None:
    spans = [make_span(length, before + length) for length, before in pairs]
    bucket = bucket_of(spans, page_size)
    longest = max(length for length, _ in pairs)
    if bucket is None:
        assert max(8, 2 * longest) * (len(pairs) + 8) > MAX_TOKENS
        return
    assert len(pairs) <= bucket.num_spans < max(2 * len(pairs), len(pairs) + 8)
    assert longest <= bucket.span_len <= max(8, 2 * longest)
    assert max(span.num_tokens for span in spans) <= bucket.num_pages * page_size


def make_span(length: int, num_tokens: int) -> Span:
    index = np.arange(num_tokens)
    slots = Slots(index, 0, [])
    return Span(0, num_tokens, num_tokens - length, num_tokens, slots)


def test_every_count_of_requests_with_usual_blocks_finds_a_captured_bucket() -> None:
    usual = set(usual_buckets(32, 32, 4096, 256))
    for count in range(1, 33):
        for num_tokens in (33, 300, 4096):
            assert bucket_of([make_span(32, num_tokens)] * count, 256) in usual
    assert len(usual) <= 24


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.sampled_from([np.int64, np.int32, np.float32]),
    st.integers(16, 64),
)
def test_staged_arrays_arrive_as_they_were(sizes: list[int], dtype: type, num_bytes: int) -> None:
    for device in (Device(), FakeGpu()):
        staging = Staging(device, num_bytes)
        for shift in range(2):
            arrays = {f"a{i}": np.arange(size, dtype=dtype) + shift for i, size in enumerate(sizes)}
            tensors = staging.put(arrays)
            device.wait()
            for name, array in arrays.items():
                assert tensors[name].numpy().dtype == dtype
                assert tensors[name].tolist() == array.tolist()
                assert tensors[name].data_ptr() % 4 == 0


def test_a_buffer_that_must_not_move_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="800 bytes to stage; wanted at most 100"):
        Staging(Device(), 100, grows=False).put({"a": np.zeros(100, dtype=np.int64)})


def test_memory_that_runs_out_in_a_capture_is_what_the_error_says() -> None:
    with pytest.raises(OutOfMemory, match="Tried to allocate"), FakeGpu().named_errors():
        try:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B012


GIB = 1 << 30


class TestMemory:
    """Pages from free memory: 4 layers x 2 x 8 tokens x 2 KV heads x 16 x 4 bytes = 8 KiB a page for model_A."""

    def pages(self, form: Form, free: int, total: int, peak: int) -> int:
        return build_on(FakeGpu((free, total), peak), form, SOLO, with_graphs=False).num_pages

    def test_the_fraction_counts_all_that_is_used(self, make_form: Callable[..., Form]) -> None:
        form = make_form(num_pages=0, memory_fraction=0.5)
        page = form.page_size * 2 * self.token_bytes(form)
        spare = 100 * page
        free, total = 7 * GIB, 10 * GIB  # 3 GiB hold weights and others' memory, 5 may be used
        peak = 2 * GIB - memory.SPARE_BYTES - spare
        assert self.pages(form, free, total, peak) == 100

    def test_no_more_pages_than_all_requests_can_use(self, make_form: Callable[..., Form]) -> None:
        form = make_form(num_pages=0)
        assert self.pages(form, 90 * GIB, 100 * GIB, 0) == 8 * 512 // 8

    def test_memory_for_less_than_one_request_is_a_named_error(self, make_form: Callable[..., Form]) -> None:
        form = make_form(num_pages=0)
        with pytest.raises(
            OutOfMemory, match=r"room for 0 KV pages .* wanted 64 .* --memory-fraction \(0.9\)"
        ):
            self.pages(form, 3 * GIB, 10 * GIB, 2 * GIB)

    def token_bytes(self, form: Form) -> int:
        model = build_engine(form, "cpu", SOLO)._model
        kv_heads = model.shard.kv_heads[1] - model.shard.kv_heads[0]
        return model.config.num_layers * kv_heads * model.config.head_dim * 4


@pytest.mark.parametrize(
    ("raised", "named", "words"),
    [
        (
            torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMore."),
            OutOfMemory,
            "allocate 2 GiB.; lower --mem",
        ),
        (RuntimeError("CUDA error: out of memory\nMore."), OutOfMemory, "out of memory; lower --mem"),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"),
            OutOfMemory,
            "ALLOC_FAILED when; lower",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory, "use a higher TP degree"),
        (
            RuntimeError("CUDA error: an illegal memory access"),
            DeviceLost,
            "cpu is lost: CUDA error: an illegal",
        ),
        (RuntimeError("shapes do not match"), RuntimeError, "shapes do not match"),
    ],
)
def test_errors_of_the_device_get_their_names(
    raised: Exception, named: type[Exception], words: str, make_form: Callable[..., Form],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    engine = build_engine(make_form(), "cpu", SOLO)

    def fail(*args: object) -> None:
        raise raised

    monkeypatch.setattr(engine._model, "forward", fail)
    engine.apply(admit(0, PROMPTS[0]))
    with pytest.raises(named, match=words) as caught:
        engine.step()
    assert type(caught.value) is named
