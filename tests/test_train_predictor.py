"""`train-predictor`: prompts to courses to tables, the command itself, and what the embedded model ships."""

import json
from pathlib import Path

import numpy as np
import pytest

from dlmserve import LLM
from dlmserve.cli import main
from dlmserve.config import ServerConfig
from dlmserve.control.policy.policies import make_policy
from dlmserve.control.policy.predictions import FEATURES, features
from dlmserve.control.predictor_files import TREES, choose_predictor
from dlmserve.errors import ConfigError
from dlmserve.training.courses import Course, run_courses, step_table
from dlmserve.training.prompts import encode_prompts, load_prompts

THRESHOLDS = (0.9, 0.5)


@pytest.fixture(scope="module")
def courses(tiny: LLM) -> list[Course]:
    chats, _ = load_prompts(None, tiny.info.path)
    assert tiny.tokenizer
    return run_courses(tiny, encode_prompts(chats[:11], tiny.tokenizer), THRESHOLDS, (64, 128), lambda: None)


def test_every_prompt_runs_at_every_threshold_with_its_length(courses: list[Course]) -> None:
    assert sorted((c.request, c.threshold) for c in courses) == [
        (n, g) for n in range(11) for g in (0.5, 0.9)
    ]
    assert all(c.spec.output_end - c.spec.output_start == (64, 128)[c.request % 2] for c in courses)
    assert all(c.steps[-1].finished == "stop" for c in courses)


def test_a_table_has_a_row_for_each_step(courses: list[Course], tiny: LLM) -> None:
    table = step_table(courses, tiny.info)
    assert table.steps_left.tolist() == [left for c in courses for left in range(len(c.steps), 0, -1)]
    assert table.requests.tolist() == [c.request for c in courses for _ in c.steps]
    assert table.steps_done.tolist() == [done for c in courses for done in range(len(c.steps))]


def test_confidences_are_those_of_every_position_computed_so_far(courses: list[Course], tiny: LLM) -> None:
    course = max(courses, key=lambda course: len(course.steps))
    row = step_table([course], tiny.info).features[1]
    first = course.steps[0]
    known = [*first.confidences, *first.masked_confidences]
    assert len(known) == 32, "a block's first step computes all of its positions"
    assert row[FEATURES.index("confidence_mean")] == pytest.approx(np.mean(known))
    assert row[FEATURES.index("confidence_min")] == pytest.approx(min(known))


def test_only_masks_before_the_first_end_token_count(courses: list[Course], tiny: LLM) -> None:
    seen = 0
    for course in courses:
        table, canvas, end = step_table([course], tiny.info), list(course.spec.canvas), course.spec.limit
        for step, row in zip(course.steps, table.features, strict=True):
            masks = canvas[course.spec.output_start : end].count(tiny.info.mask_id)
            assert row[FEATURES.index("masks_before_end")] * len(canvas[course.spec.output_start :]) == masks
            for position, token in zip(step.positions, step.tokens, strict=True):
                canvas[position] = token
                if token in tiny.info.eos_ids:
                    end, seen = min(end, position), seen + 1
    assert seen > 0


def test_the_command_prints_its_errors_and_leaves_a_predictor_that_a_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train-predictor", "--requests", "11", "--thresholds", "0.9,0.5", "--output", str(tmp_path / "p")]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "output length" in out and "32 tokens" in out
    config = ServerConfig(
        policy="dlmserve", step_predictor=str(tmp_path / "p"), step_predictor_kind="catboost"
    )
    predictor = choose_predictor(config, make_policy(config), "").load()
    assert predictor and predictor.predict(features([]), np.array([0.9])).shape == (0, 1)


def test_the_embedded_model_has_a_predictor_that_meets_its_bars(tiny: LLM, courses: list[Course]) -> None:
    config = ServerConfig(policy="dlmserve")
    choice = choose_predictor(config, make_policy(config), tiny.info.path)
    assert (choice.kind, choice.folder) == ("catboost+hidden", Path(tiny.info.path) / "step_predictor")
    assert choice.load()
    errors = json.loads((choice.folder / "errors.json").read_text())["by_features"]
    with_all = errors["all"]["after_step"]
    assert with_all < 0.25
    assert with_all < 0.5 * errors["output length"]["after_step"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--requests", "9999"], "--requests is 9999; wanted 10 to 440, as many as there are in"),
        (["--requests", "3"], "--requests is 3; wanted 10"),
        (["--prompts", "/nowhere.jsonl"], "prompts file /nowhere.jsonl cannot be read"),
    ],
)
def test_wrong_use_is_one_clear_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train-predictor", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"dlmserve: error: {said}")


def test_prompts_may_be_texts_or_chats(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    file.write_text(f'{{"prompt": "hello"}}\n\n{json.dumps({"messages": chat})}\n')
    assert load_prompts(str(file), "")[0] == [[{"role": "user", "content": "hello"}], chat]


@pytest.mark.parametrize("line", ["no json", "[]", '{"text": "a"}', '{"prompt": 3}', '{"messages": [{}]}'])
def test_a_bad_line_of_a_prompts_file_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "good"}\n' + line)
    with pytest.raises(ConfigError, match=r"prompts.jsonl:2 is .*wanted an object with 'prompt'"):
        load_prompts(str(file), "")


def test_a_model_without_prompts_gets_varied_ones(tmp_path: Path) -> None:
    chats, source = load_prompts(None, str(tmp_path))
    texts = [chat[0]["content"] for chat in chats]
    assert len(set(texts)) == len(texts) == 140
    assert TREES not in source
