"""Ragged attend: the rows of a step that have several new tokens, in tiles of neighbouring queries.

For:        whole prompts, chunks and mixed steps; rows of one token are decode.py's.
Not for:    cutting rows into tiles (triton_work.py).
May import: triton.

The query heads that read one KV head share a tile: row ``m`` of a tile is token ``m // GROUP`` and head ``m % GROUP``.
"""

import triton
import triton.language as tl

from kv_execution.attention.triton_kernels.softmax import walk_keys, with_sink


@triton.jit
def attend_kernel(
    query,
    k_pool,
    v_pool,
    kv_indices,
    tiles,
    sinks,
    k_scales,
    v_scales,
    output,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    STORED: tl.constexpr,
):
    """Grid ``(KV_HEADS * ceil(GROUP_SIZE / GROUP), tiles)``.

    ``GROUP_SIZE`` query heads read one KV head, ``GROUP`` of them in one tile. ``WINDOW`` 0 and ``SOFT_CAP`` 0.0 are
    off. ``tiles``: int32 ``[n, 5]``, see ``triton_work.TILE_FIELDS``. Scales and ``STORED``: see ``walk_keys``.
    """
    tile = tiles + tl.program_id(1) * 5
    num_tokens = tl.load(tile + 1)
    if num_tokens == 0:
        return
    first_token = tl.load(tile).to(tl.int64)
    first_index = tl.load(tile + 2)
    num_listed = tl.load(tile + 3)
    position = tl.load(tile + 4)
    BLOCKS: tl.constexpr = (GROUP_SIZE + GROUP - 1) // GROUP
    kv_head = tl.program_id(0) // BLOCKS
    m = tl.arange(0, BLOCK_M)
    token = m // GROUP
    head = (tl.program_id(0) % BLOCKS) * GROUP + m % GROUP
    real = (token < num_tokens) & (head < GROUP_SIZE)
    head = kv_head * GROUP_SIZE + head
    dims = tl.arange(0, PADDED_DIM)
    element = ((first_token + token) * (KV_HEADS * GROUP_SIZE) + head)[:, None] * HEAD_DIM + dims[None, :]
    valid = real[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(query + element, mask=valid, other=0.0)
    if EXACT:
        q = q.to(tl.float32)
    newest = tl.where(real, position + token, -1)
    oldest = tl.zeros([BLOCK_M], tl.int32)
    low = position * 0
    if WINDOW > 0:
        oldest = tl.maximum(position + token - (WINDOW - 1), 0)
        low = tl.maximum(position - (WINDOW - 1), 0)
    maximum, total, acc = walk_keys(
        q,
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        kv_indices,
        first_index,
        num_listed,
        kv_head,
        low,
        position + num_tokens,
        oldest,
        newest,
        KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        PAGE_SIZE,
        NUM_PAGES,
        BLOCK_M,
        BLOCK_T,
        SCALE,
        SOFT_CAP,
        True,
        EXACT,
        PARTS,
        STORED,
    )
    sink = total
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0)
    result = with_sink(maximum, total, acc, sink, HAS_SINKS)
    tl.store(output + element, result.to(output.dtype.element_ty), mask=valid)
