"""Every back end of dlmserve.kernels against reference.py: one test body, run on torch (at once and in tiles), on
each instruction set of the C++ kernels that this processor has, and on the CUDA kernels, emulated on the CPU.
"""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlmserve import kernels
from dlmserve.kernels import (
    ALL,
    AT_LEAST,
    FACTOR,
    QUOTA,
    THRESHOLD,
    Rows,
    combine,
    confidence,
    reference,
    tiled,
)
from tests.kernel_backends import CPU_BACKENDS, Backend, assert_same, exact, normal

INF, NAN = math.inf, math.nan
PROPERTY = settings(max_examples=20)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# --- arg-max and log-sum ------------------------------------------------------------------------------------


@PROPERTY
@given(
    num_rows=st.sampled_from([0, 1, 3, 4, 8, 9, 20, 129]),
    num_tokens=st.integers(0, 130),
    dim=st.sampled_from([1, 3, 17, 64, 515, 1030]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    offset=st.sampled_from([0, 7, 100_000]),
    banned=st.sets(st.integers(-2, 132), max_size=5),
    with_bias=st.booleans(),
)
def test_head_rows_are_those_of_the_whole_product(
    backend, num_rows, num_tokens, dim, dtype, offset, banned, with_bias
):
    hidden, weight = exact(num_rows, dim, seed=1), exact(num_tokens, dim, seed=2).to(dtype)
    bias = exact(num_tokens, seed=3) if with_bias else None
    banned = tuple(sorted(token + offset for token in banned))
    seen = backend.head_rows(hidden, weight, offset, banned, bias)
    assert_same(seen, reference.head_rows(hidden, weight, offset, banned, bias))


@PROPERTY
@given(data=st.data(), num_rows=st.integers(0, 3), num_tokens=st.integers(0, 40), padding=st.integers(0, 3))
def test_logit_rows_agree_on_any_values_and_row_stride(backend, data, num_rows, num_tokens, padding):
    values = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, INF, -INF, NAN, 300.0]), st.floats(-100, 100, width=32)
    )
    row = st.lists(values, min_size=num_tokens + padding, max_size=num_tokens + padding)
    logits = torch.tensor(data.draw(st.lists(row, min_size=num_rows, max_size=num_rows)), dtype=torch.float32)
    logits = logits.reshape(num_rows, num_tokens + padding)[:, :num_tokens]
    banned = tuple(sorted(data.draw(st.sets(st.integers(0, 40), max_size=5))))
    assert_same(backend.logit_rows(logits, 0, banned), reference.logit_rows(logits, 0, banned))


@pytest.mark.parametrize(
    ("logits", "banned", "logit", "token", "lse"),
    [
        pytest.param(
            [1, 2, 2, 1], (), 2, 11, math.log(2 * math.e + 2 * math.e**2), id="the lowest id wins a tie"
        ),
        pytest.param(
            [1, 5, 2, 1], (11,), 2, 12, math.log(2 * math.e + math.e**2 + math.e**5), id="banned: summed"
        ),
        pytest.param([1, 200, -3, 0], (11,), 1, 10, 200, id="a banned logit 200 above the rest"),
        pytest.param(
            [7, 1, 1, 9], (10, 13), 1, 11, math.log(math.e**7 + 2 * math.e + math.e**9), id="at the edges"
        ),
        pytest.param([1, NAN, 2, 1], (), 2, 12, NAN, id="a NaN poisons the sum and is not chosen"),
        pytest.param([1, INF, 2, 1], (), 2, 12, NAN, id="so does an infinity"),
        pytest.param([1, NAN, 2, 1], (11,), 2, 12, NAN, id="even where it is banned"),
        pytest.param([-INF, 4, -INF, -INF], (), 4, 11, 4, id="one finite logit"),
        pytest.param([-INF] * 4, (), -INF, -1, -INF, id="no finite logit"),
        pytest.param([1, 2, 3, 4], (10, 11, 12, 13), -INF, -1, 4.4401897, id="everything banned"),
        pytest.param([], (), -INF, -1, -INF, id="an empty slice"),
        pytest.param([-1e30, 1e30, 0, 0], (), 1e30, 11, 1e30, id="huge logits"),
    ],
)
def test_a_row_comes_down_to_what_the_definition_says(backend, logits, banned, logit, token, lse):
    wanted = Rows(torch.tensor([logit]).float(), torch.tensor([token]), torch.tensor([lse]).float())
    logits = torch.tensor(logits, dtype=torch.float32)
    assert_same(backend.logit_rows(logits[None], 10, banned), wanted)
    as_weight = logits[:, None].contiguous()
    for num_rows in (1, 9):  # dot products, and the tiled product
        rows = backend.head_rows(torch.ones(num_rows, 1), as_weight, 10, banned)
        assert_same(rows, Rows(*(field.expand(num_rows) for field in wanted)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 30])
def test_token_and_confidence_are_those_of_a_float64_softmax(backend, dtype, num_rows):
    hidden, weight = normal(num_rows, 100, seed=1), normal(1000, 100, seed=2).mul(0.2).to(dtype)
    rows = backend.head_rows(hidden, weight)
    wanted = (hidden.double() @ weight.double().T).softmax(-1).max(-1)
    assert rows.token.tolist() == wanted.indices.tolist()
    torch.testing.assert_close(confidence(rows), wanted.values.float(), rtol=3e-6, atol=1e-7)


def test_logits_of_bf16_weights_are_not_rounded_to_bf16(backend):
    weight = torch.tensor([[256.0, 0.0], [256.0, 1.0]]).bfloat16()  # logits 256 and 257: one bf16 number
    assert backend.head_rows(torch.ones(1, 2), weight).token.tolist() == [1]


@PROPERTY
@given(cuts=st.sets(st.integers(0, 100), max_size=4), banned=st.sets(st.integers(0, 100), max_size=4))
def test_uneven_slices_combine_to_the_whole_vocabulary(backend, cuts, banned):
    hidden, weight = exact(6, 20, seed=4), exact(100, 20, seed=5)
    banned = tuple(sorted(banned))
    bounds = [0, *sorted(cuts), 100]
    slices = [
        backend.head_rows(hidden, weight[begin:end], begin, banned)
        for begin, end in zip(bounds, bounds[1:], strict=False)
    ]
    assert_same(combine(slices), reference.head_rows(hidden, weight, 0, banned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_find_what_one_finds(backend, two_threads, monkeypatch, dtype):
    monkeypatch.setattr(tiled, "TILE_TOKENS", 4096)
    hidden, weight = exact(16, 256, seed=6), exact(9001, 256, seed=7).to(dtype)
    banned = (0, 4512, 4513, 9000)  # the threads meet at 4512
    assert_same(backend.head_rows(hidden, weight, 0, banned), reference.head_rows(hidden, weight, 0, banned))
    logits = exact(8, 90_001, seed=8)
    assert_same(backend.logit_rows(logits, 0, banned), reference.logit_rows(logits, 0, banned))


@PROPERTY
@given(
    data=st.data(),
    num_tokens=st.integers(0, 40),
    banned=st.sets(st.integers(0, 40), max_size=3),
    cut=st.integers(0, 40),
)
def test_the_two_largest_logits_of_slices_combine(backend, data, num_tokens, banned, cut):
    values = st.one_of(st.sampled_from([0.0, 1.0, 1.0, INF, -INF, NAN]), st.floats(-9, 9, width=32))
    row = data.draw(st.lists(values, min_size=num_tokens, max_size=num_tokens))
    logits = torch.tensor([row], dtype=torch.float32)
    slices = (logits[:, :cut], 0), (logits[:, cut:], min(cut, num_tokens))
    seen = [backend.top2_logits(part, start, sorted(banned)) for part, start in slices]
    allowed = [x for token, x in enumerate(logits[0].tolist()) if math.isfinite(x) and token not in banned]
    wanted = sorted([*allowed, -INF, -INF], reverse=True)[:2]
    assert torch.cat(seen, 1).topk(2).values.tolist() == [wanted]


# --- sampling -----------------------------------------------------------------------------------------------


def keys(num_rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """seed (beyond 32 bits), position, step."""
    rows = torch.arange(num_rows)
    return rows * 0x1_2345_6789 - seed, rows // 2, rows % 3


@PROPERTY
@given(
    num_tokens=st.integers(1, 300),
    temperatures=st.lists(st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]), min_size=0, max_size=5),
    seed=st.integers(0, 2**40),
    banned=st.sets(st.integers(0, 300), max_size=4),
)
def test_every_back_end_draws_the_same_tokens(backend, num_tokens, temperatures, seed, banned):
    logits = normal(len(temperatures), num_tokens, seed=seed % 1000) * 3
    logits[:, num_tokens // 2 :: 7] = torch.tensor(NAN if seed % 2 else -INF)
    arguments = (logits, torch.tensor(temperatures), *keys(len(temperatures), seed), 9, tuple(sorted(banned)))
    score, rows = backend.sample_rows(*arguments)
    wanted_score, wanted = reference.sample_rows(*arguments)
    assert_same(rows, wanted)
    torch.testing.assert_close(score, wanted_score, rtol=1e-6, atol=1e-6)


def test_a_draw_depends_neither_on_the_batch_nor_on_the_slices(backend, two_threads):
    logits, temperature = normal(6, 50_000, seed=1), torch.full((6,), 0.8)
    seed, position, step = keys(6)
    _, whole = backend.sample_rows(logits, temperature, seed, position, step, 0, (17,))
    one = slice(3, 4)
    _, alone = backend.sample_rows(
        logits[one], temperature[one], seed[one], position[one], step[one], 0, (17,)
    )
    assert alone.token.tolist() == whole.token[one].tolist()
    bounds = [0, 11, 30_000, 50_000]
    scores, slices = zip(
        *(
            backend.sample_rows(logits[:, begin:end], temperature, seed, position, step, begin, (17,))
            for begin, end in zip(bounds, bounds[1:], strict=False)
        ),
        strict=True,
    )
    assert_same(combine(slices, scores), whole)


def test_temperature_zero_is_greedy_and_the_logit_stays_raw(backend):
    logits = normal(8, 500, seed=2)
    score, rows = backend.sample_rows(logits, torch.tensor([0.0, 0.5] * 4), *keys(8), 3, (40,))
    greedy = reference.logit_rows(logits, 3, (40,))
    assert rows.token[::2].tolist() == greedy.token[::2].tolist()
    assert score[::2].tolist() == greedy.logit[::2].tolist()
    assert rows.logit.tolist() == logits.gather(1, rows.token[:, None] - 3)[:, 0].tolist()
    torch.testing.assert_close(rows.lse, greedy.lse)


@pytest.mark.parametrize("backend", CPU_BACKENDS, indirect=True)  # 20,000 emulated blocks would take long
@pytest.mark.parametrize("varied", ["seed", "position", "step"])
def test_draws_follow_the_softmax_whichever_key_varies(backend, varied):
    num_draws, temperature = 20_000, 0.5
    logits = torch.tensor([1.0, 0.0, 0.5, -1.0, 0.9, 2.0])
    key = {name: torch.zeros(num_draws, dtype=torch.int64) for name in ("seed", "position", "step")}
    key[varied] = torch.arange(num_draws)
    batch = logits.expand(num_draws, 6)
    _, rows = backend.sample_rows(batch, torch.full((num_draws,), temperature), **key, banned=(5,))
    wanted = (logits[:5] / temperature).softmax(-1) * num_draws
    chi_square = ((rows.token.bincount(minlength=6)[:5] - wanted) ** 2 / wanted).sum()
    assert rows.token.max() < 5 and chi_square < 18.5  # p = 0.001 at 4 degrees of freedom
    pairs = (rows.token[:-1] * 5 + rows.token[1:]).bincount(minlength=25).reshape(5, 5)
    wanted_pairs = wanted[:, None] * wanted / num_draws
    assert (
        (pairs - wanted_pairs) ** 2 / wanted_pairs
    ).sum() < 52.7  # p = 0.001 at 24: neighbours do not agree


# --- unmasking ----------------------------------------------------------------------------------------------


def chosen(backend: Backend, confidences: list[float], rule: int, value: float) -> list[int]:
    offsets, rules = torch.tensor([0, len(confidences)]), torch.tensor([rule])
    values = torch.tensor([value], dtype=torch.float64)
    unmask = backend.select(torch.tensor(confidences), offsets, rules, values)
    return unmask.nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("rule", "value", "confidences", "wanted"),
    [
        pytest.param(THRESHOLD, 0.9, [0.95, 0.2, 0.9, 0.8999], [0, 2], id="float32(0.9) passes 0.9"),
        pytest.param(THRESHOLD, 0.9, [0.1, 0.5, 0.5, 0.2], [1], id="none passes: the best, lowest row"),
        pytest.param(THRESHOLD, 0.1, [NAN, 0.05, NAN], [1], id="a number before a NaN"),
        pytest.param(THRESHOLD, 0.1, [NAN, NAN], [0], id="a NaN before nothing"),
        pytest.param(QUOTA, 2, [0.1, 0.7, 0.5, 0.7], [1, 3], id="quota"),
        pytest.param(QUOTA, 2, [0.5, 0.5, NAN, 0.5], [0, 1], id="quota: lowest rows on a tie"),
        pytest.param(QUOTA, 0, [0.1, 0.7], [1], id="quota: at least one"),
        pytest.param(QUOTA, 9, [0.1, NAN], [0, 1], id="quota: at most all"),
        pytest.param(FACTOR, 1.0, [0.7, 0.1, 0.1, 0.9], [0, 3], id="factor: 0.7 >= 1 - 1/3, 0.1 < 1 - 1/4"),
        pytest.param(FACTOR, 1.0, [0.9, 0.6, 0.8, 0.1], [0, 2], id="factor: 0.6 < 3/4 ends it"),
        pytest.param(FACTOR, 1.0, [0.9, 0.8, 0.1], [0, 1, 2], id="factor: the very last is taken too"),
        pytest.param(FACTOR, 1.0, [0.3, 0.1], [0, 1], id="factor: so are two of two"),
        pytest.param(FACTOR, 1.0, [0.3, 0.2, 0.1], [0], id="factor: at least one"),
        pytest.param(FACTOR, 1.0, [NAN, 0.1, NAN], [1], id="factor: a NaN fails"),
        pytest.param(ALL, 0, [NAN, 0.1], [0, 1], id="all"),
        pytest.param(AT_LEAST + 2, 0.5, [0.1, 0.7, 0.2, 0.3], [1, 3], id="at least two, one passes"),
        pytest.param(AT_LEAST + 2, 0.5, [0.6, 0.7, 0.2, 0.8], [0, 1, 3], id="at least two, three pass"),
        pytest.param(AT_LEAST + 9, 0.5, [0.6, NAN], [0, 1], id="at least nine of two"),
        pytest.param(AT_LEAST, 0.5, [0.1, 0.2], [1], id="at least none: one"),
        *(
            pytest.param(rule, 0.5, [], [], id=f"no rows, rule {rule}")
            for rule in (THRESHOLD, QUOTA, FACTOR, ALL, AT_LEAST + 1)
        ),
    ],
)
def test_a_rule_unmasks(backend, rule, value, confidences, wanted):
    assert chosen(backend, confidences, rule, value) == wanted


CONFIDENCE = st.one_of(st.sampled_from([0.0, 0.5, 0.75, 1.0, NAN]), st.floats(0, 1, width=32))
REQUEST = st.tuples(
    st.lists(CONFIDENCE, max_size=40),
    st.sampled_from([THRESHOLD, QUOTA, FACTOR, ALL, AT_LEAST, AT_LEAST + 5]),
    st.one_of(st.floats(0, 1), st.integers(0, 45)),
)


@PROPERTY
@given(requests=st.lists(REQUEST, max_size=6))
def test_select_agrees_and_unmasks_at_least_one_row_of_each_request(backend, requests):
    offsets = torch.tensor([0, *(len(rows) for rows, _, _ in requests)]).cumsum(0)
    arguments = (
        torch.tensor([value for rows, _, _ in requests for value in rows], dtype=torch.float32),
        offsets,
        torch.tensor([rule for _, rule, _ in requests], dtype=torch.int64),
        torch.tensor([value for _, _, value in requests], dtype=torch.float64),
    )
    unmask = backend.select(*arguments)
    assert unmask.tolist() == reference.select(*arguments).tolist()
    for begin, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        assert begin == end or unmask[begin:end].any()


@pytest.mark.parametrize(
    ("offsets", "rule"), [([0, 3], -1), ([1, 3], 0), ([0, 2], 0), ([0, 4], 0), ([0, 5, 3], 0)]
)
def test_select_refuses_what_makes_no_sense(backend, offsets, rule):
    num_requests = len(offsets) - 1
    rules, values = torch.full((num_requests,), rule), torch.ones(num_requests, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"wanted a rule from 0 to 3, or AT_LEAST \+ n, and offsets that rise"
    ):
        backend.select(torch.rand(3), torch.tensor(offsets), rules, values)


# --- the public functions -----------------------------------------------------------------------------------


def test_bf16_logits_are_taken_as_they_are():
    logits = normal(3, 90, seed=4).mul(4).bfloat16()
    draw = (torch.full((3,), 0.7), *keys(3))
    assert_same(kernels.logit_rows(logits), reference.logit_rows(logits.float()))
    assert_same(kernels.sample_rows(logits, *draw)[1], reference.sample_rows(logits.float(), *draw)[1])
    assert kernels.top2_logits(logits).tolist() == reference.top2_logits(logits.float()).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_public_functions_work_with_and_without_the_compiled_kernels(monkeypatch, dtype, compiled):
    if not compiled:
        monkeypatch.setattr(kernels, "native", None)
        monkeypatch.setattr(kernels, "_missing", "not built", raising=False)
        assert kernels.backend_name() == "torch (no compiled kernel: not built)"
    hidden, weight = exact(5, 30, seed=1), exact(99, 30, seed=2)
    rows = kernels.head_rows(hidden, weight.to(dtype), 4, (6,))
    assert_same(rows, reference.head_rows(hidden, weight, 4, (6,)))
    logits = hidden @ weight.T
    assert_same(kernels.logit_rows(logits, 4, (6,)), rows)
    assert_same(kernels.sample_rows(logits, torch.zeros(5), *keys(5), 4, (6,))[1], rows)
    one_request = (torch.tensor([0, 5]), torch.tensor([ALL]), torch.zeros(1, dtype=torch.float64))
    assert kernels.select(confidence(rows), *one_request).all()


def test_wrong_arguments_are_named():
    one_rule = torch.tensor([ALL]), torch.ones(1, dtype=torch.float64)
    hidden, weight = torch.ones(2, 4), torch.ones(6, 4)
    with pytest.raises(TypeError, match="hidden is torch.float64; wanted torch.float32"):
        kernels.head_rows(hidden.double(), weight)
    with pytest.raises(TypeError, match=r"weight is torch.float16; wanted torch.float32 or torch.bfloat16"):
        kernels.head_rows(hidden, weight.half())
    with pytest.raises(ValueError, match=r"weight has shape \(6, 3\); wanted 2 dimensions, the last of 4"):
        kernels.head_rows(hidden, weight[:, :3])
    with pytest.raises(ValueError, match="wanted contiguous"):
        kernels.head_rows(hidden, torch.ones(4, 6).T)
    with pytest.raises(ValueError, match=r"bias has shape \(5,\)"):
        kernels.head_rows(hidden, weight, bias=torch.ones(5))
    with pytest.raises(ValueError, match=r"step has shape \(3,\)"):
        kernels.sample_rows(hidden, torch.ones(2), *keys(2)[:2], torch.arange(3))
    with pytest.raises(TypeError, match="value is torch.float32"):
        kernels.select(torch.ones(1), torch.tensor([0, 1]), torch.tensor([ALL]), torch.ones(1))
    with pytest.raises(ValueError, match="tensors on cpu and meta; wanted all on one device"):
        kernels.select(torch.ones(1), torch.zeros(2, dtype=torch.int64, device="meta"), *one_rule)
