"""Rank processes with a real engine and real sockets: formed, served by, released, killed, formed again."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from dlmserve.checkpoint import read_model_info
from dlmserve.errors import CheckpointError, WorkerError
from dlmserve.messages import (
    PROTOCOL_VERSION,
    Admit,
    Cancel,
    Decoding,
    Dissolve,
    Dissolved,
    Form,
    Formed,
    FormFailed,
    ModelSpec,
    RankExited,
    RankHello,
    Release,
    RequestStep,
    SetThreshold,
    Shutdown,
    StepReport,
)
from dlmserve.worker import rank
from dlmserve.worker.rank import is_device_usable
from tests.wire_head import LIMIT_S, WireHead

INFO = read_model_info("tiny")
PROMPT = [1, *range(100, 107)]
BLOCK = 8
generations = itertools.count(1)


class RankProcess:
    """Forked from a process that has imported torch, so that each start is cheap."""

    def __init__(self, head: WireHead) -> None:
        self.identity = f"n:0:{(generation := next(generations))}"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dlmserve.worker.parallel", "dlmserve.worker.engine"])
        flags = ["--node=n", "--index=0", f"--generation={generation}", "--device=cpu"]
        argv = [*flags, f"--head={head.endpoint}", f"--run-dir={head.run_dir}"]
        self.process = context.Process(target=run_rank, args=(argv,), daemon=True)
        self.process.start()
        self.hello = head.next(RankHello, generation=generation)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def run_rank(argv: list[str]) -> None:
    rank.main([*argv, f"--parent={os.getppid()}"])


class Instance:
    """What the head knows of an instance, and the wait for what the instance says."""

    names = itertools.count(1)

    def __init__(self, head: WireHead, ranks: list[RankProcess], **changes: object) -> None:
        self.head, self.ranks, self.name = head, ranks, f"i{next(Instance.names)}"
        for tp_rank, member in enumerate(ranks):
            form = msgspec.structs.replace(self.form(tp_rank), **changes)
            head.send(member.identity, form)

    def form(self, tp_rank: int) -> Form:
        return Form(
            instance=self.name,
            tp_rank=tp_rank,
            tp_degree=len(self.ranks),
            plan_endpoints=[member.hello.plan_endpoint for member in self.ranks],
            store_path=f"{self.head.run_dir}/{self.name}.store",
            model=ModelSpec(INFO.path, "auto", "float32", INFO.mask_id, list(INFO.eos_ids)),
            max_model_len=256,
            max_num_seqs=4,
            num_pages=0,
            page_size=32,
            collective_timeout_s=LIMIT_S,
        )
