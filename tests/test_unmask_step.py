"""Everything between the ranks' exchange and the next step, on each back end: properties, and the edges by hand."""

import math

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
    StepOutcome,
    combine,
    confidence,
    pack,
    reference,
)
from tests.kernel_backends import exact

INF, NAN = math.inf, math.nan
PROPERTY = settings(max_examples=20)


def requests(lengths: list[int], rules: list[int], values: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """offsets, rule, value."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return offsets, torch.tensor(rules, dtype=torch.int64), torch.tensor(values, dtype=torch.float64)


def one_request(
    backend, rows: Rows, rule: int = THRESHOLD, value: float = 0.9
) -> tuple[StepOutcome, list[int]]:
    """The outcome, and a canvas of zeros after it: row m decides position m."""
    canvas = torch.zeros(len(rows.token), dtype=torch.int64)
    position = torch.arange(len(canvas))
    arguments = requests([len(canvas)], [rule], [value])
    return backend.unmask_step(pack(rows)[None], *arguments, position, canvas), canvas.tolist()


def certain(*probabilities: float) -> Rows:
    """Rows with these confidences whose tokens are 10, 11, ..."""
    num_rows = len(probabilities)
    return Rows(torch.tensor(probabilities).log(), torch.arange(10, 10 + num_rows), torch.zeros(num_rows))


REQUEST = st.tuples(
    st.integers(0, 40),
    st.sampled_from([THRESHOLD, QUOTA, FACTOR, ALL, AT_LEAST + 5]),
    st.one_of(st.floats(0, 1), st.integers(0, 45)),
)


@PROPERTY
@given(
    batch=st.lists(REQUEST, min_size=1, max_size=5),
    tp_degree=st.sampled_from([1, 2, 4]),
    holes=st.sets(st.integers(0, 60), max_size=3),
    seed=st.integers(0, 1000),
)
def test_a_step_does_what_its_parts_do_one_by_one(backend, batch, tp_degree, holes, seed):
    offsets, rule, value = requests(*(list(column) for column in zip(*batch, strict=True)))
    num_rows = int(offsets[-1])
    logits = exact(num_rows, 37, seed=seed) * 8
    for row in holes & set(range(num_rows)):
        logits[row, 5 + row % 9] = NAN if row % 2 else INF
    slices = [
        reference.logit_rows(part, 100 + start, (103,))
        for part, start in zip(
            logits.split(37 // tp_degree + 1, 1), range(0, 37, 37 // tp_degree + 1), strict=True
        )
    ]
    position = torch.randperm(num_rows + 9, generator=torch.Generator().manual_seed(seed))[:num_rows]
    canvas = torch.full((num_rows + 9,), -7)
    parts = torch.stack([pack(rows) for rows in slices])

    outcome = backend.unmask_step(parts, offsets, rule, value, position, canvas)

    whole = combine(slices)
    assert outcome.token.tolist() == whole.token.tolist()
    torch.testing.assert_close(outcome.confidence, confidence(whole), rtol=3e-6, atol=1e-7, equal_nan=True)
    wanted = reference.select(outcome.confidence, offsets, rule, value)
    assert outcome.unmask.tolist() == wanted.tolist()
    expected = torch.full_like(canvas, -7)
    expected[position[wanted]] = whole.token[wanted]
    assert canvas.tolist() == expected.tolist()
    for request, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
        assert outcome.num_left[request] == (~wanted[begin:end]).sum()
        own = outcome.confidence[begin:end]
        seen = outcome.statistics[request]
        if len(own) == 0 or own.isnan().any():
            assert seen.isnan().all()
        else:
            quantiles = own.double().quantile(torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64))
            torch.testing.assert_close(seen[[0, 1, 2, 4]].double(), quantiles, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(seen[3].double(), own.double().mean(), rtol=1e-6, atol=1e-7)


def test_the_best_row_is_forced_where_none_passes(backend):
    outcome, canvas = one_request(backend, certain(0.2, 0.6, 0.5, 0.6))
    assert canvas == [0, 11, 0, 0]
    assert outcome.unmask.tolist() == [False, True, False, False]
    assert outcome.num_left.tolist() == [3]


def test_statistics_are_those_of_all_rows_of_the_step(backend):
    outcome, _ = one_request(backend, certain(0.5, 0.1, 0.4, 0.9, 0.3))
    torch.testing.assert_close(outcome.statistics, torch.tensor([[0.1, 0.3, 0.4, 0.44, 0.5]]))


def test_a_row_without_a_token_stays_masked(backend):
    rows = Rows(torch.tensor([-INF, -1.0]), torch.tensor([-1, 7]), torch.zeros(2))
    outcome, canvas = one_request(backend, rows, ALL)
    assert canvas == [0, 7]
    assert outcome.unmask.tolist() == [False, True] and outcome.num_left.tolist() == [1]


def test_the_rank_with_the_largest_score_decides_a_drawn_token(backend):
    parts = [
        pack(Rows(torch.tensor([logit]), torch.tensor([token]), torch.zeros(1)), torch.tensor([score]))
        for logit, token, score in ((1.0, 3, 2.0), (-1.0, 9, 5.0))
    ]
    canvas = torch.zeros(1, dtype=torch.int64)
    outcome = backend.unmask_step(torch.stack(parts), *requests([1], [ALL], [0.0]), torch.tensor([0]), canvas)
    assert canvas.tolist() == [9]
    torch.testing.assert_close(outcome.confidence, torch.tensor([math.exp(-1) / 2]))


def test_token_ids_of_large_vocabularies_survive_the_exchange():
    rows = Rows(torch.zeros(2), torch.tensor([156_892, 2**24 - 1]), torch.zeros(2))
    assert kernels.unpack(pack(rows))[1].token.tolist() == [156_892, 2**24 - 1]


def test_one_copy_brings_an_outcome_to_another_device(backend):
    outcome, _ = one_request(backend, certain(0.95, 0.2))
    assert outcome.to("cpu").token.tolist() == [10, 11]
    away = outcome.to("meta")
    shapes = {"token": (2,), "confidence": (2,), "statistics": (1, 5), "num_left": (1,), "unmask": (2,)}
    for field, shape in shapes.items():
        assert getattr(away, field).device.type == "meta" and getattr(away, field).shape == shape


def test_wrong_arguments_are_named():
    parts = pack(certain(0.5, 0.5))[None]
    arguments = (*requests([2], [ALL], [0.0]), torch.arange(2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"parts has shape \(1, 3, 2\); wanted \[tp, 4, M\]"):
        kernels.unmask_step(parts[:, :3], *arguments)
    with pytest.raises(TypeError, match="canvas is torch.int32"):
        kernels.unmask_step(parts, *arguments[:4], arguments[4].int())
    with pytest.raises(ValueError, match=r"parts has shape \(1, 4, 2\)"):
        kernels.unmask_step(parts, *arguments[:3], torch.arange(3), arguments[4])
    assert kernels.unmask_step(parts, *arguments).num_left.tolist() == [0]
