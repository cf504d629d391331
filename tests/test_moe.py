"""Mixture of experts: who is chosen with which weight, and both ways to compute it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlmserve.worker.models.moe import GroupedExperts, LoopedExperts, MoeConfig, grouped_fits, route
from dlmserve.worker.weights import DummyWeights

EXPERTS = [(f"expert.{i}.gate", f"expert.{i}.up", f"expert.{i}.down") for i in range(5)]


def config(**more: object) -> MoeConfig:
    return MoeConfig((True,), **{"num_experts": 8, "num_chosen": 3, "expert_size": 4} | more)  # type: ignore[arg-type]


def test_a_softmax_router_takes_the_most_probable_with_their_probabilities() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    weights, chosen = route(logits, None, config(num_experts=4, num_chosen=2))
    assert chosen.tolist() == [[1, 3]]
    assert torch.equal(weights, logits.softmax(-1)[:, [1, 3]]), "they do not sum to one"


@given(
    st.integers(0, 2**31),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 3), (8, 4)]),
)
def test_a_sigmoid_router_chooses_within_the_best_groups(seed: int, groups: tuple[int, int]) -> None:
    num_groups, num_kept = groups
    generator = torch.Generator().manual_seed(seed)
    logits, bias = torch.randn(16, generator=generator), torch.randn(16, generator=generator)
    options = {"num_experts": 16, "sigmoid": True, "num_groups": num_groups, "num_kept_groups": num_kept}
    weights, chosen = route(logits[None], bias, config(scale=2.5, **options))
    scores = logits.sigmoid().tolist()
    ranked = [score + more for score, more in zip(scores, bias.tolist(), strict=True)]
    size = 16 // num_groups
    kept = sorted(
        range(num_groups), key=lambda g: -sum(sorted(ranked[g * size : (g + 1) * size], reverse=True)[:2])
    )[:num_kept]
    allowed = [e for e in range(16) if e // size in kept]
    best = sorted(allowed, key=lambda e: -ranked[e])[:3]
    assert sorted(chosen[0].tolist()) == sorted(best)
    total = sum(scores[e] for e in best)
    for weight, expert in zip(weights[0].tolist(), chosen[0].tolist(), strict=True):
        assert weight == pytest.approx(2.5 * scores[expert] / total, rel=1e-4), "the bias is not in it"


def test_grouped_products_give_what_the_loop_gives() -> None:
    from dlmserve.worker.models.mlp import mlp_asks

    source = DummyWeights(torch.float32, "cpu")
    asks = [mlp_asks(names, 16, 24, (8, 24)) for names in EXPERTS]
    x = torch.randn(7, 16)
    chosen = torch.tensor(
        [[0, 3], [3, 1], [0, 1], [3, 0], [1, 3], [3, 0], [0, 3]]
    )  # never 2, and not the last
    weights = torch.rand(7, 2)
    looped, grouped = LoopedExperts(source, asks), GroupedExperts(source, asks)
    wanted = looped(x, weights, chosen)
    torch.testing.assert_close(grouped(x, weights, chosen), wanted)
    one = sum(weights[0, j] * looped._experts[chosen[0, j]](x[:1]) for j in range(2))
    torch.testing.assert_close(wanted[:1], one)
    for a, b in zip(looped.shards(), grouped.shards(), strict=True):
        assert a.ask == b.ask and torch.equal(a.take(), b.take())


def test_grouped_products_are_for_gpus_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert grouped_fits(torch.bfloat16, "cuda:0", 2048, 512)
    assert not grouped_fits(torch.bfloat16, "cuda:0", 2048, 20), "rows of 40 bytes"
    assert not grouped_fits(torch.float32, "cuda:0", 2048, 512)
    assert not grouped_fits(torch.bfloat16, "cpu", 2048, 512)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not grouped_fits(torch.bfloat16, "cuda:0", 2048, 512)
