"""Kernels in Triton, where serving engines have one of their own."""

import triton
import triton.language as tl


@triton.jit
def _append(k, v, slots, k_cache, v_cache, width, block: tl.constexpr):
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    tl.store(k_cache + slot * width + column, tl.load(k + token * width + column, inside), inside)
    tl.store(v_cache + slot * width + column, tl.load(v + token * width + column, inside), inside)


def append(k, v, slots, k_cache, v_cache):
    """Keys and values of each token to its slot of their caches, `[tokens, heads, dim]` each, in one launch."""
    width = k.shape[1] * k.shape[2]
    block = min(triton.next_power_of_2(width), 1024)
    _append[(k.shape[0], triton.cdiv(width, block))](k, v, slots, k_cache, v_cache, width, block)
    return v_cache
