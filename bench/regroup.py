"""How long it takes to reshape the instances of living ranks, against killing them and starting anew.

    python -m bench.regroup [--rounds 5] [--json FILE]

One TP-2 instance of the embedded model becomes two TP-1 and back, without a process start; then two TP-1 once
more, but by killing the node's processes and launching them again. Interleaved. From the order to the moment in
which the whole layout serves; without load.
"""

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path

from bench import report
from dlmserve.checkpoint import read_model_info, resolve
from dlmserve.config import ServerConfig
from dlmserve.control.loop import Head
from dlmserve.control.metrics import Metrics

POLL_S = 0.002


async def until_serving(head: Head, layout: tuple[int, ...]) -> None:
    def is_there() -> bool:
        instances = head.cluster()["instances"]
        serving = [each["tp_degree"] for each in instances if each["state"] == "serving"]
        return sorted(serving) == sorted(layout) and len(instances) == len(layout)

    while not is_there():
        await asyncio.sleep(POLL_S)


async def seconds(head: Head, layout: tuple[int, ...], kill: bool = False) -> float:
    began_at = time.perf_counter()
    head.want_layout(list(layout))
    if kill:
        [agent] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        os.kill(int(agent), signal.SIGKILL)  # its ranks die with it; the head launches all of them again
    await until_serving(head, layout)
    return time.perf_counter() - began_at


async def measure(rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"split": [], "merge": [], "kill and launch": []}
    config = ServerConfig(device="cpu", devices=2, tp_layout=(2,))
    head = Head(config, read_model_info(resolve("tiny")), Metrics())
    await head.start()
    try:
        await until_serving(head, (2,))
        for _ in range(rounds):
            times["split"].append(await seconds(head, (1, 1)))
            times["merge"].append(await seconds(head, (2,)))
            times["kill and launch"].append(await seconds(head, (1, 1), kill=True))
            await seconds(head, (2,))
    finally:
        await head.stop()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    args = parser.parse_args()
    times = asyncio.run(measure(args.rounds))
    found = {name: report.spread(each) for name, each in times.items()}
    for name, each in found.items():
        print(f"{name:16} median {each['median']:6.3f} s ({each['min']:.3f} to {each['max']:.3f})")
    print(f"kill and launch / split: {found['kill and launch']['median'] / found['split']['median']:.1f}x")
    if args.json:
        report.write(args.json, 0, found)


if __name__ == "__main__":
    main()
