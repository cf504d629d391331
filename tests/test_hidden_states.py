"""bench/hidden_states.py: what is read of an answer's end, which steps are whose, and the intervals."""

import numpy as np
import pytest
import torch

from bench.hidden_groups import answer_length, compare, end_read, groups_of
from bench.hidden_states import Recording, end_features, record
from dlmserve import LLM
from dlmserve.training.courses import Course, step_table


@pytest.fixture(scope="module")
def recording() -> Recording:
    llm = LLM("tiny", device="cpu")
    assert llm.tokenizer
    text = "Ben has 4 bags with 6 eggs each. Ben sells 7. How many eggs does Ben have now?"
    chats = [[{"role": "user", "content": each}] for each in (text, "Compute each: 8+3, 7+4, 5-3")]
    return record(llm, [llm.tokenizer.encode_chat(chat) for chat in chats], block_length=8)


def test_the_bench_pools_as_the_engine_does(recording: Recording) -> None:
    pairs = [
        (state.pooled, torch.from_numpy(pooled))
        for course, states in zip(recording.courses, recording.states, strict=True)
        for state, pooled in zip(states, course.pooled, strict=True)
    ]
    size = len(pairs[0][1]) // 2
    for ours, engine in pairs:
        both = torch.from_numpy(np.concatenate((ours[size : 2 * size], ours[:size])))
        torch.testing.assert_close(both, engine, rtol=1e-3, atol=1e-3)


def test_with_the_true_end_only_masks_of_the_answer_count(recording: Recording, tiny: LLM) -> None:
    features = end_features(recording, "true end", tiny.info)
    at = 0
    for course in recording.courses:
        length = course.spec.output_end - course.spec.output_start
        answer = answer_length(course, tiny.info.eos_ids)
        left = answer
        for step in course.steps:
            assert features[at] * length == pytest.approx([left, left])
            left -= sum(position < course.spec.output_start + answer for position in step.positions)
            at += 1
    assert at == len(features)


def test_an_end_beyond_the_block_is_read_only_from_the_whole_output(recording: Recording, tiny: LLM) -> None:
    in_block, whole = (end_features(recording, reads, tiny.info)[:, 0] for reads in ("end in block", "end"))
    assert (whole <= in_block).all()
    assert (whole < in_block).any()


def test_rows_are_grouped_by_where_their_answer_ends(recording: Recording, tiny: LLM) -> None:
    courses = recording.courses
    groups = groups_of(courses, step_table(courses, tiny.info), tiny.info.eos_ids)
    assert groups["on arrival"].sum() == len(courses)
    assert (groups["ends early"] ^ groups["fills most"] ^ groups["on arrival"]).all()
    at = 0
    for course in courses:
        rows = slice(at, at + len(course.steps))
        ends = [_has_end(course, i, tiny) for i in range(len(course.steps))]
        before = groups["ends early, no end token yet"][rows]
        assert not any(before[i] and any(ends[:i]) for i in range(len(before)))
        at = rows.stop


def _has_end(course: Course, i: int, tiny: LLM) -> bool:
    return not set(tiny.info.eos_ids).isdisjoint(course.steps[i].tokens)


def test_a_difference_of_every_prompt_is_certain_and_one_of_none_is_zero(
    recording: Recording, tiny: LLM
) -> None:
    table = step_table(recording.courses, tiny.info)
    exact = table.steps_left.astype(float)
    found = {"without": exact * 1.5, "same": exact * 1.5, "better": exact * 1.25}
    told = compare(table, found, {"all": np.ones(len(exact), dtype=bool)}, seed=0)["all"]
    assert told["without"]["error"] == pytest.approx(0.5)
    assert told["same"]["difference"] == pytest.approx([0.0, 0.0])
    assert told["better"]["difference"] == pytest.approx([-0.25, -0.25])


def test_the_end_is_read_at_the_first_likely_end_token(recording: Recording, tiny: LLM) -> None:
    courses = recording.courses
    answers = [answer_length(course, tiny.info.eos_ids) for course in courses]
    right = [np.arange(40) >= answer for answer in answers]
    assert end_read(courses, right, tiny.info.eos_ids) == {"error": 0.0, "exact": 1.0}
    late = [np.arange(41) > answer for answer in answers]
    assert end_read(courses, late, tiny.info.eos_ids)["error"] == pytest.approx(len(answers) / sum(answers))
