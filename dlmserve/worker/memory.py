"""How many KV pages an instance gets: what its requests can use or, on a GPU, what its memory holds.

Measures the largest step before it divides what is left. Knows nothing of how pages are handed out.
"""

import numpy as np
import torch

from dlmserve.errors import OutOfMemory
from dlmserve.messages import Decoding, Form
from dlmserve.worker.batch import Span, on_device, pack
from dlmserve.worker.device import Device, Staging
from dlmserve.worker.models import Decoder
from dlmserve.worker.sampling import RowGroup, Sampler

# Bounds the activations of a step; whoever does not fit takes part in the next step, first come first.
MAX_STEP_TOKENS = 16384
# For what the measured step does not show: captured graphs, libraries' workspaces, fragments.
SPARE_BYTES = 1 << 30
# Of the ways to draw: it filters and ranks rows of the whole vocabulary.
_COSTLIEST = Decoding(temperature=1.0, top_p=0.9, top_k=50, num_top=1)


def num_pages(form: Form, model: Decoder, device: Device) -> int:
    """The same on all ranks of the instance. Raises OutOfMemory where not even one request would fit."""
    pages_per_request = -(-form.max_model_len // form.page_size)
    wanted = form.max_num_seqs * pages_per_request
    if device.free_bytes() is None:
        return wanted
    peak_bytes = device.peak_bytes(lambda: _largest_step(form, model, device))
    free_bytes, total_bytes = device.free_bytes() or (0, 0)
    usable_bytes = (
        int(total_bytes * form.memory_fraction) - (total_bytes - free_bytes) - peak_bytes - SPARE_BYTES
    )
    fitting = usable_bytes // page_bytes(form, model)
    everywhere = model.group.all_gather(torch.tensor([fitting], device=device.name)).min().item()
    if everywhere < pages_per_request:
        raise OutOfMemory(
            f"{device.name} has room for {max(0, int(everywhere))} KV pages of {form.page_size} tokens beside the "
            f"weights; wanted {pages_per_request} at least, for one request of {form.max_model_len} tokens: raise "
            f"--memory-fraction ({form.memory_fraction:g}), lower --max-model-len, or use a higher TP degree"
        )
    return min(wanted, int(everywhere))


def page_bytes(form: Form, model: Decoder) -> int:
    """K and V of one page in all layers."""
    kv_heads = model.shard.kv_heads[1] - model.shard.kv_heads[0]
    return (
        2 * model.config.num_layers * form.page_size * kv_heads * model.config.head_dim * model.dtype.itemsize
    )


def _largest_step(form: Form, model: Decoder, device: Device) -> None:
    """As many whole canvases as a step takes, each with a block of rows to draw for in the costliest way."""
    canvas = np.zeros(form.max_model_len, dtype=np.int64)
    block = np.arange(min(32, len(canvas)))
    count = min(form.max_num_seqs, max(1, MAX_STEP_TOKENS // len(canvas)))
    spans = [Span(0, len(canvas), 0, len(canvas), None)] * count
    rows = (block + np.arange(count)[:, None] * len(canvas)).reshape(-1)
    starts = range(0, len(rows), len(block))
    groups = [RowGroup(start, start + len(block), block, 0, _COSTLIEST) for start in starts]
    packed = pack(spans, canvas, rows, model.attention.plan)
    tensors = Staging(device).put(packed.arrays | Sampler.arrays(groups))
    hidden = model.forward(on_device(packed, tensors), None)
    sampler = Sampler(model, form.model.mask_id)
    sampler.greedy(hidden)
    sampler.draw(hidden, groups, tensors)
