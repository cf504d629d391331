"""A real rank process; that of device 0 hangs in its fifth step, in its first life only. Its heartbeats go on."""

import sys
import time

from dlmserve.worker import build, engine, rank

HANGS_IN_STEP = 5


def build_hanging_engine(*args: object, **more: object) -> engine.Engine:
    built = build_engine(*args, **more)  # type: ignore[arg-type]
    launch, num_steps = built.launch, 0

    def launch_or_hang() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == HANGS_IN_STEP:
            time.sleep(3600)
        launch()

    built.launch = launch_or_hang  # type: ignore[method-assign]
    return built


if __name__ == "__main__":
    build_engine = build.build_engine
    if {"--index=0", "--generation=1"} <= set(sys.argv):
        build.build_engine = build_hanging_engine
    rank.main()
