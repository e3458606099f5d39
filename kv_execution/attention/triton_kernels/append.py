"""Append: write each new token's key and value to its slot, in place.

For:        NHD pools of any element type, and their scales; keys and values are cast on the way.
Not for:    knowing which slot: ``slot_mapping`` says.
May import: triton.
"""

import triton
import triton.language as tl


@triton.jit
def append_kernel(
    key,
    value,
    slots,
    k_pool,
    v_pool,
    NUM_SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid ``(T, ceil(WIDTH / BLOCK))``; ``WIDTH`` elements a token (KV heads x head size) in K and in V each.

    A slot outside ``0..NUM_SLOTS - 1`` is padding: nothing is written.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot < 0) | (slot >= NUM_SLOTS):
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = element < WIDTH
    new_key = tl.load(key + token * WIDTH + element, mask=real, other=0.0)
    new_value = tl.load(value + token * WIDTH + element, mask=real, other=0.0)
    tl.store(k_pool + slot * WIDTH + element, new_key.to(k_pool.dtype.element_ty), mask=real)
    tl.store(v_pool + slot * WIDTH + element, new_value.to(v_pool.dtype.element_ty), mask=real)
