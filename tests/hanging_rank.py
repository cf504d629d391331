"""A real rank process; that of device 0 hangs in its fifth step, in its first life only. Its heartbeats go on."""

import sys
import time

from dlmserve.worker import engine, rank

HANGS_IN_STEP = 5


def build_hanging_engine(*args: object, **more: object) -> engine.Engine:
    built = build_engine(*args, **more)  # type: ignore[arg-type]
    step, num_steps = built.step, 0

    def step_or_hang() -> engine.StepResult:
        nonlocal num_steps
        num_steps += 1
        if num_steps == HANGS_IN_STEP:
            time.sleep(3600)
        return step()

    built.step = step_or_hang  # type: ignore[method-assign]
    return built


if __name__ == "__main__":
    build_engine = engine.build_engine
    if {"--index=0", "--generation=1"} <= set(sys.argv):
        engine.build_engine = build_hanging_engine
    rank.main()
