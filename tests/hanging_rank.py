"""A real rank process; that of device 0 hangs in its fifth step, in its first life only. Its heartbeats go on."""

import sys
import time

from dlmserve.messages import Form
from dlmserve.transport import Dealer
from dlmserve.worker import rank
from dlmserve.worker.step_loop import Engine, lead

HANGS_IN_STEP = 5


def lead_and_hang(form: Form, engine: Engine, head: Dealer) -> None:
    launch, num_steps = engine.launch, 0

    def launch_or_hang() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == HANGS_IN_STEP:
            time.sleep(3600)
        launch()

    engine.launch = launch_or_hang  # type: ignore[method-assign]
    lead(form, engine, head)


if __name__ == "__main__":
    if {"--index=0", "--generation=1"} <= set(sys.argv):
        rank.lead = lead_and_hang
    rank.main()
