"""Recorded requests in the simulator: the same steps as on the real engine, and a sensible course in between."""

from bench.live_vs_sim import THRESHOLD, play, record
from bench.slo import half_rate
from dlmserve import LLM, DecodingParams
from dlmserve.simulation.recorded import RecordedStep, RecordedUnmasking, Recording
from dlmserve.simulation.workloads import Job

PROMPTS = ["Start at 7 and count by 5. Give 6 numbers.", "Write as a JSON list: Anna Oslo baker", "3+4"]
PROFILE = {"source": "test", "step_s": {"1": [[1, 1, 0.01], [1000, 1, 0.01]]}}


def test_a_recorded_request_takes_the_steps_that_it_took(tiny: LLM) -> None:
    jobs, courses = record(PROMPTS)
    ledger = play([0.0, 10.0, 20.0], jobs, courses, PROFILE, head_s=0.001)
    assert tiny.tokenizer
    for prompt, job, course in zip(PROMPTS, jobs, courses, strict=True):
        ids = tiny.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        out = tiny.generate([ids], DecodingParams(gen_length=128, block_length=32, threshold=THRESHOLD))[0]
        assert job.prompt == len(ids)
        assert len(course[THRESHOLD]) == len(out.steps)
    simulated_steps = [round((each.latency_s or 0.0) / 0.01) for each in ledger.outcomes]
    assert simulated_steps == [len(course[THRESHOLD]) for course in courses]


def test_a_changed_threshold_goes_on_in_its_own_course() -> None:
    slow = [RecordedStep(0, (i,), (0.95,)) for i in range(4)]
    fast = [RecordedStep(0, (0, 1), (0.6, 0.6)), RecordedStep(0, (2, 3), (0.6, 0.6))]
    unmasking = RecordedUnmasking(Recording([Job(0.0, 1, 4, 4)], [{0.9: slow, 0.5: fast}]))
    block = unmasking.begin_block(0, 0, 0b1111, 0.88)
    assert block.step()[0] == [0]
    block.set_threshold(0.5)
    assert block.step()[0] == [1], "position 0 is unmasked already"
    assert block.step() == ([2, 3], [0.6, 0.6])
    assert not block.masked


def test_past_its_courses_end_a_request_still_ends() -> None:
    unmasking = RecordedUnmasking(
        Recording([Job(0.0, 1, 8, 8)], [{0.9: [RecordedStep(0, (0, 1), (1.0, 1.0))]}])
    )
    assert unmasking.begin_block(0, 1, 0b11, 0.9).step() == ([0, 1], [1.0, 1.0])


def test_the_rate_of_half_attainment_is_between_the_measured_ones() -> None:
    results = [{"rps": rps, "attainment": met} for rps, met in ((10.0, 1.0), (20.0, 0.8), (30.0, 0.2))]
    assert half_rate(results) == 25.0
    assert half_rate(results[:2]) is None
