"""Stories about what the policies decide: literal events, and what instances are told because of them."""

import itertools

import numpy as np
import pytest

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cost_model import CostModel
from dlmserve.control.policy.events import Fail, Finish, Predict, Predicted, Send, Tick
from dlmserve.control.policy.llumnix import _fastest
from dlmserve.control.policy.outlook import Outlook
from dlmserve.control.policy.policies import POLICIES, make_policy
from dlmserve.control.policy.proteus import best_mix
from dlmserve.control.policy.rebalance import Balance
from dlmserve.errors import ConfigError, Unavailable
from dlmserve.flags import POLICY_NAMES
from dlmserve.messages import Admit, Command, Decoding, Release, SetRefresh, SetThreshold
from tests.story import BLOCK, Story, make_admit, make_spec, make_step

# A machine on which a token costs 10 ms, and an empty step nothing.
LINEAR = {"source": "test", "step_s": {"1": [[1, 1, 0.01], [1000, 1, 10.0]]}}


def make_story(policy: str, **settings) -> Story:
    # Where nothing but tokens costs time, the most efficient batch is the smallest one.
    options = ({"efficient_batch": 0.0} if policy == "dlmserve" else {}) | settings.pop("options", {})
    num_pages = settings.pop("num_pages", 64)
    story = Story(CostModel.from_profile(LINEAR), policy=policy, policy_options=options, **settings)
    story.serve(num_pages)
    return story


def sent(actions: list, *kinds: type) -> list[tuple[str, Command]]:
    return [(a.instance, a.command) for a in actions if isinstance(a, Send) and isinstance(a.command, kinds)]


def homes(story: Story) -> dict[int, str | None]:
    return {number: request.instance for number, request in story.scheduler.requests.items()}


def test_dlmserve_takes_the_emptiest_of_instances_whose_steps_take_the_same() -> None:
    flat = {"source": "test", "step_s": {"1": [[1, 1, 0.01], [1000, 1, 0.01]]}}
    story = Story(CostModel.from_profile(flat), policy="dlmserve", tp_layout=(1, 1, 1))
    story.serve(64)
    for request in range(1, 7):
        story.arrive(0.0, request, make_spec())
    assert sorted(homes(story).values()) == ["i0.1", "i0.1", "i1.1", "i1.1", "i2.1", "i2.1"]


def test_a_batch_is_efficient_or_its_steps_short_for_the_slos() -> None:
    """Where nothing but tokens costs time, one request at a time is efficient; short steps let more in."""
    for slo_s, num_resident in ((None, 1), (4.0, 1), (4000.0, 8)):
        story = make_story("dlmserve", options={"efficient_batch": 1.0}, max_num_seqs=8)
        # Answers of many steps: no turn-around.
        story.scheduler.steering.view.history.observe_finish(1.0, 1000)
        for request in range(1, 11):
            story.arrive(0.0, request, make_spec(slo_s=slo_s))
        assert list(homes(story).values()).count("i0.1") == num_resident


# ---- moves


def test_the_fastest_instance_is_the_emptiest_of_its_degree() -> None:
    story = Story(CostModel.from_preset("h100-measured"), policy="llumnix", tp_layout=(1, 2, 1, 2, 4))
    story.serve()
    view, rng = story.scheduler.steering.view, np.random.default_rng(0)
    serving = view.cluster.serving()
    for _ in range(50):
        tokens = rng.integers(0, 9000, 5).astype(float).tolist()
        step_s = [view.costs.step_s(i.tp_degree, tokens[i.slot.index]) for i in serving]
        instance, shortest_s = _fastest(view, serving, tokens)
        assert shortest_s == step_s[instance.slot.index] == min(step_s)


def test_what_if_nothing_is_refreshed_is_the_same_asked_at_once_and_afterwards() -> None:
    story = make_story("dlmserve")
    for request, num_blocks in enumerate((1, 2, 4, 8)):
        story.arrive(0.0, request, make_spec(num_blocks=num_blocks))
    view = story.scheduler.steering.view
    usual, relaxed = (Outlook(view, view.work.rows(), refresh_blocks=blocks) for blocks in (None, 8.0))
    assert (usual.tokens > relaxed.tokens).any()
    assert (usual.with_refresh(8.0).tokens == relaxed.tokens).all()
    assert (usual.tokens > relaxed.tokens).any(), "the first one is as it was"


def test_llumnix_moves_a_resident_to_the_emptier_instance_at_its_next_block_start() -> None:
    story, spec = make_story("llumnix", tp_layout=(1, 1)), make_spec(num_blocks=2)
    for request in (1, 2, 3):
        story.arrive(0.0, request, spec)
    assert homes(story) == {1: "i0.1", 2: "i1.1", 3: "i0.1"}
    story.report(0.1, "i1.1", 0, make_step(2, {4: 7}, finished="stop"))
    asked = story.report(0.2, "i0.1", 0, make_step(1, {4: 5, 5: 6, 6: 7}), make_step(3, {4: 5}))
    assert sent(asked, Release) == [("i0.1", Release(1))]
    again = story.report(0.3, "i0.1", 1, make_step(1, {7: 8}), make_step(3, {5: 5}))
    assert sent(again, Release) == [], "asked once"
    canvas = [1, 2, 3, 4, 5, 6, 7, 8, *spec.canvas[8:]]
    moved = story.report(0.4, "i0.1", 2, make_step(3, {6: 5}), released=[1])
    assert sent(moved, Admit) == [("i1.1", make_admit(1, spec, canvas, steps_done=2, steps_in_block=0))]
    assert story.scheduler.num_migrations == 1


def test_a_move_whose_target_has_filled_up_goes_through_the_queue() -> None:
    story, spec = make_story("llumnix", tp_layout=(1, 1), max_num_seqs=2), make_spec(num_blocks=2)
    for request in (1, 2, 3):
        story.arrive(0.0, request, spec)
    story.report(0.1, "i1.1", 0, make_step(2, {4: 7}, finished="stop"))
    story.report(0.2, "i0.1", 0, make_step(1, {4: 5, 5: 6, 6: 7}), make_step(3, {4: 5}))
    for request in (4, 5):
        story.arrive(0.3, request, spec)
    back = story.report(0.4, "i0.1", 1, make_step(3, {6: 5}), released=[1])
    assert [instance for instance, _ in sent(back, Admit)] == ["i0.1"]
    assert story.scheduler.num_migrations == 0


def test_nobody_moves_in_its_last_block_or_under_infaas() -> None:
    for policy, num_blocks in (("llumnix", 1), ("infaas", 2)):
        story, spec = make_story(policy, tp_layout=(1, 1)), make_spec(num_blocks=num_blocks)
        for request in (1, 2, 3):
            story.arrive(0.0, request, spec)
        story.report(0.1, "i1.1", 0, make_step(2, {4: 7}, finished="stop"))
        asked = story.report(0.2, "i0.1", 0, make_step(1, {4: 5, 5: 6, 6: 7}), make_step(3, {4: 5}))
        assert sent(asked, Release) == []


def test_the_look_ahead_moves_what_will_stay_long_not_what_ends_soon() -> None:
    slots, tokens = np.array([0, 0, 0]), np.array([10.0, 10.0, 10.0])
    steps = np.array([90.0, 4.0, 60.0])
    balance = Balance(slots, tokens, steps, np.array([0.01, 0.01]))
    assert balance.overloaded(1).tolist() == [True, False]
    gains = balance.gains(np.array([0, 1, 2]), np.array([0, 0, 0]), np.array([1]))[:, 0]
    assert gains[1] < gains[2] and gains[1] < gains[0], "moving the short one would help for four steps"
    before = balance.imbalance
    balance.move(2, 0, 1)
    assert balance.imbalance == pytest.approx(before - gains[2])


def test_star_moves_a_resident_of_the_overloaded_instance_once() -> None:
    story = make_story("star", tp_layout=(1, 1))
    for request in (1, 2, 3, 4):
        story.arrive(0.0, request, make_spec(num_blocks=8))
    for seq, request in enumerate((2, 4)):
        story.report(0.1, "i1.1", seq, make_step(request, {4: 7}, finished="stop"))
    steps = [make_step(request, {4: 5, 5: 5}) for request in (1, 3)]
    assert sent(story.report(1.0, "i0.1", 0, *steps), Release) == [], "not on the way of a step's tokens"
    assert sent(story.at(1.0, Tick()), Release) == [("i0.1", Release(1))]
    story.report(2.0, "i0.1", 1, make_step(3, {6: 5}))
    assert sent(story.at(2.0, Tick()), Release) == []


# ---- thresholds


@pytest.mark.parametrize("policy", ["tediserve", "dlmserve"])
def test_thresholds_stay_high_without_load_and_fall_with_it(policy: str) -> None:
    story = make_story(policy, max_num_seqs=64)
    [(_, first)] = sent(story.arrive(0.0, 1, make_spec(num_blocks=8, slo_s=10.0)), Admit)
    assert first.decoding.value == 0.9
    told = []
    for request in range(2, 40):
        told += story.arrive(0.2 * request, request, make_spec(num_blocks=8, slo_s=10.0))
    lowered = [command.threshold for _, command in sent(told, SetThreshold)]
    assert lowered and min(lowered) == 0.5


def test_load_control_is_not_on_the_way_of_a_steps_tokens() -> None:
    story = make_story("tediserve", options={"alg1": 0}, max_num_seqs=64)
    for request in range(1, 30):
        story.arrive(0.0, request, make_spec(8, slo_s=10.0))
    told = story.report(5.0, "i0.1", 0, make_step(1, {4: 7}))
    assert sent(told, SetThreshold) == []
    assert sent(story.at(5.0, Tick()), SetThreshold) != []


@pytest.mark.parametrize("policy", ["tediserve", "dlmserve"])
def test_a_threshold_is_sent_only_when_it_changes(policy: str) -> None:
    story = make_story(policy, max_num_seqs=64)
    last: dict[int, float] = {}
    for request in range(1, 30):
        for _, command in sent(
            story.arrive(0.2 * request, request, make_spec(8, slo_s=10.0)), Admit, SetThreshold
        ):
            value = command.decoding.value if isinstance(command, Admit) else command.threshold
            assert last.get(command.request) != value
            last[command.request] = value


@pytest.mark.parametrize("policy", ["tediserve", "dlmserve"])
def test_what_the_client_fixed_or_bounded_is_left_alone(policy: str) -> None:
    story = make_story(policy, max_num_seqs=64)
    fixed = make_spec(8, slo_s=0.5, pinned=True, decoding=Decoding(block_length=BLOCK, value=0.85))
    bounded = make_spec(8, slo_s=0.5, min_threshold=0.75)
    told = story.arrive(0.0, 1, fixed) + story.arrive(0.0, 2, bounded)
    for request in range(3, 20):
        told += story.arrive(0.2 * request, request, make_spec(8, slo_s=10.0))
    for _, command in sent(told, SetThreshold):
        assert command.request != 1 and (command.request != 2 or command.threshold >= 0.75)
    assert story.scheduler.requests[1].threshold == 0.85
    assert story.scheduler.requests[2].threshold == 0.8, "the lowest candidate above its bound"


def test_with_both_algorithms_off_the_threshold_is_fixed() -> None:
    story = make_story("tediserve", options={"alg1": 0, "alg2": 0}, max_num_seqs=64)
    told = [a for r in range(1, 30) for a in story.arrive(0.2 * r, r, make_spec(8, slo_s=1.0))]
    assert sent(told, SetThreshold) == []


def test_requests_without_an_slo_are_not_degraded() -> None:
    story = make_story("dlmserve", max_num_seqs=64)
    told = [a for r in range(1, 40) for a in story.arrive(0.2 * r, r, make_spec(8))]
    assert sent(told, SetThreshold, SetRefresh) == []
    assert {command.decoding.value for _, command in sent(told, Admit)} == {0.9}


def test_the_summary_says_which_cap_was_in_force() -> None:
    story = make_story("tediserve")
    story.arrive(0.0, 1, make_spec(slo_s=10.0))
    done = story.report(0.5, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
    [end] = [action for action in done if isinstance(action, Finish)]
    assert end.summary.threshold_cap == 0.9
    fixed = make_story("infaas")
    fixed.arrive(0.0, 1, make_spec(slo_s=10.0))
    [end] = fixed.report(0.5, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))[1:]
    assert end.summary.threshold_cap is None


def test_under_load_dlmserve_recomputes_the_response_only() -> None:
    story = make_story("dlmserve", max_num_seqs=64)
    prompt = [1] * 32
    spec = make_spec(8, slo_s=10.0)
    long = type(spec)("r", prompt + spec.canvas[4:], 32, 64, 64, spec.decoding, slo_s=10.0)
    told = [a for r in range(1, 30) for a in story.arrive(0.2 * r, r, long)]
    assert {command.refresh_blocks for _, command in sent(told, SetRefresh)} == {8}
    off = make_story("dlmserve", options={"refresh": 0}, max_num_seqs=64)
    told = [a for r in range(1, 30) for a in off.arrive(0.2 * r, r, long)]
    assert sent(told, SetRefresh) == []


# ---- the queue


def test_dlmserve_serves_the_least_slack_first_and_the_paper_the_first_arrival() -> None:
    for policy, first in (("dlmserve", 3), ("tediserve", 2)):
        story = make_story(policy, max_num_seqs=1)
        story.arrive(0.0, 1, make_spec(slo_s=50.0))
        story.arrive(0.1, 2, make_spec(slo_s=50.0))
        story.arrive(0.2, 3, make_spec(slo_s=20.0))
        done = story.report(0.3, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
        assert [command.request for _, command in sent(done, Admit)] == [first]


def test_who_arrives_between_two_orderings_of_the_line_waits_for_the_next() -> None:
    """Half a second passes between them, with SLOs that long."""
    for finished_at, first in ((0.3, 2), (0.7, 3)):
        story = make_story("dlmserve", num_pages=3)
        story.arrive(0.0, 1, make_spec(slo_s=50.0))
        story.arrive(0.1, 2, make_spec(slo_s=50.0))
        story.arrive(0.12, 3, make_spec(slo_s=20.0))
        done = story.report(finished_at, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
        assert [command.request for _, command in sent(done, Admit)] == [first]


def test_who_would_be_late_by_how_long_requests_stay_here_is_served_last() -> None:
    """Steps of some 50 ms by the profile; answers that take one step, and a second."""
    story, seqs = make_story("dlmserve", max_num_seqs=1), itertools.count()

    def finish(now: float, request: int) -> list[int]:
        done = story.report(now, "i0.1", next(seqs), make_step(request, {4: 7}, finished="stop"))
        return [command.request for _, command in sent(done, Admit)]

    def first_of_tight_and_loose(now: float, number: int) -> int:
        story.arrive(now, number, make_spec(slo_s=100.0))
        story.arrive(now + 0.1, number + 1, make_spec(slo_s=0.6))
        story.arrive(now + 0.1, number + 2, make_spec(slo_s=100.0))
        [first] = finish(now + 0.3, number)
        [second] = finish(now + 0.4, first)
        assert finish(now + 0.5, second) == []
        return first - number

    assert first_of_tight_and_loose(0.0, 1) == 1
    for number in range(10, 50):
        story.arrive(float(number), number, make_spec(slo_s=100.0))
        finish(number + 1.0, number)
    assert first_of_tight_and_loose(100.0, 101) == 2


def test_predictions_from_the_history_are_made_in_one_batch_with_load_control() -> None:
    story = make_story("tediserve")
    work = story.scheduler.steering.view.work
    for request in (1, 2):
        story.arrive(0.0, request, make_spec(num_blocks=8))
    for seq in range(3):  # one token a step: three times slower than usual
        tokens = {4 + seq: 7}
        story.report(1.0, "i0.1", seq, *(make_step(request, tokens) for request in (1, 2)))
    counted_down = work.rows().steps_left()[:, 0].tolist()
    for seq in range(3, 8):
        steps = (make_step(r, {4 + seq: 7}, block=seq // BLOCK) for r in (1, 2))
        story.report(1.0, "i0.1", seq, *steps)
    story.at(2.0, Tick())
    assert all(new > old - 5 for new, old in zip(work.rows().steps_left()[:, 0], counted_down, strict=True))


def test_who_is_too_late_is_dropped_by_the_paper_and_served_last_by_dlmserve() -> None:
    paper, ours = (make_story(policy, max_num_seqs=1) for policy in ("tediserve", "dlmserve"))
    for story in (paper, ours):
        story.arrive(0.0, 1, make_spec(slo_s=50.0))
        story.arrive(0.1, 2, make_spec(slo_s=1.0))
        story.arrive(0.2, 3, make_spec(slo_s=50.0))
    [fail] = [action for action in paper.at(2.0, Tick()) if isinstance(action, Fail)]
    assert fail.request == 2 and isinstance(fail.error, Unavailable) and "SLO of 1 s" in str(fail.error)
    assert [action for action in ours.at(2.0, Tick()) if isinstance(action, Fail)] == []
    done = ours.report(2.1, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
    assert [command.request for _, command in sent(done, Admit)] == [3]


def test_the_papers_limit_of_resident_tokens_holds_but_for_an_empty_instance() -> None:
    story = make_story("infaas", max_resident_tokens=20)
    assert len(sent(story.arrive(0.0, 1, make_spec(num_blocks=6)), Admit)) == 1
    assert sent(story.arrive(0.1, 2, make_spec()), Admit) == []
    done = story.report(0.2, "i0.1", 0, make_step(1, {4: 7}, finished="stop"))
    assert len(sent(done, Admit)) == 1


# ---- predictions


def test_predictions_are_asked_for_on_arrival_and_after_eight_more_tokens() -> None:
    story = Story(CostModel.from_profile(LINEAR), True, policy="tediserve")
    story.serve()
    asked = [a for a in story.arrive(0.0, 1, make_spec(num_blocks=4)) if isinstance(a, Predict)]
    assert [(p.request, p.steps) for p in asked[0].progress] == [(1, 0)]
    told = []
    for seq in range(5):
        tokens = {4 + 2 * seq + i: 7 for i in range(2)}
        now = 0.2 * (seq + 1)
        told.append(story.report(now, "i0.1", seq, make_step(1, tokens, block=seq // 2)))
        told.append(story.at(now + 0.1, Tick()))
    asked = [(i, a) for i, actions in enumerate(told) for a in actions if isinstance(a, Predict)]
    assert [i for i, _ in asked] == [2 * 3 + 1], "by the tick after the fourth report"
    assert asked[0][1].progress[0].confidences.tolist() == [0.5] * 8


@pytest.mark.parametrize(
    ("policy", "slo_s", "round_s"),
    [
        ("dlmserve", 1.0, 0.1),
        ("dlmserve", 10.0, 0.2),
        ("dlmserve", 100.0, 0.5),
        ("dlmserve", None, 0.5),
        ("tediserve", 10.0, 0.1),
    ],
)
def test_what_comes_due_within_a_round_is_asked_for_at_once(
    policy: str, slo_s: float | None, round_s: float
) -> None:
    """A round of `dlmserve` takes 2% of the shortest SLO, within bounds."""
    story = Story(CostModel.from_profile(LINEAR), True, policy=policy)
    story.serve()
    spec = make_spec(num_blocks=1, slo_s=slo_s)
    told = [a for i in range(4) for a in story.arrive(0.02 * i, i, spec)]
    told += story.at(round_s - 0.01, Tick()) + story.at(round_s + 0.01, Tick())
    asked = [[p.request for p in action.progress] for action in told if isinstance(action, Predict)]
    assert asked == [[0], [1, 2, 3]]
    assert story.at(2 * round_s, Tick()) == []


def test_a_prediction_counts_from_the_step_it_was_made_at_and_late_ones_are_ignored() -> None:
    story = Story(CostModel.from_profile(LINEAR), True, policy="tediserve")
    story.serve()
    [ask] = [a for a in story.arrive(0.0, 1, make_spec(num_blocks=4)) if isinstance(a, Predict)]
    story.report(0.1, "i0.1", 0, make_step(1, {4: 7}))
    story.at(0.2, Predicted(ask.progress, np.array([[10.0, 9.0, 8.0, 7.0, 6.0]])))
    rows = story.scheduler.steering.view.work.rows()
    assert rows.steps_left().tolist() == [[9.0, 8.0, 7.0, 6.0, 5.0]], "one step has been made since"
    story.report(0.3, "i0.1", 1, make_step(1, {5: 7}, finished="stop"))
    assert story.scheduler.steering.errors.ratio == pytest.approx(8 / 2)
    assert story.at(0.4, Predicted(ask.progress, np.array([[10.0, 9.0, 8.0, 7.0, 6.0]]))) == []


# ---- proteus, and the list of policies


def test_proteus_mixes_the_two_best_thresholds_that_the_supply_pays() -> None:
    accuracy, work = np.array([80.0, 78.0, 60.0]), np.array([10.0, 6.0, 4.0])
    assert best_mix(accuracy, work, 12.0).tolist() == [1, 0, 0]
    assert best_mix(accuracy, work, 8.0).tolist() == [0.5, 0.5, 0]
    assert best_mix(accuracy, work, 5.0).tolist() == [0, 0.5, 0.5]
    assert best_mix(accuracy, work, 3.0).tolist() == [0, 0, 1]


def test_proteus_gives_arrivals_the_mix_and_each_keeps_its_threshold() -> None:
    story = make_story("proteus", max_num_seqs=200, num_pages=2000)
    told = [a for r in range(1, 50) for a in story.arrive(2.0 * r, r, make_spec(1, slo_s=1000.0))]
    assert {command.decoding.value for _, command in sent(told, Admit)} == {0.8}, "the most accurate one"
    told = [a for r in range(50, 150) for a in story.arrive(100.0 + 0.4 * r, r, make_spec(8))]
    values = [command.decoding.value for _, command in sent(told, Admit)]
    assert set(values) == {0.5, 0.8} and values[-1] == 0.5 and sent(told, SetThreshold) == []


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_an_unknown_option_is_refused_by_name(policy: str) -> None:
    with pytest.raises(ConfigError, match="'drop_lite'"):
        make_policy(ServerConfig(policy=policy, policy_options={"drop_lite": 1.0}))


def test_help_names_all_policies() -> None:
    assert POLICY_NAMES.split("|") == list(POLICIES)
