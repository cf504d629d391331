"""The plain way to decode with a dual cache, as public reference code does it: the engine's yardstick.

One request at a time, logits of every position that is fed, softmax in float64, tensors of the whole canvas. LLaDA's
architecture only. Greedy; a threshold, or a fixed number of steps for each block.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

ROOT = "model.transformer."


def load(folder: str) -> "PlainModel":
    """A checkpoint's own tensors, float32, on the CPU."""
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors = load_file(f"{folder}/model.safetensors")
    return PlainModel(config, {name.removeprefix(ROOT): tensor for name, tensor in tensors.items()})


class PlainModel:
    """Straightforward LLaDA forward. `weights`: the checkpoint's tensors by name, without "model.transformer."."""

    def __init__(self, config: dict, weights: dict[str, Tensor]) -> None:
        self.config, self.w = config, weights
        self.device = weights["wte.weight"].device
        dtype = weights["wte.weight"].dtype
        head_dim = config["d_model"] // config["n_heads"]
        inverse = 1.0 / config["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.outer(torch.arange(config["max_sequence_length"]).float(), inverse)
        angles = torch.cat((angles, angles), -1).to(self.device)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, ids: Tensor, start: int, cache: list[tuple[Tensor, Tensor]], full: bool) -> Tensor:
        """Logits of ids [1, n] at columns start..; a full pass fills `cache`, others overwrite their columns."""
        end = start + ids.shape[1]
        x = self.w["wte.weight"][ids]
        for i in range(self.config["n_layers"]):
            x = self._block(x, f"blocks.{i}.", start, end, cache, i, full)
        return F.linear(self._norm(x, "ln_f.weight"), self.w["ff_out.weight"])

    def _block(self, x: Tensor, p: str, start: int, end: int, cache: list, i: int, full: bool) -> Tensor:
        w, y = self.w, self._norm(x, f"{p}attn_norm.weight")
        q, k, v = (
            F.linear(y, w[f"{p}{n}_proj.weight"])
            .view(1, end - start, self.config["n_heads"], -1)
            .transpose(1, 2)
            for n in "qkv"
        )
        q, k = self._rotate(q, start, end), self._rotate(k, start, end)
        if full:
            cache.append((k.clone(), v.clone()))
        else:
            cache[i][0][:, :, start:end], cache[i][1][:, :, start:end] = k, v
            k, v = cache[i]
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + F.linear(y, w[f"{p}attn_out.weight"])
        y = self._norm(x, f"{p}ff_norm.weight")
        y = F.silu(F.linear(y, w[f"{p}ff_proj.weight"])) * F.linear(y, w[f"{p}up_proj.weight"])
        return x + F.linear(y, w[f"{p}ff_out.weight"])

    def _rotate(self, x: Tensor, start: int, end: int) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos[start:end] + torch.cat((-b, a), -1) * self.sin[start:end]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[name], self.config["rms_norm_eps"])


@torch.inference_mode()
def decode(
    model: PlainModel,
    prompt: list[int],
    gen_length: int,
    block_length: int,
    threshold: float,
    cache_mode: str,
    steps_per_block: int | None = None,
) -> list[int]:
    """Generated ids; `cache_mode` "none" | "prefix" | "dual". With `steps_per_block` the threshold is not looked at."""
    mask_id = model.config["mask_token_id"]
    x = torch.cat((torch.tensor([prompt]), torch.full((1, gen_length), mask_id)), 1).to(model.device)
    for start in range(len(prompt), len(prompt) + gen_length, block_length):
        end = start + block_length
        cache: list[tuple[Tensor, Tensor]] = []
        step = 0
        while (x[:, start:end] == mask_id).any():
            full = not cache or cache_mode == "none"
            lo, hi = (0, x.shape[1]) if full else (start, x.shape[1] if cache_mode == "prefix" else end)
            if full:
                cache = []
            logits = model.forward(x[:, lo:hi], lo, cache, full)
            guess = logits.argmax(-1)
            probability = logits.to(torch.float64).softmax(-1).gather(-1, guess[..., None])[..., 0]
            masked = x[:, lo:hi] == mask_id
            masked[:, end - lo :] = False
            confidence = torch.where(masked, probability, -torch.inf)
            if steps_per_block is None:
                chosen = confidence >= threshold
                chosen[0, confidence[0].argmax()] = True
            else:
                share, remainder = divmod(block_length, steps_per_block)
                best = confidence[0].topk(share + (step < remainder)).indices
                chosen = torch.zeros_like(masked)
                chosen[0, best] = True
            step += 1
            x[:, lo:hi] = torch.where(chosen & masked, guess, x[:, lo:hi])
    return x[0, len(prompt) :].tolist()


def llada_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors that PlainModel wants, by name, and their shapes."""
    d, mlp, vocab = config["d_model"], config["mlp_hidden_size"], config["embedding_size"]
    kv = config["n_kv_heads"] * d // config["n_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (vocab, d), "ln_f.weight": (d,), "ff_out.weight": (vocab, d)
    }  # fmt: skip
    layer = {
        "attn_norm": (d,), "q_proj": (d, d), "k_proj": (kv, d), "v_proj": (kv, d), "attn_out": (d, d),
        "ff_norm": (d,), "ff_proj": (mlp, d), "up_proj": (mlp, d), "ff_out": (d, mlp),
    }  # fmt: skip
    for i in range(config["n_layers"]):
        shapes |= {f"blocks.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
