"""Hidden states at recompute steps: how they are pooled, the network that reads them, what becomes of its numbers."""

from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest
import torch

from dlmserve import LLM, DecodingParams
from dlmserve.control.policy.hidden_predictor import HiddenStatePredictor
from dlmserve.control.policy.predictions import Progress, features
from dlmserve.control.policy.request import RequestSpec, RequestState
from dlmserve.errors import ConfigError
from dlmserve.messages import Decoding, RequestStep
from dlmserve.training import hidden
from dlmserve.training.hidden import HiddenTable, read_unseen, train_network
from dlmserve.worker.hidden_reader import HiddenNetwork, load_reader, pool_recomputed

WIDTH = 8


@pytest.fixture(scope="module")
def table() -> HiddenTable:
    """Blocks left are in the first input, steps left in the second."""
    generator = torch.Generator().manual_seed(0)
    outlooks = torch.randint(0, 6, (400, 2), generator=generator).float()
    pooled = torch.randn(400, 2 * WIDTH, generator=generator) * 0.1
    pooled[:, :2] += outlooks
    return HiddenTable(pooled, outlooks, torch.rand(400, generator=generator) < 0.5, np.arange(400) // 4)


@pytest.fixture(scope="module")
def network(table: HiddenTable) -> HiddenNetwork:
    return train_network(table.of(np.arange(70)), table.of(np.arange(70, 85)), seed=0)


def test_only_requests_at_a_recompute_step_are_pooled_mean_and_first() -> None:
    states = torch.arange(12.0).view(6, 2)
    assert pool_recomputed(states, [2, 3, 1], [True, False, True]).tolist() == [
        [1, 2, 0, 1],
        [10, 11, 10, 11],
    ]


def test_the_network_learns_both_numbers(table: HiddenTable, network: HiddenNetwork) -> None:
    held_out = table.of(np.arange(85, 100))
    wrong = (network(held_out.pooled) - held_out.outlooks).abs().mean(0)
    assert (wrong < 0.5).all()


def test_who_was_seen_is_read_by_networks_that_did_not_see_it(
    table: HiddenTable, network: HiddenNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden, "MAX_EPOCHS", 5)  # they only have to be others
    read = read_unseen(network, table, seen=np.arange(85), seed=0)
    own = network(table.pooled).numpy()
    unseen = table.requests >= 85
    assert np.array_equal(read[unseen], own[unseen])
    assert not np.isclose(read[~unseen], own[~unseen]).all(axis=1).any()


def test_a_stored_network_reads_the_same(table: HiddenTable, network: HiddenNetwork, tmp_path: Path) -> None:
    alone = HiddenStatePredictor(np.array([0.5, 0.9]), np.array([2.0, 4.0]), 3.0)
    network.save(tmp_path / "hidden.safetensors", alone.arrays())
    again = load_reader(str(tmp_path / "hidden.safetensors"), WIDTH, "cpu")
    assert again
    torch.testing.assert_close(again(table.pooled), network(table.pooled), rtol=0.01, atol=0.02)
    loaded = HiddenStatePredictor.load(tmp_path / "hidden.safetensors")
    assert loaded.steps_per_block.tolist() == [2.0, 4.0] and loaded.usual_blocks == 3.0


def test_a_file_that_is_of_no_use_is_an_error_for_the_head_and_a_warning_on_a_rank(
    network: HiddenNetwork, tmp_path: Path
) -> None:
    network.save(tmp_path / "narrow.safetensors", {})
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    for name in ("narrow", "broken", "missing"):
        path = tmp_path / f"{name}.safetensors"
        with pytest.raises(ConfigError, match="again|on this model"):
            HiddenNetwork.load(path, WIDTH + 1, "cpu")
        with pytest.raises(ConfigError, match="train it again"):
            HiddenStatePredictor.load(path)
        assert load_reader(str(path), WIDTH + 1, "cpu") is None


def test_recompute_steps_report_what_is_read_and_cache_steps_nothing() -> None:
    llm = LLM("tiny")
    llm.read_hidden(lambda pooled: pooled[:, :2] * 0 + torch.tensor([2.0, 3.0]))
    steps: list[RequestStep] = []
    params = DecodingParams(gen_length=32, block_length=8, threshold=0.99, ignore_eos=True)
    llm.generate([[1, 7, 8], [1, 9]], params, on_step=lambda _, step: steps.append(step))
    assert {step.recompute for step in steps} == {True, False}
    assert all(step.hidden == ((2.0, 3.0) if step.recompute else None) for step in steps)


def test_between_two_readings_a_step_takes_one_off_and_a_block_too() -> None:
    decoding = Decoding(block_length=2)
    spec = RequestSpec("", [5, 9, 9, 9, 9, 9, 9], 1, 7, 7, decoding)
    request = RequestState(1, spec, 0.0, mask_id=9, num_pages=0)
    step = RequestStep(1, True, 0, 0.9, [1], [3], [0.9], hidden=(1.5, 2.5))
    assert isnan(request.hidden[0]) and isnan(request.hidden[1])
    request.apply(step)
    assert request.hidden == (1.5, 2.5)
    request.apply(RequestStep(1, False, 0, 0.9, [2], [3], [0.9]))
    assert request.hidden[0] == 0.5 and isnan(request.hidden[1]), "nothing is known of the next block's steps"
    request.apply(RequestStep(1, True, 1, 0.9, [3], [3], [0.9], hidden=(0.2, 0.4)))
    request.apply(RequestStep(1, False, 1, 0.9, [], [], []))
    assert request.hidden == (0.2, 0.0)


@pytest.mark.parametrize(
    ("hidden", "steps"),
    [
        ((nan, nan), [12.0, 6.0]),  # nothing read yet: three blocks as usual
        ((1.0, 2.0), [6.0, 3.0]),  # half of this block and one more
        ((2.0, nan), [12.0, 6.0]),  # at a block's start: this one and two more
        ((0.0, 0.1), [1.0, 1.0]),  # never less than one
    ],
)
def test_blocks_times_steps_per_block_alone(hidden: tuple[float, float], steps: list[float]) -> None:
    alone = HiddenStatePredictor(np.array([0.5, 0.9]), np.array([2.0, 4.0]), 3.0)
    row = Progress(1, 4, 9, 0, 9, 64, 32, 20, 55, (), hidden)
    assert alone.predict(features([row]), np.array([0.9, 0.5])).tolist() == [steps]
