"""Makes an engine from a Form: attention, weights, KV pages, captured graphs, warm-up, in this order.

Knows which part needs which; what each does is in its own file.
"""

from dataclasses import replace

import torch

from dlmserve.checkpoint import read_model_info
from dlmserve.errors import ConfigError
from dlmserve.messages import Form
from dlmserve.worker import attention, memory
from dlmserve.worker.device import Device, make_device
from dlmserve.worker.engine import Engine
from dlmserve.worker.graphs import Graphs, usual_buckets
from dlmserve.worker.hidden_reader import load_reader
from dlmserve.worker.kv_cache import KVCache
from dlmserve.worker.models import load_model, read_config
from dlmserve.worker.parallel import Group
from dlmserve.worker.runner import Runner
from dlmserve.worker.shards import KeptShards
from dlmserve.worker.weights import open_weights

WARM_UP_TOKENS = 32


def build_engine(form: Form, device: str, group: Group, kept: KeptShards | None = None) -> Engine:
    """Loads this rank's weights, sizes and allocates KV pages, warms up. Raises DlmServeError.

    `kept`: weights of the rank's last engine; it is empty afterwards.
    """
    return build_on(make_device(device), form, group, with_graphs=device != "cpu", kept=kept)


@torch.inference_mode()
def build_on(
    device: Device, form: Form, group: Group, with_graphs: bool, kept: KeptShards | None = None
) -> Engine:
    """The same on a given device. Graphs are captured where attention and model fit them, too."""
    info = replace(read_model_info(form.model.path), max_model_len=form.max_model_len)
    config = read_config(info)
    dtype = _dtype(form.model.dtype, device.name)
    chosen = attention.choose(
        form.attention, device.name, dtype, config.head_dim, form.page_size, config.block_causal
    )
    with device.named_errors():
        files = open_weights(info.path, form.model.load_format, dtype, device.name)
        weights = (kept or KeptShards()).over(form.model, files)
        model = load_model(info, weights, dtype, device.name, group, chosen)
        num_bytes_read = weights.num_bytes_read
        del weights  # and with it what is left of the last engine's, before free memory is measured
        num_pages = form.num_pages or memory.num_pages(form, model, device)
        kv_heads = model.shard.kv_heads[1] - model.shard.kv_heads[0]
        shape = (config.num_layers, num_pages, form.page_size, kv_heads, config.head_dim)
        cache = KVCache(*shape, dtype, device.name)
        fits = chosen.fits_graphs and model.fits_graphs
        graphs = Graphs(model, cache, device) if with_graphs and fits else None
        if graphs:
            # Of a block-causal model also recompute steps are captured, two blocks of each request.
            most_spans = form.max_num_seqs * (2 if config.block_causal else 1)
            limits = (most_spans, form.max_model_len, form.page_size)
            for bucket in usual_buckets(info.default_block_length, *limits):
                graphs.get(bucket)
        runner = Runner(model, cache, device, graphs)
        engine = Engine(runner, form.model.mask_id, form.model.eos_ids, form.recompute_tokens)
        engine.num_bytes_read = num_bytes_read
        if form.hidden_reader and form.tp_rank == 0:
            engine.hidden_reader = load_reader(form.hidden_reader, config.hidden_size, device.name)
        engine.warm_up(min(WARM_UP_TOKENS, form.max_model_len, num_pages * form.page_size))
    return engine


def _dtype(name: str, device: str) -> torch.dtype:
    """ "auto": float32 on CPUs, where it is the fastest and exact, bfloat16 on GPUs."""
    if name == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype is {name!r}; wanted auto, float32, bfloat16 or float16")
    return getattr(torch, name)
