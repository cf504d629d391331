"""The CUDA kernels without a GPU: compiled for real, and emulated where the common tests do not reach."""

import ctypes
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlmserve import kernels
from dlmserve.errors import DeviceLost, KernelsUnavailable
from dlmserve.kernels import ALL, FACTOR, THRESHOLD, chunked, cuda, driver, nvrtc, pack, reference, tiled
from dlmserve.worker.device import Device
from tests import cuda_emulator
from tests.kernel_backends import assert_same, emulated, exact, normal, poisoned_memory

# --- compiled -----------------------------------------------------------------------------------------------


KERNELS = {
    "rows.cu": {"best_rows_f32", "best_rows_bf16", "draw_rows_f32", "draw_rows_bf16", "merge_rows"},
    "unmask.cu": {"select_rows", "unmask_step"},
}


@pytest.fixture
def nvrtc_library() -> None:
    try:
        nvrtc.version()
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("source", nvrtc.SOURCES)
def test_every_kernel_compiles_and_keeps_to_registers(nvrtc_library, source, arch):
    cubin, messages = nvrtc.compile_source(source, arch)
    assert cubin.startswith(b"\x7fELF")
    seen = nvrtc.resources(messages)
    assert seen.keys() == KERNELS[source]
    for kernel, used in seen.items():
        assert used["spilled_bytes"] == used["stack_bytes"] == 0, kernel
        assert used["registers"] <= 64, kernel  # four blocks of 256 threads on a multiprocessor


def test_a_compiled_kernel_is_cached_until_its_source_changes(nvrtc_library, monkeypatch, tmp_path):
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "one.cuh").write_text("#define FACTOR 2.0f\n")
    source = csrc / "one.cu"
    source.write_text(
        '#include "one.cuh"\nextern "C" __global__ void one(float* x) { x[threadIdx.x] *= FACTOR; }\n'
    )
    monkeypatch.setattr(nvrtc, "CSRC", csrc)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = nvrtc.cubin("one.cu", "sm_80")
    compiled = []
    compile_source = nvrtc.compile_source
    monkeypatch.setattr(nvrtc, "compile_source", lambda *what: compiled.append(what) or compile_source(*what))
    assert nvrtc.cubin("one.cu", "sm_80") == first and not compiled
    assert nvrtc.cubin("one.cu", "sm_90") != first and len(compiled) == 1
    (csrc / "one.cuh").write_text("#define FACTOR 3.0f\n")
    assert nvrtc.cubin("one.cu", "sm_80") != first and len(compiled) == 2
    assert len(list((tmp_path / "cache/dlmserve/cubins").iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(nvrtc_library, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert nvrtc.cubin("unmask.cu", "sm_90").startswith(b"\x7fELF")
    assert "cannot cache a compiled kernel" in caplog.text


def test_an_error_in_a_kernel_comes_with_the_compilers_words(nvrtc_library, monkeypatch, tmp_path):
    (tmp_path / "bad.cu").write_text("no such thing;\n")
    monkeypatch.setattr(nvrtc, "CSRC", tmp_path)
    with pytest.raises(KernelsUnavailable, match=r"(?s)bad.cu for sm_90.*bad.cu\(1\): error"):
        nvrtc.compile_source("bad.cu", "sm_90")


# --- loaded and launched ------------------------------------------------------------------------------------


class FakeCuda:
    """libcuda as the driver sees it: two libraries of one kernel each; `status` is what the next call returns."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launches: list[tuple] = []
        self.num_searches = self.status = 0

    def cuLibraryLoadData(self, library, cubin, *_options) -> int:
        self.loaded.append(cubin)
        library._obj.value = len(self.loaded)
        return self.status

    def cuLibraryGetKernel(self, kernel, library, name) -> int:
        self.num_searches += 1
        kernel._obj.value = 100 + library.value
        return 0 if self.loaded[library.value - 1] == name else 500

    def cuLaunchKernel(self, kernel, *shape) -> int:
        *shape, stream, arguments, _extra = shape
        first = ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int)).contents.value
        self.launches.append((kernel.value, tuple(shape), stream.value, first))
        return self.status

    def cuGetErrorString(self, status, text) -> int:
        text._obj.value = b"invalid device function"
        return 0


@pytest.fixture
def fake_cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(driver, "_open_libcuda", lambda: fake)
    monkeypatch.setattr(nvrtc, "cubin", lambda source, arch, major: Path(source).stem.encode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return fake


def test_a_launch_goes_to_torchs_stream_with_a_pointer_to_each_argument(fake_cuda):
    launch = driver.Driver(torch.device("cuda:0"))
    assert launch.arch == "sm_90" and fake_cuda.loaded == [b"rows", b"unmask"]
    for value in (5, 6):
        launch("unmask", (3, 2), 128, (ctypes.c_int(value), ctypes.c_void_p(0)))
    shape = (3, 2, 1, 128, 1, 1, 0)
    assert fake_cuda.launches == [(102, shape, 77, 5), (102, shape, 77, 6)]
    assert fake_cuda.num_searches == 2  # of the two libraries, once


def test_what_the_driver_refuses_is_named(fake_cuda):
    launch = driver.Driver(torch.device("cuda:0"))
    fake_cuda.status = 98
    with (
        pytest.raises(DeviceLost, match=r"launch of rows with 64 threads .* invalid device function \(98\)"),
        Device().named_errors(),
    ):
        launch("rows", (1, 1), 64, (ctypes.c_int(1),))
    with pytest.raises(KernelsUnavailable, match="refuses the kernels compiled for sm_90"):
        driver.Driver(torch.device("cuda:0"))


# --- emulated -----------------------------------------------------------------------------------------------


def outcome_of_everything(order: str) -> list:
    """Both halves of a step, for requests with more rows than a block has threads."""
    device = emulated(order)
    seen = device.logit_rows(normal(280, 300, seed=1) * 3, 0, (7,))
    offsets, rule = torch.tensor([0, 140, 140, 280]), torch.tensor([FACTOR, ALL, THRESHOLD])
    value = torch.tensor([4.0, 0.0, 0.3], dtype=torch.float64)
    canvas = torch.zeros(280, dtype=torch.int64)
    with poisoned_memory():
        step = device.unmask_step(pack(seen)[None], offsets, rule, value, torch.arange(280), canvas)
    numbers = (seen.token, step.confidence, step.unmask, step.num_left, step.statistics[[0, 2]], canvas)
    return [tensor.tolist() for tensor in numbers]


@pytest.mark.parametrize("barrier", range(5))
def test_a_missing_barrier_shows_in_some_order(barrier):
    library = cuda_emulator.library()
    assert library.num_barriers() == 5
    wanted = outcome_of_everything("forward")
    library.skip_barrier(barrier)
    try:
        assert any(outcome_of_everything(order) != wanted for order in cuda_emulator.ORDERS)
    finally:
        library.skip_barrier(-1)


@pytest.mark.parametrize("order", cuda_emulator.ORDERS)
@pytest.mark.parametrize("begin", range(0, 9, 2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_begin_and_end_anywhere(order, begin, dtype):
    device, logits = emulated(order), exact(3, 61, seed=begin).mul(4).to(dtype)[:, begin : 58 + begin // 3]
    assert_same(device.logit_rows(logits, 0, (9,)), reference.logit_rows(logits.float(), 0, (9,)))
    keys = torch.tensor([1, 2**40, -3]), torch.arange(3), torch.arange(3)
    drawn = (torch.tensor([0.5, 0.0, 2.0]), *keys, 40, (50,))
    assert_same(device.sample_rows(logits, *drawn)[1], reference.sample_rows(logits.float(), *drawn)[1])


def test_logits_far_below_the_largest_still_add_up():
    logits = torch.full((1, 100_000), -12.0)
    logits[0, 77_777] = 0.0
    rows = emulated("forward").logit_rows(logits)
    assert rows.token.item() == 77_777
    assert rows.lse.item() == pytest.approx(math.log1p(99_999 * math.exp(-12)), rel=1e-6)


@pytest.mark.parametrize("order", cuda_emulator.ORDERS)
def test_a_request_that_makes_no_sense_harms_no_other(order):
    rows = reference.logit_rows(normal(6, 20, seed=5))
    canvas = torch.zeros(6, dtype=torch.int64)
    offsets, rule = torch.tensor([0, 2, 4, 2, 9]), torch.tensor([ALL, -7, ALL, ALL])
    outcome = emulated(order).unmask_step(
        pack(rows)[None], offsets, rule, torch.zeros(4, dtype=torch.float64), torch.arange(6), canvas
    )
    assert outcome.num_left.tolist() == [0, -1, -1, -1]
    assert canvas.tolist() == [*rows.token[:2].tolist(), 0, 0, 0, 0]


def test_too_many_banned_ids_are_refused():
    with pytest.raises(ValueError, match="33 banned ids; wanted at most 32 on a GPU"):
        emulated("forward").logit_rows(torch.zeros(1, 99), 0, range(33))


# --- the LM head in chunks ----------------------------------------------------------------------------------


def test_a_chunk_of_logits_takes_the_memory_set_aside_for_it():
    assert chunked.num_chunk_rows(126_464, 140 << 30) == 530  # 256 MiB of float32
    assert chunked.num_chunk_rows(126_464, 8 << 30) == 265  # 1/64 of a small device
    assert chunked.num_chunk_rows(126_464, 1 << 20) == 1
    assert chunked.num_chunk_rows(0, 1 << 30) > 0


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8, 20])
def test_the_head_runs_over_rows_in_chunks(num_rows):
    hidden, weight, bias = exact(num_rows, 16, seed=1), exact(50, 16, seed=2), exact(50, seed=3)
    shapes = []

    def logit_rows(logits, *where):
        shapes.append(tuple(logits.shape))
        return reference.logit_rows(logits, *where)

    rows = chunked.head_rows(hidden, weight, 9, (12,), bias, logit_rows, memory_bytes=64 * 4 * 50 * 8)
    assert_same(rows, reference.head_rows(hidden, weight, 9, (12,), bias))
    assert shapes == [(min(8, num_rows - at), 50) for at in range(0, max(num_rows, 1), 8)]


def test_bf16_hidden_states_are_widened_where_torch_has_no_product_for_them(monkeypatch):
    monkeypatch.setattr(tiled, "TILE_TOKENS", 20)
    hidden, weight = normal(5, 40, seed=1).bfloat16(), normal(90, 40, seed=2).bfloat16()
    rows = chunked.head_rows(hidden, weight, 0, (), None, reference.logit_rows, 1 << 30)
    assert_same(rows, reference.head_rows(hidden.float(), weight))


# --- the choice of back end ---------------------------------------------------------------------------------


def test_public_functions_hand_a_gpus_tensors_to_its_kernels(monkeypatch):
    device = emulated("forward")
    monkeypatch.setattr(kernels, "_on_device", lambda tensor: device)
    monkeypatch.setattr(kernels, "_backend", lambda tensor: device)
    hidden, weight = exact(5, 30, seed=1).bfloat16(), exact(99, 30, seed=2).bfloat16()
    rows = kernels.head_rows(hidden, weight, 4, (6,))
    assert_same(rows, reference.head_rows(hidden.float(), weight, 4, (6,)))
    logits = (hidden.float() @ weight.float().T).bfloat16()
    assert_same(kernels.logit_rows(logits, 4), reference.logit_rows(logits.float(), 4))
    assert kernels.top2_logits(logits).tolist() == reference.top2_logits(logits.float()).tolist()
    one_request = torch.tensor([0, 5]), torch.tensor([ALL]), torch.zeros(1, dtype=torch.float64)
    canvas = torch.zeros(5, dtype=torch.int64)
    outcome = kernels.unmask_step(pack(rows)[None], *one_request, torch.arange(5), canvas)
    assert canvas.tolist() == rows.token.tolist() and outcome.num_left.tolist() == [0]
    assert kernels.select(kernels.confidence(rows), *one_request).all()


def test_a_gpu_without_the_compiler_falls_back_to_torch_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(nvrtc, "_candidates", lambda cuda_major: iter(("libnvrtc-of-nobody.so",)))
    monkeypatch.setattr(cuda, "open_device", lambda device: nvrtc.version(99))
    kernels._cuda_kernels.cache_clear()
    assert kernels.backend_name("cuda:7") == "torch"
    assert kernels.backend_name("cuda:7") == "torch"
    assert caplog.text.count("cuda:7 runs the confidence kernels in torch") == 1
    assert "pip install nvidia-cuda-nvrtc" in caplog.text
    kernels._cuda_kernels.cache_clear()


def test_the_package_ships_its_sources():
    root = Path(__file__).parent.parent
    patterns = set((root / "MANIFEST.in").read_text().split())
    assert {f"*{path.suffix}" for path in nvrtc.CSRC.iterdir()} <= patterns
