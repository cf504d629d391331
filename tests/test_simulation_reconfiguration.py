"""Layout changes and node failures in the simulator: nobody is lost, and they take the time that is said."""

from dataclasses import replace

import pytest

from dlmserve.control.policy.events import Deliver, FormInstance
from dlmserve.control.policy.plan import Outcome, Plan, Problem
from dlmserve.simulate import make_config
from dlmserve.simulation.scenarios import NodeFailure, Scenario, get_scenario
from dlmserve.simulation.workloads import Job
from dlmserve.simulator import Simulator

SMALL = replace(
    get_scenario("gsm8k-4gpu"),
    num_requests=40,
    prompt=200,
    output=96,
    layout=(1, 1, 1, 1),
    nodes=(2, 2),
    rps=8.0,
    slo_s=20.0,
    plan_s=0.5,
    regroup_s=1.0,
)


class Watched(Simulator):
    """Notes when instances are formed and what is unmasked."""

    def __init__(self, scenario: Scenario, **settings) -> None:
        super().__init__(make_config(scenario, "dlmserve", **settings), scenario, 0, "average")
        self.formed: list[tuple[float, int]] = []
        self.unmasked: dict[int, list[int]] = {}

    def _perform(self, actions: list) -> None:
        for action in actions:
            if isinstance(action, FormInstance):
                self.formed.append((self.now, len(action.ranks)))
            elif isinstance(action, Deliver):
                positions = [each.position for each in action.update.unmasked]
                self.unmasked.setdefault(action.request, []).extend(positions)
        super()._perform(actions)

    def check_all_served(self) -> None:
        assert len(self.unmasked) == self._scenario.num_requests
        for positions in self.unmasked.values():
            assert sorted(positions) == list(range(200, 296)), "each token once"


def test_a_layout_changes_while_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Problem] = []

    def solve(problem: Problem, time_limit_s: float) -> Plan:
        asked.append(problem)
        outcome = Outcome(0.9, 1.0, {}, [], {}, {})
        return Plan("optimal", {2: 2}, {2: 2}, outcome, None)

    monkeypatch.setattr("dlmserve.simulator.solve", solve)
    simulator = Watched(SMALL, reconfigure_every_s=2.0, workload_window_s=2.0)
    result = simulator.run().result()
    assert result["reconfigurations"] == 1 and result["dropped"] == 0
    assert simulator._scheduler.cluster.layout == [2, 2]
    assert [degree for _, degree in simulator.formed] == [1] * 4 + [2] * 2
    at = [time for time, degree in simulator.formed if degree == 2]
    assert at[0] >= 2.0 + SMALL.plan_s, "a period, then the plan"
    assert at[1] - at[0] >= SMALL.regroup_s, "one at a time"
    assert asked[0].nodes == [2, 2] and asked[0].present == [1] * 4
    simulator.check_all_served()


def test_a_node_that_is_cut_off_costs_nobody_his_tokens() -> None:
    simulator = Watched(replace(SMALL, failures=(NodeFailure(1.0, 0, 2.0), NodeFailure(3.5, 1, 1.0))))
    result = simulator.run().result()
    assert result["dropped"] == 0
    assert [time for time, _ in simulator.formed] == [0.0] * 4 + [3.0, 3.0, 4.5, 4.5]
    assert simulator.ledger.num_migrations >= 0 and len(simulator._workers) == 4
    simulator.check_all_served()


def test_jobs_may_come_from_outside() -> None:
    scenario = replace(SMALL, num_requests=2)
    inside = Simulator(make_config(scenario, "infaas"), scenario, 0, "average")
    jobs = scenario.jobs(0)
    expected = inside.run().result()
    outside = Simulator(make_config(scenario, "infaas"), scenario, 0, "average", jobs=[])
    outside.start()
    for job in jobs:
        outside.advance(job.arrived_at)
        outside.submit(Job(*vars(job).values()))
    while outside.num_left:
        outside.advance(outside.now + 1.0)
    assert outside.finish().result() == expected
