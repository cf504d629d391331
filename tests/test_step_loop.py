"""The leader's loop against a fake engine and a fake head: the order in which things happen."""

from typing import Any

from dlmserve.messages import Admit, Decoding, Dissolve, Form, ModelSpec, StepReport
from dlmserve.worker.record import StepResult
from dlmserve.worker.step_loop import lead

FORM = Form("i", 0, 1, ["ipc:///nowhere"], "", ModelSpec("", "dummy", "auto", 0, []), 64, 4, 8, 8, 1.0)


class Story:
    """Engine and head in one: writes down what is asked of either; the engine has work for two steps."""

    num_pages, details, token_s, num_bytes_read = 8, "", 0.0, 0

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_steps_left = 0
        self.inbox: list[Any] = [Admit(1, [0], 0, 1, 1, Decoding())]

    def drain(self) -> list[Any]:
        return []

    def receive(self) -> Any:
        return self.inbox.pop() if self.inbox else Dissolve("i")

    def send(self, message: StepReport) -> None:
        self.log.append(f"report {message.seq} of {message.num_pages_in_use} pages")

    def apply(self, command: Admit) -> None:
        self.num_steps_left = 2

    @property
    def num_pages_in_use(self) -> int:
        return self.num_steps_left

    def has_work(self) -> bool:
        return self.num_steps_left > 0

    def launch(self) -> None:
        self.log.append("launch")

    def finish(self) -> "Story":
        self.log.append("finish")
        self.num_steps_left -= 1
        return self

    def result(self) -> StepResult:
        self.log.append("describe")
        return StepResult()

    def check(self) -> None:
        self.log.append("check")


def test_the_head_hears_of_a_step_while_the_next_one_runs_and_of_the_last_at_once() -> None:
    story = Story()
    lead(FORM, story, story)  # type: ignore[arg-type]
    assert story.log == [
        *("launch", "finish"),
        *("launch", "describe", "report 1 of 1 pages", "finish"),
        *("describe", "report 2 of 0 pages", "check"),
    ]
