"""The host's own time for a cache step of the GPU path, without a GPU: what the device would wait for, and the rest.

    python -m bench.host_time [--json bench/results/host_time.json] [--batches 1 8 32] [--steps 400]

The engine, its runner, graphs, staging, sampler, decision and the leader's loop run as on a GPU, on a device whose
replays, head and kernels cost next to nothing (bench/gpu/stub.py). All requests are greedy, at cache steps of a dual
cache, in blocks of 32, and unmask one token a step. Reported is the CPU time of this thread, microseconds a step:

critical   from the outcome's arrival on the host until the next replay is about to be queued: the device idles
rest       all else: the device works meanwhile

In the figures: all of this project's Python and numpy; torch's dispatch of every operator to the CPU, with tensors of
the step's row counts (a GPU's costs about as much, and a launch more); the reports and their encoding; ZeroMQ's send
to and look at a socket of the same process. Not in them: the driver's own time for a replay, a kernel's launch, an
event and a copy, which on a GPU are some microseconds each; TP, where the leader sends each step's commands to its
followers; a head that sends commands. What the stub does in the device's place is not counted.
"""

import argparse
import tempfile
from statistics import median

import torch
import zmq

from bench import report
from bench.gpu.setup import Setting, admit, make_engine
from bench.gpu.stub import HostClock, IdleGpu, idle_kernels
from dlmserve.messages import Dissolve, Form, ModelSpec, StepReport
from dlmserve.transport import Dealer
from dlmserve.worker.step_loop import lead

PROMPT, BLOCK = 64, 32
ADDRESS = "inproc://host-time"


class Head(Dealer):
    """A head that only listens, and dissolves the instance after `num_steps` reports."""

    def __init__(self, num_steps: int, clock: HostClock) -> None:
        self._listener = zmq.Context.instance().socket(zmq.ROUTER)
        self._listener.bind(ADDRESS)
        super().__init__(ADDRESS, "bench")
        self._num_left, self._clock = num_steps, clock

    def send(self, message: StepReport) -> None:  # type: ignore[override]
        super().send(message)
        with self._clock.not_counted():
            self._listener.recv_multipart()
            self._num_left -= 1

    def drain(self) -> list:
        return super().drain() if self._num_left > 0 else [Dissolve("report")]

    def close(self, linger_s: float = 0.0) -> None:
        super().close(linger_s)
        self._listener.close(0)


def measure(batch: int, num_steps: int) -> dict:
    """Of each step, without the first few."""
    clock = HostClock()
    output = -(-num_steps // BLOCK) * BLOCK
    with tempfile.TemporaryDirectory() as folder, idle_kernels(clock):
        setting = Setting("cpu", True, folder)
        setting.write_config()
        engine, _ = make_engine(setting, batch, PROMPT + output, device=IdleGpu(clock))
        for request in range(batch):
            engine.apply(admit(setting, request, PROMPT, output, BLOCK, 1, "dual", rule="threshold"))
        head = Head(num_steps, clock)
        model = ModelSpec(folder, "dummy", "float32", 0, [])
        form = Form("report", 0, 1, [""], "", model, PROMPT + output, batch, 1, 32, 60.0)
        try:
            lead(form, engine, head)
        finally:
            head.close()
            engine.close()
    critical, whole = clock.critical_ns[5:], clock.whole_ns[5:]
    rest = [all_of_it - part for all_of_it, part in zip(whole, critical, strict=True)]
    return {
        "batch": batch,
        "steps": len(critical),
        "critical_us": _summary(critical),
        "rest_us": _summary(rest),
    }


def _summary(samples_ns: list[int]) -> dict[str, float]:
    """Microseconds. Where others share the core's caches the tenth percentile says what the code takes alone."""
    return {"p10": sorted(samples_ns)[len(samples_ns) // 10] / 1e3, "median": median(samples_ns) / 1e3}


def lines(rows: list[dict]) -> list[str]:
    """Medians, and in brackets the tenth percentile."""
    out = [f"{'batch':>6}{'critical us':>16}{'rest us':>16}{'steps':>7}"]
    for row in rows:
        cells = [f"{row[name]['median']:.0f} ({row[name]['p10']:.0f})" for name in ("critical_us", "rest_us")]
        out.append(f"{row['batch']:6d}{cells[0]:>16}{cells[1]:>16}{row['steps']:7d}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=400, help="of each batch")
    args = parser.parse_args()
    torch.set_num_threads(1)  # small operators must not wait for other threads
    rows = [measure(batch, args.steps) for batch in args.batches]
    print("\n".join(lines(rows)))
    if args.json:
        report.write(args.json, 0, rows)


if __name__ == "__main__":
    main()
