"""The verifiable tasks and the example that trains the embedded model on them."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import tasks
from examples.train_tiny import tokenizer as tiny_tokenizer
from examples.train_tiny.batches import RESPONSE_LENGTHS, batches_of_step, mask_response
from examples.train_tiny.decode import Decoding, generate, unmask
from examples.train_tiny.model import LLaDA, make_config
from examples.train_tiny.tokenizer import BOS_ID, EOS_ID, MASK_ID
from examples.train_tiny.train import SHIPPED, Trainer

every_task = pytest.mark.parametrize("task", tasks.TASKS)


def draws(split: tasks.Split, task: str, num_problems: int) -> list[tasks.Problem]:
    rng = random.Random(f"{split}{task}")
    return [tasks.draw(rng, split, task) for _ in range(num_problems)]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer.load(SHIPPED)


@every_task
def test_train_and_test_never_share_a_problem(task: str) -> None:
    train, test = draws("train", task, 300), draws("test", task, 300)
    assert not {problem.key for problem in train} & {problem.key for problem in test}
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in test}


def test_about_one_key_in_eight_is_held_out() -> None:
    rng = random.Random(0)
    drawn = [tasks.split_of("sort_numbers", tasks.sort_numbers(rng).key) for _ in range(4000)]
    assert 0.1 < drawn.count("test") / len(drawn) < 0.15


@every_task
def test_a_scorer_accepts_its_own_answer_and_rejects_a_damaged_one(task: str) -> None:
    for problem in draws("test", task, 100):
        assert tasks.score(problem, problem.answer)
        assert tasks.score(problem, f" {problem.answer}\n")
        assert not tasks.score(problem, "")
        assert not tasks.score(problem, problem.answer[:-1])
        assert not tasks.score(problem, problem.answer + "1")


def test_a_number_is_scored_by_its_last_line_only() -> None:
    problem = tasks.Problem("word_problem", "", "3+4=7 books.\n#### 7", "3+4")
    assert tasks.score(problem, "First 3+4=7.\n#### 7")
    assert not tasks.score(problem, "3+4=7 books.\n#### 8")
    assert not tasks.score(problem, "3+4=7 books.")


def test_any_order_takes_every_order_of_the_same_words() -> None:
    problem = tasks.Problem("any_order", "", "sun moon star", "sun moon star")
    assert tasks.score(problem, "star sun moon")
    assert not tasks.score(problem, "star sun sun")
    assert not tasks.score(problem, "star sun")


def test_the_same_seed_gives_the_same_problems_and_another_seed_gives_others() -> None:
    assert tasks.problems("test", 30, 5) == tasks.problems("test", 30, 5)
    assert tasks.problems("test", 30, 5) != tasks.problems("test", 30, 6)
    assert [p.task for p in tasks.problems("test", len(tasks.TASKS), 5)] == tasks.TASKS


def test_answers_are_right_when_worked_out_by_other_means() -> None:
    for problem in draws("test", "sums", 50):
        questions = problem.prompt.partition(": ")[2].split(", ")
        assert problem.answer == ", ".join(f"{question}={eval(question)}" for question in questions)
    for problem in draws("test", "long_addition", 50):
        assert int(problem.answer.split("#### ")[1]) == eval(problem.key)
    for problem in draws("test", "sort_numbers", 50):
        numbers = [int(number) for number in problem.answer.split(", ")]
        assert numbers == sorted(numbers, reverse="largest" in problem.prompt)
    for problem in draws("test", "records", 50):
        given = problem.prompt.partition(": ")[2].split("; ")
        assert given == [" ".join(map(str, record.values())) for record in json.loads(problem.answer)]


@every_task
def test_every_problem_fits_the_model(task: str, tokenizer) -> None:
    for problem in draws("train", task, 200):
        answer = tokenizer.encode(problem.answer).ids
        assert len(answer) < max(RESPONSE_LENGTHS)
        assert len(tiny_tokenizer.encode_prompt(tokenizer, problem.prompt)) + max(RESPONSE_LENGTHS) <= 512
        assert tiny_tokenizer.decode_answer(tokenizer, [*answer, EOS_ID, EOS_ID]) == problem.answer


def test_the_chat_text_is_what_the_template_renders() -> None:
    messages = [{"role": "user", "content": " Work out: 1+2\n"}]
    template = jinja2.Template(tiny_tokenizer.CHAT_TEMPLATE)
    rendered = template.render(messages=messages, bos_token=tiny_tokenizer.BOS, add_generation_prompt=True)
    assert tiny_tokenizer.chat_text(" Work out: 1+2\n") == rendered


@given(
    seed=st.integers(0, 2**32),
    length=st.sampled_from([16, 32, 64, 128]),
    ratio=st.floats(0, 1),
    data=st.data(),
)
def test_a_response_is_never_without_a_masked_position(seed, length, ratio, data) -> None:
    num_answer = data.draw(st.integers(1, length - 1))
    masked = mask_response(random.Random(seed), length, num_answer, ratio)
    assert len(masked) == length
    assert any(masked[: num_answer + 1])


@pytest.fixture
def trainer(tokenizer) -> Trainer:
    torch.set_num_threads(1)
    cfg = make_config(tokenizer.get_vocab_size(), BOS_ID, EOS_ID, MASK_ID) | {"n_layers": 1}
    return Trainer(cfg, lr=1e-3, muon_lr=5e-3, seed=0)


def test_training_steps_lower_the_loss_on_a_fixed_batch(trainer: Trainer, tokenizer) -> None:
    batches = list(batches_of_step(tokenizer, seed=0, step=0, num_samples=8, rows=4))
    with ThreadPoolExecutor(2) as pool:
        losses = [trainer.update(batches, 1.0, pool) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_a_resumed_run_equals_an_uninterrupted_one(trainer: Trainer, tokenizer, tmp_path: Path) -> None:
    def step(a_trainer: Trainer) -> float:
        batches = list(batches_of_step(tokenizer, 0, a_trainer.step, num_samples=4, rows=4))
        return a_trainer.update(batches, 1.0, pool)

    with ThreadPoolExecutor(1) as pool:
        step(trainer)
        trainer.save(tmp_path / "state.pt")
        resumed = Trainer(trainer.model.cfg, lr=1e-3, muon_lr=5e-3, seed=1)
        resumed.load(tmp_path / "state.pt")
        assert step(resumed) == step(trainer)
        assert step(resumed) == step(trainer)


@settings(max_examples=5)
@given(threshold=st.sampled_from([0.0, 0.5, 1.0]), dual_cache=st.booleans())
def test_decoding_fills_every_position(threshold: float, dual_cache: bool) -> None:
    torch.manual_seed(0)
    model = LLaDA(make_config(1080, BOS_ID, EOS_ID, MASK_ID) | {"n_layers": 1})
    how = replace(Decoding(threshold, dual_cache=dual_cache), gen_length=16, block_length=8)
    ids, num_steps = generate(model, [[1, 7, 8], [1, 9]], how)
    assert all(len(row) == 16 and MASK_ID not in row for row in ids)
    wanted = 2 if threshold == 0.0 else 16 if threshold == 1.0 else None
    assert wanted is None or num_steps == [wanted, wanted]


def test_decoding_ends_where_the_model_prefers_the_mask_token() -> None:
    block = torch.full((2, 4), MASK_ID)
    logits = torch.zeros(2, 4, 16)
    logits[..., MASK_ID], logits[..., 7] = 20.0, 5.0
    assert unmask(block, logits, threshold=0.9).tolist() == [[7, 7, 7, 7]] * 2
