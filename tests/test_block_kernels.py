"""Products, norms and gates of a transformer block on each instruction set that this processor has."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlmserve import kernels
from dlmserve.kernels import native, reference
from dlmserve.worker.linear import Linear

PROPERTY = settings(max_examples=25)


@pytest.fixture(params=[128, 256, 512])
def isa(request: pytest.FixtureRequest) -> Iterator[int]:
    if native is None:
        pytest.skip("the C++ kernels are not built")
    widest = native.isa_bits()
    try:
        if native.cap_isa(request.param) != request.param:
            pytest.skip(f"this processor has no vectors of {request.param} bits")
        yield request.param
    finally:
        native.cap_isa(widest)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@PROPERTY
@given(
    num_rows=st.sampled_from([0, 1, 2, 5, 7, 13, 48, 49, 100]),
    num_out=st.sampled_from([1, 3, 8, 17, 64, 128, 129, 300]),
    dim=st.sampled_from([1, 3, 17, 128, 512, 513, 1030]),
    with_bias=st.booleans(),
)
def test_packed_product_is_the_plain_one(isa, num_threads, num_rows, num_out, dim, with_bias):
    x, weight = normal(num_rows, dim, seed=1), normal(num_out, dim, seed=2)
    bias = normal(num_out, seed=3) if with_bias else None
    seen = native.PackedWeight(weight).product(x, bias)
    wanted = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    ).float()
    torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=3e-6 * dim**0.5)


def test_rows_of_a_product_do_not_depend_on_their_batch(isa, num_threads):
    x, packed = normal(101, 515, seed=1), native.PackedWeight(normal(260, 515, seed=2))
    whole = packed.product(x, None)
    for start, end in ((0, 1), (3, 5), (40, 90), (100, 101)):
        assert torch.equal(packed.product(x[start:end], None), whole[start:end])


def test_weights_packed_for_one_width_outlive_a_change_of_width():
    if native is None:
        pytest.skip("the C++ kernels are not built")
    x, weight = normal(9, 40, seed=1), normal(33, 40, seed=2)
    packed, widest = native.PackedWeight(weight), native.isa_bits()
    try:
        native.cap_isa(128)
        torch.testing.assert_close(packed.product(x, None), x @ weight.T, rtol=1e-5, atol=1e-5)
    finally:
        native.cap_isa(widest)


@PROPERTY
@given(
    num_rows=st.sampled_from([0, 1, 5, 300]), dim=st.sampled_from([1, 3, 8, 17, 512]), scale=st.floats(0, 1e4)
)
def test_rms_norm_is_that_of_torch(isa, num_threads, num_rows, dim, scale):
    x, weight = normal(num_rows, dim, seed=1) * scale, normal(dim, seed=2)
    torch.testing.assert_close(
        native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6
    )


@PROPERTY
@given(
    num_rows=st.sampled_from([0, 1, 5, 70]), dim=st.sampled_from([1, 3, 8, 17, 384]), scale=st.floats(0, 1e3)
)
def test_silu_gate_is_that_of_torch(isa, num_threads, num_rows, dim, scale):
    x = normal(num_rows, 2 * dim, seed=1) * scale
    torch.testing.assert_close(native.silu_gate(x), reference.silu_gate(x), rtol=1e-5, atol=1e-6)


def test_what_is_not_a_number_stays_so(isa):
    x = torch.zeros(3, 18)
    x[1, 4] = torch.nan
    assert native.silu_gate(x).isnan().any(-1).tolist() == [False, True, False]
    assert native.rms_norm(x, torch.ones(18), 1e-5).isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("num_out", [32, 4096])  # on either side of what oneDNN packs
def test_linear_takes_whatever_back_end_there_is(monkeypatch, compiled, num_out):
    if not compiled:
        monkeypatch.setattr(kernels, "native", None)
    x, weight, bias = normal(7, 256, seed=1), normal(num_out, 256, seed=2), normal(num_out, seed=3)
    torch.testing.assert_close(Linear(weight, bias)(x), x @ weight.T + bias, rtol=1e-5, atol=1e-4)
