"""A whole node in one small process, speaking the real protocol: an agent and ranks whose "model" is trivial.

Each step unmasks one position of every resident; the token is the position. Prompts that begin with one of
the special tokens below, and the model path "broken", make it misbehave. Run like the real agent.
"""

import argparse
import os
import signal
import sys

from dlmserve import keys
from dlmserve.keys import Keys
from dlmserve.messages import (
    PROTOCOL_VERSION,
    Admit,
    AgentHello,
    Cancel,
    Dissolve,
    Dissolved,
    Failure,
    Form,
    Formed,
    FormFailed,
    Heartbeat,
    Introduce,
    NodeLeft,
    RankHello,
    RequestStep,
    Shutdown,
    StepReport,
    ToPeer,
)
from dlmserve.transport import Dealer
from dlmserve.worker.lifeline import die_with_parent

DEADLY, NAN = 1001, 1002  # first token of a prompt: the node dies of it; its logits are not finite
NUM_PAGES = 64
STEP_TIMES = [(1, 1, 0.01), (100_000, 1, 0.01)]  # a step takes 10 ms, whatever is in it


class FakeRank:
    """Only leaders (tp_rank 0) step."""

    def __init__(self, head: str, node: str, device: int, own_keys: Keys | None) -> None:
        self.dealer = Dealer(head, f"{node}:{device}:1", own_keys)
        self.hello = RankHello(PROTOCOL_VERSION, node, device, 1, os.getpid(), "cpu", f"plan{device}")
        self.dealer.send(self.hello)
        self.form: Form | None = None
        self.residents: dict[int, Admit] = {}
        self.canvases: dict[int, list[int]] = {}
        self.seq = 0

    def obey(self, message: ToPeer) -> None:
        match message:
            case Form(instance, tp_rank):
                self.form = message
                broken = message.model.path == "broken"
                failed = FormFailed(instance, tp_rank, "broken: no weights there")
                self.dealer.send(
                    failed
                    if broken
                    else Formed(instance, tp_rank, NUM_PAGES, 0.0, "fake", 0.0, 0, STEP_TIMES)
                )
            case Dissolve(instance) if self.form and self.form.instance == instance:
                self.dealer.send(Dissolved(instance, self.form.tp_rank))
                self.residents.clear()
            case Introduce():
                self.residents.clear()
                self.dealer.send(self.hello)
            case Admit(request, canvas):
                if canvas[0] == DEADLY:
                    os._exit(1)
                self.residents[request] = message
                self.canvases[request] = list(canvas)
            case Cancel(request):
                self.residents.pop(request, None)

    def step(self) -> None:
        if not self.residents or self.form is None:
            return
        self.seq += 1
        broken = [number for number, admit in self.residents.items() if admit.canvas[0] == NAN]
        failed = [Failure(number, "not_finite", "NaN") for number in broken]
        for number in broken:
            del self.residents[number]
        steps = [self._unmask(admit) for admit in list(self.residents.values())]
        report = StepReport(self.form.instance, self.seq, 0.01, 0.0, len(steps), 0, steps, [], failed)
        self.dealer.send(report)

    def _unmask(self, admit: Admit) -> RequestStep:
        canvas, mask = self.canvases[admit.request], self.form.model.mask_id if self.form else 0
        position = canvas.index(mask)
        canvas[position] = position
        finished = "" if mask in canvas else "length"
        if finished:
            del self.residents[admit.request]
        block = (position - admit.output_start) // admit.decoding.block_length
        value = admit.decoding.value
        return RequestStep(admit.request, False, block, value, [position], [position], [1.0], finished)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("head", "node", "device", "run-dir", "keys"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--devices", type=int)
    args = parser.parse_args()
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    own_keys = keys.read(args.keys, "node") if args.keys else None
    agent = Dealer(args.head, f"{args.node}:agent", own_keys)
    hello = AgentHello(PROTOCOL_VERSION, args.node, args.devices, os.getpid())
    agent.send(hello)
    ranks = [FakeRank(args.head, args.node, device, own_keys) for device in range(args.devices)]
    try:
        live(agent, hello, ranks)
    finally:
        agent.send(NodeLeft(args.node, "it was told to leave"))
        agent.close(linger_s=1.0)


def live(agent: Dealer, hello: AgentHello, ranks: list[FakeRank]) -> None:
    """Until the head says Shutdown. Each heartbeat of the agent has an answer, which paces them."""
    while True:
        for message in agent.drain():
            match message:
                case Shutdown():
                    return
                case Introduce():
                    agent.send(hello)
        agent.send(Heartbeat(hello.node, -1, 0))
        for device, rank in enumerate(ranks):
            rank.dealer.send(Heartbeat(hello.node, device, 1))
            for message in rank.dealer.drain():
                rank.obey(message)
            rank.step()
        agent.poll(1.0)  # for the answer to the heartbeat: no rank runs far ahead of what the head has seen


if __name__ == "__main__":
    main()
