"""How much of a GPU's memory is left for KV rows."""

import torch

from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.errors import RequestError
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.speculation.draft import NO_DRAFT
from foreword.speculation.layout import BatchBuffers, SequenceRows

GIB = 1 << 30


def memory_for_kv(target: Decoder, utilization: float, max_rows: int) -> int:
    """Bytes within this share of the GPU, beside what is in use now and what the largest pass needs."""
    needed = _largest_pass(target, min(max_rows, target.config.context_length))
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(target.device)
    room = int(total * utilization) - (total - free) - needed
    if room < target.kv_rows().bytes_per_row * PAGE_SIZE:
        raise RequestError(
            f"no memory is left for KV: of {total / GIB:.1f} GiB on the GPU {(total - free) / GIB:.1f} are in use, "
            f"a pass of {max_rows} tokens needs {needed / GIB:.1f}, and gpu_memory_utilization is {utilization:g}; "
            "raise it, lower max_num_batched_tokens, or use a smaller model"
        )
    return room


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that nobody uses; of a CPU, whose memory no captures fill, none are counted."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def _largest_pass(target: Decoder, rows: int) -> int:
    """Bytes that a pass over this many tokens of a prompt takes beside the weights and its KV rows."""
    cache = PagedCache(-(-rows // PAGE_SIZE))
    runner = ModelRunner.allocate(target, cache.pool.num_pages, PAGE_SIZE)
    sequence = cache.open()
    cache.reserve(sequence, rows)
    prompt = SequenceRows(sequence, [0] * rows, rows, NO_DRAFT)
    torch.cuda.reset_peak_memory_stats(target.device)
    before = torch.cuda.memory_allocated(target.device)
    runner.forward(BatchBuffers(entries=0).lay_out(cache, [prompt], ()))
    torch.cuda.synchronize(target.device)
    return max(0, torch.cuda.max_memory_allocated(target.device) - before)
