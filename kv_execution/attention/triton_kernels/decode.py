"""Decode: rows of one new token, whole or cut over their keys (split-KV), and the merge of the pieces.

For:        any batch of such rows; the query heads of a KV head share a tile.
Not for:    deciding how rows are cut (triton_work.py).
May import: triton.

Pieces are ``[S, R, heads, ...]``; a piece that a row does not have is neither written nor read.
"""

import triton
import triton.language as tl

from kv_execution.attention.triton_kernels.softmax import walk_keys, with_sink


@triton.jit
def load_queries(
    query,
    token,
    KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The tile of one token's query heads of program 0's KV head, with the head of each row and whether it is one."""
    BLOCKS: tl.constexpr = (GROUP_SIZE + GROUP - 1) // GROUP
    m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    in_group = (tl.program_id(0) % BLOCKS) * GROUP + m
    real = (m < GROUP) & (in_group < GROUP_SIZE)
    kv_head = tl.program_id(0) // BLOCKS
    head = kv_head * GROUP_SIZE + in_group
    element = (token * (KV_HEADS * GROUP_SIZE) + head)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(query + element, mask=real[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if EXACT:
        q = q.to(tl.float32)
    return q, kv_head, head, real


@triton.jit
def walk_row(
    query,
    k_pool,
    v_pool,
    k_scales,
    v_scales,
    kv_indices,
    row,
    low,
    high,
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
    SOFT_CAP: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    STORED: tl.constexpr,
):
    """``walk_keys`` over ``low <= t < high`` of one row, with the head of each tile row and whether it is one."""
    q, kv_head, head, real = load_queries(
        query, tl.load(row).to(tl.int64), KV_HEADS, GROUP_SIZE, GROUP, HEAD_DIM, PADDED_DIM, BLOCK_M, EXACT
    )
    maximum, total, acc = walk_keys(
        q,
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        kv_indices,
        tl.load(row + 1),
        tl.load(row + 2),
        kv_head,
        low,
        high,
        head,
        head,
        KV_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        PAGE_SIZE,
        NUM_PAGES,
        BLOCK_M,
        BLOCK_T,
        SCALE,
        SOFT_CAP,
        False,
        EXACT,
        PARTS,
        STORED,
    )
    return maximum, total, acc, head, real


@triton.jit
def decode_whole_kernel(
    query,
    k_pool,
    v_pool,
    kv_indices,
    rows,
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
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    STORED: tl.constexpr,
):
    """Grid ``(KV_HEADS * ceil(GROUP_SIZE / GROUP), R)``: one program walks a row's keys and writes its output.

    ``rows``: int32 ``[R, 6]``, see ``triton_work.ROW_FIELDS``. Scales and ``STORED``: see ``walk_keys``.
    """
    row = rows + tl.program_id(1) * 6
    low = tl.load(row + 3)
    high = tl.load(row + 4)
    if low >= high:
        return
    maximum, total, acc, head, real = walk_row(
        query,
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        kv_indices,
        row,
        low,
        high,
        KV_HEADS,
        GROUP_SIZE,
        GROUP,
        HEAD_DIM,
        PADDED_DIM,
        PAGE_SIZE,
        NUM_PAGES,
        BLOCK_M,
        BLOCK_T,
        SCALE,
        SOFT_CAP,
        EXACT,
        PARTS,
        STORED,
    )
    sink = total
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0)
    result = with_sink(maximum, total, acc, sink, HAS_SINKS)
    dims = tl.arange(0, PADDED_DIM)
    token = tl.load(row).to(tl.int64)
    element = (token * (KV_HEADS * GROUP_SIZE) + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output + element, result.to(output.dtype.element_ty), mask=real[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def decode_split_kernel(
    query,
    k_pool,
    v_pool,
    kv_indices,
    rows,
    k_scales,
    v_scales,
    maxima,
    totals,
    values,
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
    SOFT_CAP: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    STORED: tl.constexpr,
):
    """Grid ``(KV_HEADS * ceil(GROUP_SIZE / GROUP), S, R)``: one program walks one piece of a row's keys.

    ``maxima``, ``totals``: float32 ``[S, R, heads]``. ``values``: float32 ``[S, R, heads, HEAD_DIM]``.
    """
    split = tl.program_id(1)
    row_number = tl.program_id(2)
    row = rows + row_number * 6
    piece = tl.load(row + 5)
    low = tl.load(row + 3) + split * piece
    high = tl.minimum(tl.load(row + 4), low + piece)
    if low >= high:
        return
    maximum, total, acc, head, real = walk_row(
        query,
        k_pool,
        v_pool,
        k_scales,
        v_scales,
        kv_indices,
        row,
        low,
        high,
        KV_HEADS,
        GROUP_SIZE,
        GROUP,
        HEAD_DIM,
        PADDED_DIM,
        PAGE_SIZE,
        NUM_PAGES,
        BLOCK_M,
        BLOCK_T,
        SCALE,
        SOFT_CAP,
        EXACT,
        PARTS,
        STORED,
    )
    dims = tl.arange(0, PADDED_DIM)
    part = (split * tl.num_programs(2) + row_number).to(tl.int64) * (KV_HEADS * GROUP_SIZE) + head
    tl.store(maxima + part, maximum, mask=real)
    tl.store(totals + part, total, mask=real)
    tl.store(values + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=real[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def merge_kernel(
    maxima,
    totals,
    values,
    rows,
    sinks,
    output,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Grid ``(NUM_HEADS, R)``: the pieces of one row and head, weighed by their log-sum-exp, become its output."""
    head = tl.program_id(0)
    row_number = tl.program_id(1)
    row = rows + row_number * 6
    low = tl.load(row + 3)
    high = tl.load(row + 4)
    if low >= high:
        return
    dims = tl.arange(0, PADDED_DIM)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, PADDED_DIM], tl.float32)
    stride = tl.num_programs(1).to(tl.int64) * NUM_HEADS
    for split in tl.range(0, tl.cdiv(high - low, tl.load(row + 5))):
        part = split * stride + row_number * NUM_HEADS + head
        new_maximum = tl.maximum(maximum, tl.load(maxima + part))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        factor = tl.exp2(maximum - shift)
        weight = tl.exp2(tl.load(maxima + part) - shift)
        total = total * factor + tl.load(totals + part) * weight
        piece = tl.load(values + part * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        acc = acc * factor[:, None] + piece[None, :] * weight[:, None]
        maximum = new_maximum
    sink = total
    if HAS_SINKS:
        sink = tl.zeros([1], tl.float32) + tl.load(sinks + head)
    result = with_sink(maximum, total, acc, sink, HAS_SINKS)
    element = (tl.load(row).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(output + element[None, :], result.to(output.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])
