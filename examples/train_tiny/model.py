"""The LLaDA architecture in small, for training: a Llama without the causal mask.

Owns the modules and their initialisation; weight names are those of GSAI-ML/LLaDA-8B. Knows nothing about
masking schedules, decoding or how dlmserve runs the same weights.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]


class DualCache:
    """Keys and values of all positions, taken at a block's first step (Fast-dLLM's dual cache).

    Later steps recompute the block only: its entries are replaced, those around it stay as they were.
    """

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def merge(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [rows, heads, n, head_dim] of the positions from `start`; returns all."""
        if layer == len(self.layers):
            self.layers.append((keys, values))
            return keys, values
        for kept, new in zip(self.layers[layer], (keys, values), strict=True):
            kept[:, :, start : start + new.shape[2]] = new
        return self.layers[layer]

    def keep_rows(self, rows: Tensor) -> None:
        """Drops the rows where the boolean mask is false."""
        self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]


class RMSNorm(nn.Module):
    """Root mean square norm with a learnt scale."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_tables(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, head_dim] of the rotary embedding (half-split layout)."""
    inverse_frequency = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), inverse_frequency).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to x [rows, heads, n, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        dim, inner = cfg["d_model"], cfg["mlp_hidden_size"]
        self.layer = layer
        self.num_heads = cfg["n_heads"]
        self.attn_norm = RMSNorm(dim, cfg["rms_norm_eps"])
        self.ff_norm = RMSNorm(dim, cfg["rms_norm_eps"])
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.attn_out = nn.Linear(dim, dim, bias=False)
        self.ff_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.ff_out = nn.Linear(inner, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        bias: Tensor | None,
        selected: Tensor | None = None,
        start: int = 0,
        cache: DualCache | None = None,
    ) -> Tensor:
        """x [rows, n, dim] at the positions from `start`; `selected` [rows, n]: those wanted back."""
        rows, n, dim = x.shape
        normed = self.attn_norm(x)
        q, k, v = (
            projection(normed).view(rows, n, self.num_heads, -1).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.merge(self.layer, start, k, v)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        attended = attended.transpose(1, 2).reshape(rows, n, dim)
        if selected is not None:
            x, attended = x[selected], attended[selected]
        x = x + self.attn_out(attended)
        normed = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(normed)) * self.up_proj(normed))


class Transformer(nn.Module):
    """Holds the weights under LLaDA's names."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(cfg["embedding_size"], cfg["d_model"])
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg["n_layers"]))
        self.ln_f = RMSNorm(cfg["d_model"], cfg["rms_norm_eps"])
        self.ff_out = nn.Linear(cfg["d_model"], cfg["embedding_size"], bias=False)


class LLaDA(nn.Module):
    """Mask predictor. `tied` shares the embedding with the head while training; both are exported."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: Config, tied: bool = False) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = nn.ModuleDict({"transformer": Transformer(cfg)})
        head_dim = cfg["d_model"] // cfg["n_heads"]
        cos, sin = rope_tables(cfg["max_sequence_length"], head_dim, cfg["rope_theta"])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()
        if tied:
            self.transformer.ff_out.weight = self.transformer.wte.weight

    @property
    def transformer(self) -> Transformer:
        transformer = self.model["transformer"]
        assert isinstance(transformer, Transformer)
        return transformer

    def _initialise(self) -> None:
        """Residual branches start at zero, so that the model starts as the identity."""
        for name, weight in self.named_parameters():
            if ".blocks." in name and name.endswith(("attn_out.weight", "ff_out.weight")):
                nn.init.zeros_(weight)
            elif name.endswith("wte.weight"):
                nn.init.normal_(weight, std=0.1)
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))

    def forward(
        self,
        ids: Tensor,
        bias: Tensor | None = None,
        selected: Tensor | None = None,
        start: int = 0,
        cache: DualCache | None = None,
    ) -> Tensor:
        """Logits [rows, n, vocab] of ids [rows, n] at the positions from `start`.

        `bias` [rows, 1, 1, num_keys] is added to the attention scores. With the boolean `selected` [rows, n]
        the logits are those of the selected positions only, [num_selected, vocab].
        """
        transformer = self.transformer
        end = start + ids.shape[1]
        rope = self.cos[start:end], self.sin[start:end]
        x = transformer.wte(ids)
        *first_blocks, last_block = transformer.blocks
        for block in first_blocks:
            x = block(x, rope, bias, None, start, cache)
        x = last_block(x, rope, bias, selected, start, cache)
        return transformer.ff_out(transformer.ln_f(x))


def make_config(vocab_size: int, bos_id: int, eos_id: int, mask_id: int) -> Config:
    """config.json with LLaDA's keys; the embedding is padded to a multiple of 64."""
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "activation_type": "silu",
        "d_model": 128,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 4,
        "mlp_hidden_size": 384,
        "mlp_ratio": 4,
        "vocab_size": vocab_size,
        "embedding_size": (vocab_size + 63) // 64 * 64,
        "max_sequence_length": 512,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "rms_norm_eps": 1e-5,
        "bias_for_layer_norm": False,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 10000.0,
        "alibi": False,
        "alibi_bias_max": 8.0,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "multi_query_attention": None,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "scale_logits": False,
        "weight_tying": False,
        "flash_attention": False,
        "block_group_size": 1,
        "init_device": "cpu",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "init_cutoff_factor": None,
        "use_cache": False,
        "precision": "amp_bf16",
        "torch_dtype": "bfloat16",
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
        "mask_token_id": mask_id,
    }
