"""Trains the tiny LLaDA checkpoint on the CPU. Resumable: run the same command again.

Owns the optimisers, the schedule and the state on disk. Knows nothing about the tasks' content.

    python -m examples.train_tiny.train --work WORK --out OUT
"""

import argparse
import io
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save as to_safetensors
from tokenizers import Tokenizer
from torch import Tensor, nn

from examples.train_tiny import tokenizer as tiny_tokenizer
from examples.train_tiny.batches import BLOCK_LENGTH, RESPONSE_LENGTHS, Batch, batches_of_step
from examples.train_tiny.decode import Decoding
from examples.train_tiny.model import Config, LLaDA, make_config
from examples.train_tiny.report import measure

SHIPPED = Path(__file__).parents[2] / "dlmserve" / "checkpoints" / "tiny"
EMA_DECAY = 0.995


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for matrices (Jordan 2024, kellerjordan.github.io/posts/muon)."""

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                average = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalise(weight.grad.lerp(average, group["momentum"]))
                fan_out, fan_in = weight.shape
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * max(1, fan_out / fan_in) ** 0.5)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Brings the singular values close to 1: five Newton-Schulz iterations of the fifth order."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315) @ x
    return x.T if tall else x


def loss_and_gradients(model: LLaDA, batch: Batch) -> tuple[float, tuple[Tensor, ...]]:
    """Weighted cross-entropy at the masked positions. Sets no .grad, so that threads can share the model."""
    logits = model(batch.ids, batch.bias, batch.masked)
    loss = (F.cross_entropy(logits, batch.target, reduction="none") * batch.weight).sum()
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


class Trainer:
    """The weights, their moving average, the optimisers and the number of steps taken."""

    def __init__(self, cfg: Config, lr: float, muon_lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model, self.average = LLaDA(cfg, tied=True), LLaDA(cfg, tied=True)
        self.average.load_state_dict(self.model.state_dict())
        matrices, others = [], []
        for name, weight in self.model.named_parameters():
            (matrices if weight.dim() == 2 and ".blocks." in name else others).append(weight)
        self.others = others
        self.optimizers = [
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.01),
            Muon(matrices, lr=muon_lr),
        ]
        self.peak_rates = [lr, muon_lr]
        self.step = 0
        self.best = 0.0

    def update(self, batches: list[Batch], rate: float, pool: ThreadPoolExecutor) -> float:
        """One optimiser step over the batches, at a share `rate` of the peak rates; returns the loss."""
        total = 0.0
        for loss, gradients in pool.map(lambda batch: loss_and_gradients(self.model, batch), batches):
            total += loss
            for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, peak in zip(self.optimizers, self.peak_rates, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self._follow()
        return total

    @torch.no_grad()
    def _follow(self) -> None:
        decay = min(EMA_DECAY, self.step / (self.step + 10))
        for average, weight in zip(self.average.parameters(), self.model.parameters(), strict=True):
            average.lerp_(weight, 1 - decay)

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "ema": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "best": self.best,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        replace_file(path, buffer.getvalue())

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["ema"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.best = state["step"], state["best"]


def export(model: LLaDA, cfg: Config, folder: Path) -> None:
    """Writes model.safetensors (bf16), config.json and generation_config.json."""
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    generation = {key: value for key, value in cfg.items() if key.endswith("_token_id")}
    generation["gen_length"] = max(RESPONSE_LENGTHS)
    generation["block_length"] = BLOCK_LENGTH
    generation["threshold"] = Decoding().threshold
    replace_file(folder / "model.safetensors", to_safetensors(weights, {"format": "pt"}))
    replace_file(folder / "config.json", json.dumps(cfg, indent=2).encode() + b"\n")
    replace_file(folder / "generation_config.json", json.dumps(generation, indent=2).encode() + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Atomically: whoever reads the checkpoint meanwhile sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".new").write_bytes(content)
    path.with_name(path.name + ".new").replace(path)


def schedule(step: int, num_steps: int, num_decay: int) -> float:
    """Share of the peak rate: 50 steps of warm-up, constant, then falling in a line to one in a hundred."""
    return min(1.0, (step + 1) / 50, max(0.01, (num_steps - step) / num_decay))


def train(trainer: Trainer, tokenizer: Tokenizer, cfg: Config, args: argparse.Namespace) -> None:
    """Trains up to `args.steps`; exports the moving average whenever it does best so far on test problems."""
    pool = ThreadPoolExecutor(args.workers, initializer=torch.set_num_threads, initargs=(1,))
    losses, begin = [], time.monotonic()
    while trainer.step < args.steps:
        batches = list(batches_of_step(tokenizer, args.seed, trainer.step, args.batch, args.rows))
        losses.append(trainer.update(batches, schedule(trainer.step, args.steps, args.decay_steps), pool))
        last = trainer.step == args.steps
        if trainer.step % 50 == 0:
            elapsed_s = time.monotonic() - begin
            print(f"step {trainer.step} loss {sum(losses) / len(losses):.4f} {elapsed_s:.0f} s", flush=True)
            losses = []
        if trainer.step % args.eval_every == 0 or last:
            result = measure(trainer.average, tokenizer, Decoding(), args.eval_problems, args.seed)
            print(f"eval {trainer.step} {result.summary()}", flush=True)
            if result.accuracy >= trainer.best:
                trainer.best = result.accuracy
                export(trainer.average, cfg, args.out)
        if trainer.step % 100 == 0 or last:
            trainer.save(args.work / "state.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the tiny LLaDA checkpoint.")
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder of the resumable state")
    add("--out", type=Path, required=True, help="folder of the exported checkpoint")
    add("--tokenizer", type=Path, default=SHIPPED, help="folder of the tokenizer; default: the shipped one")
    add("--steps", type=int, default=24_000)
    add("--decay-steps", type=int, default=8_000, help="steps with a falling rate, at the end")
    add("--batch", type=int, default=64, help="samples a step")
    add("--rows", type=int, default=16, help="samples a forward pass")
    add("--lr", type=float, default=8e-4, help="peak rate of AdamW (embedding and norms)")
    add("--muon-lr", type=float, default=0.0035, help="peak rate of Muon (matrices of the blocks)")
    add("--workers", type=int, default=2, help="threads, each with one-threaded operators")
    add("--eval-every", type=int, default=500, help="steps")
    add("--eval-problems", type=int, default=144)
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer.load(args.tokenizer)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if args.tokenizer.resolve() != args.out.resolve():
            shutil.copyfile(args.tokenizer / name, args.out / name)
    cfg = make_config(
        tokenizer.get_vocab_size(), tiny_tokenizer.BOS_ID, tiny_tokenizer.EOS_ID, tiny_tokenizer.MASK_ID
    )
    trainer = Trainer(cfg, args.lr, args.muon_lr, args.seed)
    if (args.work / "state.pt").is_file():
        trainer.load(args.work / "state.pt")
    train(trainer, tokenizer, cfg, args)


if __name__ == "__main__":
    main()
