"""The engine: requests join and leave between two steps, none changes another's result, pages come back."""

from collections.abc import Callable

import pytest
import torch

from dlmserve import LLM, DecodingParams
from dlmserve.messages import (
    Admit,
    Cancel,
    Decoding,
    Failure,
    Form,
    ModelSpec,
    Release,
    RequestStep,
    SetRefresh,
    SetThreshold,
)
from dlmserve.worker import engine as engine_module
from dlmserve.worker.build import build_engine
from dlmserve.worker.engine import Engine, StepResult
from dlmserve.worker.parallel import SOLO

MASK, EOS = 318, 301
PROMPTS = [[5, 9, 200, 31], [77] * 19, [3, 250, 8, 8, 90, 41, 17, 260, 111]]
CACHES = ("none", "prefix", "dual")


@pytest.fixture
def make_engine(golden_folder: Callable[[str], str]) -> Callable[..., Engine]:
    def make(num_pages: int = 64, page_size: int = 8) -> Engine:
        spec = ModelSpec(golden_folder("llada/model_A"), "auto", "float32", MASK, [EOS])
        form = Form("i", 0, 1, [], "", spec, 4096, 8, num_pages, page_size, 10.0)
        return build_engine(form, "cpu", SOLO)

    return make


def admit(
    request: int, prompt: list[int], suffix: tuple[int, ...] = (), masks: int = 16, **decoding: object
) -> Admit:
    options = {"block_length": 8, "ignore_eos": True, **decoding}
    start, end = len(prompt), len(prompt) + masks
    return Admit(request, [*prompt, *[MASK] * masks, *suffix], start, end, end, Decoding(**options))  # type: ignore[arg-type]


def run(engine: Engine, limit: int = 500) -> list[StepResult]:
    results = []
    while engine.has_work():
        results.append(engine.step())
        engine.check()
        assert len(results) < limit, "the engine does not come to an end"
    return results


def tokens_of(results: list[StepResult], request: int) -> dict[int, int]:
    """Column -> token; fails where a column is unmasked twice."""
    found: dict[int, int] = {}
    for step in steps_of(results, request):
        for position, token in zip(step.positions, step.tokens, strict=True):
            assert position not in found
            found[position] = token
    return found


def steps_of(results: list[StepResult], request: int) -> list[RequestStep]:
    return [step for result in results for step in result.requests if step.request == request]


def solo(make_engine: Callable[..., Engine], command: Admit) -> dict[int, int]:
    engine = make_engine()
    engine.apply(command)
    return tokens_of(run(engine), command.request)


@pytest.mark.parametrize("cache", CACHES)
def test_a_result_does_not_depend_on_the_batch(cache: str, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    commands = [admit(i, prompt, cache=cache, value=0.6) for i, prompt in enumerate(PROMPTS)]
    for command in commands:
        engine.apply(command)
    results = run(engine)
    for command in commands:
        assert tokens_of(results, command.request) == solo(make_engine, command)


def test_requests_join_between_two_steps_and_leave_when_done(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    long, late = admit(0, PROMPTS[0], masks=32), admit(1, PROMPTS[1], masks=8)
    engine.apply(long)
    results = [engine.step() for _ in range(3)]
    engine.apply(late)
    results += run(engine)
    assert tokens_of(results, 1) == solo(make_engine, late)
    assert tokens_of(results, 0) == solo(make_engine, long)
    last_of = {
        r: max(i for i, res in enumerate(results) if any(s.request == r for s in res.requests))
        for r in (0, 1)
    }
    assert last_of[1] < last_of[0], "the short request leaves as soon as it is done"
    mixed = [{s.recompute for s in result.requests} for result in results]
    assert {True, False} in mixed, "recompute and cache steps share a batch"


def test_pages_are_reserved_on_admission_and_come_back(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.apply(admit(0, PROMPTS[0]))  # 4 + 16 tokens: 3 pages of 8
    engine.apply(admit(1, PROMPTS[0], cache="none"))
    assert engine.num_pages_in_use == 3
    engine.step()
    engine.apply(Cancel(0))
    assert engine.num_pages_in_use == 0
    assert [s.request for s in engine.step().requests] == [1]
    run(engine)
    assert engine.num_pages_in_use == 0


def test_an_admission_beyond_the_pages_fails_alone(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_pages=4)
    engine.apply(admit(0, PROMPTS[0]))
    engine.apply(admit(1, PROMPTS[1]))
    result = engine.step()
    [failure] = result.failed
    assert (failure.request, failure.kind) == (1, "no_pages")
    assert "needs 5 KV pages but 1 of 4 are free" in failure.message
    assert [s.request for s in result.requests] == [0]


def test_scattered_pages_give_the_same_result(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_pages=9)
    for i in range(3):
        engine.apply(admit(i, PROMPTS[0]))
    engine.apply(Cancel(0))
    engine.apply(Cancel(2))  # free pages: 0 1 2 . . . 6 7 8
    wanted = admit(3, PROMPTS[1])  # 35 tokens: 5 pages
    engine.apply(wanted)
    assert tokens_of(run(engine), 3) == solo(make_engine, wanted)


def test_a_released_request_leaves_at_its_next_block_and_goes_on_elsewhere(
    make_engine: Callable[..., Engine],
) -> None:
    engine, command = make_engine(), admit(0, PROMPTS[0], cache="none")
    engine.apply(command)
    results = [engine.step()]
    engine.apply(Release(0))
    while engine.has_work():
        results.append(engine.step())
    assert results[-1].released == [0] and not results[-1].requests
    before = tokens_of(results, 0)
    assert sorted(before) == list(range(4, 12)), "exactly the first block"
    assert engine.num_pages_in_use == 0

    canvas = list(command.canvas)
    for position, token in before.items():
        canvas[position] = token
    other = make_engine()
    moved = Admit(0, canvas, 4, 20, 20, command.decoding, steps_done=len(results) - 1)
    other.apply(moved)
    assert {**before, **tokens_of(run(other), 0)} == solo(make_engine, command)


def test_a_request_recovered_inside_a_block_rebuilds_its_cache_first(
    make_engine: Callable[..., Engine],
) -> None:
    canvas = [*PROMPTS[0], 17, *[MASK] * 15]
    engine = make_engine()
    engine.apply(Admit(0, canvas, 4, 20, 20, Decoding(block_length=8, ignore_eos=True), 1, 1))
    results = run(engine)
    first = steps_of(results, 0)[0]
    assert first.recompute and first.block == 0 and results[0].num_tokens == 20
    assert sorted(tokens_of(results, 0)) == list(range(5, 20)), "the column it had is not unmasked again"


def test_a_new_threshold_takes_effect_at_the_next_step(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.apply(admit(0, PROMPTS[0], value=1.0))
    assert len(engine.step().requests[0].positions) == 1
    engine.apply(SetThreshold(0, 0.01))
    step = engine.step().requests[0]
    assert step.threshold == pytest.approx(0.01)
    assert len(step.positions) == 7, "the rest of the block at once"


def test_response_refresh_recomputes_the_prompt_only_at_each_kth_block(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    engine.apply(admit(0, PROMPTS[1], masks=32, refresh_blocks=2))
    sizes = {}
    while engine.has_work():
        result = engine.step()
        if result.requests[0].recompute:
            sizes[result.requests[0].block] = result.num_tokens
    assert sizes == {0: 51, 1: 32, 2: 51, 3: 32}


def test_response_refresh_can_be_switched_on_while_a_request_runs(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.apply(admit(0, PROMPTS[1], masks=32))
    sizes = {}
    while engine.has_work():
        result = engine.step()
        if result.requests[0].recompute:
            sizes[result.requests[0].block] = result.num_tokens
            if len(sizes) == 2:
                engine.apply(SetRefresh(0, 3))
    assert sizes == {0: 51, 1: 51, 2: 32, 3: 51}


def test_infilling_keeps_the_suffix_and_may_end_in_a_short_block(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.apply(admit(0, PROMPTS[0], suffix=(7, 8, 9), masks=11))
    results = run(engine)
    assert sorted(tokens_of(results, 0)) == list(range(4, 15))
    assert results[0].num_tokens == 4 + 11 + 3, "the suffix is seen"


def test_the_token_budget_of_a_step_delays_but_changes_nothing(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_STEP_TOKENS", 40)
    engine = make_engine()
    commands = [admit(i, prompt, cache="none") for i, prompt in enumerate(PROMPTS)]
    for command in commands:
        engine.apply(command)
    results = run(engine)
    assert max(result.num_tokens for result in results) <= 40
    gaps = [[i for i, r in enumerate(results) if any(s.request == c for s in r.requests)] for c in range(3)]
    assert all(b - a <= 3 for turns in gaps for a, b in zip(turns, turns[1:], strict=False)), "nobody starves"
    for command in commands:
        assert tokens_of(results, command.request) == solo(make_engine, command)


def test_not_finite_logits_end_one_request_and_no_other(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with torch.inference_mode():
        engine._model._embedding[66] = float("nan")
    healthy = admit(1, PROMPTS[0])
    engine.apply(admit(0, [1, 66, 2]))
    engine.apply(healthy)
    results = run(engine)
    [failure] = [failure for result in results for failure in result.failed]
    assert (failure.request, failure.kind) == (0, "not_finite")
    assert tokens_of(results, 1) == solo(make_engine, healthy)


def test_a_model_that_predicts_the_mask_token_still_ends(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    canvas = [*PROMPTS[0], *[MASK] * 16]
    with torch.inference_mode():
        favourite = engine.logits(canvas).argmax(-1)[-1]
        engine._model.head[MASK] = engine._model.head[favourite] * 3
    assert engine.logits(canvas).argmax(-1)[-1] == MASK
    for i, cache in enumerate(CACHES):
        engine.apply(admit(i, PROMPTS[i], cache=cache))
    results = run(engine)
    for i in range(3):
        assert MASK not in tokens_of(results, i).values()


def test_a_canvas_without_masks_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.apply(Admit(0, [1, 2, 3], 1, 3, 3, Decoding()))
    message = "request 0 has no masked position left; wanted at least one"
    assert engine.step().failed == [Failure(0, "refused", message)]
    assert not engine.has_work()


def test_the_first_eos_without_a_mask_before_it_ends_the_answer(tiny: LLM) -> None:
    params = DecodingParams(gen_length=128, block_length=32)
    (short,) = tiny.generate([tiny_prompt(tiny, "Work out: 2+3, 4+5")], params)
    assert short.finish_reason == "stop" and len(short.steps) < 32
    assert not set(short.token_ids) & set(tiny.info.eos_ids)
    (full,) = tiny.generate(
        [tiny_prompt(tiny, "Work out: 2+3, 4+5")],
        DecodingParams(gen_length=64, block_length=32, ignore_eos=True),
    )
    assert full.finish_reason == "length" and len(full.token_ids) == 64


def tiny_prompt(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode_chat([{"role": "user", "content": text}])


class TestSampling:
    """Draws depend on (seed, position, step, token id) alone."""

    def test_same_seed_same_text_in_any_batch(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        drawn = admit(1, PROMPTS[1], temperature=0.8, seed=7)
        greedy = admit(0, PROMPTS[0])
        for command in (greedy, drawn, admit(2, PROMPTS[2], temperature=1.5, seed=8)):
            engine.apply(command)
        results = run(engine)
        assert tokens_of(results, 1) == solo(make_engine, drawn)
        assert tokens_of(results, 0) == solo(make_engine, greedy), (
            "a greedy request beside sampled ones stays greedy"
        )

    def test_other_seed_other_text(self, make_engine: Callable[..., Engine]) -> None:
        texts = {
            tuple(solo(make_engine, admit(0, PROMPTS[0], temperature=1.0, seed=seed)).values())
            for seed in range(4)
        }
        assert len(texts) == 4

    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
    def test_the_narrowest_choice_is_greedy(self, narrow: dict, make_engine: Callable[..., Engine]) -> None:
        drawn = solo(make_engine, admit(0, PROMPTS[0], temperature=1.0, seed=3, **narrow))
        assert drawn == solo(make_engine, admit(0, PROMPTS[0]))

    def test_top_k_draws_from_the_k_best(self, make_engine: Callable[..., Engine]) -> None:
        engine = make_engine()
        engine.apply(admit(0, PROMPTS[0], temperature=2.0, seed=3, top_k=3, num_top=3))
        for step in steps_of(run(engine), 0):
            assert step.top is not None
            for token, entries in zip(step.tokens, step.top, strict=True):
                assert token in [i for i, _ in entries]

    def test_alternatives_are_the_best_and_carry_the_confidence(
        self, make_engine: Callable[..., Engine]
    ) -> None:
        engine = make_engine()
        engine.apply(admit(0, PROMPTS[0], num_top=4))
        steps = steps_of(run(engine), 0)
        assert [s.tokens for s in steps] == [s.tokens for s in steps_of(run_solo(make_engine), 0)]
        for step in steps:
            assert step.top is not None
            for token, confidence, entries in zip(step.tokens, step.confidences, step.top, strict=True):
                assert len(entries) == 4 and entries[0][0] == token
                assert entries[0][1] == pytest.approx(float(torch.tensor(confidence).log()), abs=1e-4)

    def test_tensor_parallel_ranks_draw_the_same(self, golden_llm: Callable[..., LLM]) -> None:
        params = DecodingParams(gen_length=16, block_length=8, temperature=0.8, seed=5, ignore_eos=True)
        narrow = DecodingParams(
            gen_length=8, block_length=8, temperature=1.0, top_p=0.8, seed=5, ignore_eos=True
        )
        for p in (params, narrow):
            one, two = (golden_llm("llada/model_A", degree).generate(PROMPTS, p) for degree in (1, 2))
            assert [c.token_ids for c in one] == [c.token_ids for c in two]


def run_solo(make_engine: Callable[..., Engine]) -> list[StepResult]:
    engine = make_engine()
    engine.apply(admit(0, PROMPTS[0]))
    return run(engine)
