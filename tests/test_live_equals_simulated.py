"""The same script through the live head (real sockets, a fake node) and through the simulator: same placements."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dlmserve.config import ServerConfig
from dlmserve.control.loop import Head
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.events import Finish
from dlmserve.simulation.recorded import RecordedStep, Recording
from dlmserve.simulation.scenarios import get_scenario
from dlmserve.simulation.workloads import Job
from dlmserve.simulator import Simulator
from tests.fake_node import STEP_TIMES
from tests.test_head import Client, fake_node, serve, spec

__all__ = ["fake_node"]  # a fixture of test_head, for the tests here too

PROMPT = 4
THRESHOLD = 0.9
PROFILE = {"source": "the fake node", "step_s": {"1": STEP_TIMES}}
# Output lengths, in the order of arrival. Each step unmasks one token of every resident, so lengths are times:
# no two requests end within 15 steps of each other, and who comes next does not hang on a message's way.
OUTPUTS = (290, 185, 20, 83, 246, 250, 199, 176, 296, 224)


def settings(policy: str) -> dict:
    return {"tp_layout": (1, 1), "max_num_seqs": 2, "policy": policy, "max_resident_tokens": 100_000}


def placed_live(policy: str, run_dir: Path) -> list[list[str]]:
    """The instances of each request."""
    placed: list[list[str]] = []

    async def story(head: Head) -> None:
        while len(head._scheduler.cluster.serving()) < 2:
            await asyncio.sleep(0)
        clients = [Client() for _ in OUTPUTS]
        for client, output in zip(clients, OUTPUTS, strict=True):
            head.submit(spec(output), client)
        for client in clients:
            placed.append((await client.end)[1].instances)

    serve(run_dir, story, **settings(policy))
    return placed


def placed_simulated(policy: str) -> tuple[list[list[str]], list[float]]:
    """The instances of each request, and when each ended, in steps."""
    jobs = [Job(0.0, PROMPT, output, output) for output in OUTPUTS]
    one_by_one = [RecordedStep(i // 32, (i % 32,), (1.0,)) for i in range(max(OUTPUTS))]
    recording = Recording(jobs, [{THRESHOLD: one_by_one} for _ in jobs])
    scenario = replace(get_scenario("gsm8k-4gpu"), layout=(1, 1), overhead_s=0.0)
    config = ServerConfig(**settings(policy))
    ended: dict[int, tuple[list[str], float]] = {}
    simulator = Simulator(
        config,
        scenario,
        0,
        "average",
        make_costs=lambda: CostModel.from_profile(PROFILE),
        recording=recording,
    )
    perform = simulator._perform

    def watch(actions: list) -> None:
        for action in actions:
            if isinstance(action, Finish):
                ended[action.request] = (action.summary.instances, simulator.now / 0.01)
        perform(actions)

    simulator._perform = watch
    simulator.run()
    return [ended[i][0] for i in range(len(jobs))], [ended[i][1] for i in range(len(jobs))]


@pytest.mark.parametrize("policy", ["infaas", "tediserve"])
def test_a_script_is_placed_the_same_way_live_and_simulated(policy: str, tmp_path: Path) -> None:
    simulated, ends = placed_simulated(policy)
    gaps = [later - sooner for sooner, later in zip(sorted(ends), sorted(ends)[1:], strict=False)]
    assert min(gaps) > 15, "the script leaves no room for messages on their way"
    assert placed_live(policy, tmp_path) == simulated
    assert {instance for placed in simulated for instance in placed} == {"i0.1", "i1.1"}
