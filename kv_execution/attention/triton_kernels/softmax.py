"""The online softmax that attend and decode share: one tile of query rows walks a range of one request's keys.

For:        scores, weights and their sums in float32, whatever pools and queries hold, 8 bits and a scale among it.
Not for:    choosing rows, ranges or tiles.
May import: triton.

Scores are kept in units of log 2, so that exponentials are ``exp2``. Masks select, they never add.
"""

import triton
import triton.language as tl


@triton.jit
def log2_scores(products, SCALE: tl.constexpr, SOFT_CAP: tl.constexpr):
    """``query @ key`` scaled, capped (0.0 is no cap) and in units of log 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if SOFT_CAP == 0.0:
        scores = products * (SCALE * LOG2E)
    else:
        ratio = products * (SCALE / SOFT_CAP)
        # 1 - 2 / (exp(2x) + 1) loses small ratios to cancellation; the series loses large ones.
        square = ratio * ratio
        series = ratio * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        closed = 1.0 - 2.0 / (tl.exp2(ratio * (2.0 * LOG2E)) + 1.0)
        scores = tl.where(square < 0.04, series, closed) * (SOFT_CAP * LOG2E)
    return scores


@triton.jit
def widened(stored, STORED: tl.constexpr, DTYPE: tl.constexpr):
    """What ``STORED`` elements are, without their scales, as ``DTYPE``: float32, bfloat16 or float16, all exact.

    fp8 (sign, 4 bits of exponent with bias 7, 3 of mantissa) is widened by integer arithmetic: no device's own fp8 type
    is asked for, and no subnormal float is made on the way, which some programs flush.
    """
    if STORED == 1:
        number = stored.to(tl.float32)
    else:
        bits = stored.to(tl.int32)
        magnitude = (((bits & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        # Exponent 0 reads as (1 + m / 8) / 128 and is m / 512: less, and what the second has; elsewhere that is more.
        magnitude = tl.minimum(magnitude, 2.0 * magnitude - 0.015625)
        number = (magnitude.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    if DTYPE == tl.bfloat16:
        # Eight bits of precision at most: what is cut off is zeros, and nothing has to be rounded.
        number = (number.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        number = number.to(DTYPE)
    return number


@triton.jit
def add_weighted(acc, weights, v, EXACT: tl.constexpr, PARTS: tl.constexpr):
    """``acc + weights @ v``. Half-precision values meet float32 weights as a sum of ``PARTS`` half-precision parts."""
    if EXACT:
        acc = tl.dot(weights, v.to(tl.float32), acc, input_precision="ieee")
    else:
        part = weights.to(v.dtype)
        acc = tl.dot(part, v, acc)
        if PARTS > 1:
            rest = weights - part.to(tl.float32)
            part = rest.to(v.dtype)
            acc = tl.dot(part, v, acc)
            if PARTS > 2:
                part = (rest - part.to(tl.float32)).to(v.dtype)
                acc = tl.dot(part, v, acc)
    return acc


@triton.jit
def walk_keys(
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
    high,
    oldest,
    newest,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_PAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    RAGGED: tl.constexpr,
    EXACT: tl.constexpr,
    PARTS: tl.constexpr,
    STORED: tl.constexpr,
):
    """Maximum, sum of weights and weighted values (``[M]``, ``[M]``, ``[M, PADDED_DIM]``) of keys ``low <= t < high``.

    Args:
      q: ``[M, PADDED_DIM]``, zeros past ``HEAD_DIM``.
      k_scales, v_scales: float32 ``[pages, page, KV_HEADS]``; read only if ``STORED``, which is 0 for pools without
        scales, 1 for int8 and 2 for the bits of fp8.
      first_index, num_listed: the request's part of ``kv_indices``; its first page holds position 0 of ``low``.
      oldest, newest: int32 ``[M]``, the first and last key that each row sees; read only if ``RAGGED``.

    Every key that is read is the request's own: past the last one, the last one again, which counts for nothing. So
    loads need no mask, and what a slot that nobody owns holds is never read. A page outside the pool, or a list too
    short for its keys, makes the tile NaN; nothing outside pool and list is read for it.

    Quantised pools: a key's score and a value's weight take the scale; the products are of what is stored, exact in the
    query's type. With half-precision queries values are bfloat16, also where those are float16: a weight times a scale
    may be as large or small as any float32, which bfloat16 holds and float16 does not.
    """
    dims = tl.arange(0, PADDED_DIM)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    outside = tl.zeros([BLOCK_T], tl.int32)
    last_listed = tl.maximum(num_listed - 1, 0)
    for start in tl.range(low, high, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        held = tl.minimum(token, high - 1)
        page = tl.load(kv_indices + first_index + tl.minimum(held // PAGE_SIZE, last_listed))
        outside = outside | ((page < 0) | (page >= NUM_PAGES)).to(tl.int32)
        page = tl.minimum(tl.maximum(page, 0), NUM_PAGES - 1)
        slot = page.to(tl.int64) * PAGE_SIZE + held % PAGE_SIZE
        row = slot * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
        if HEAD_DIM == PADDED_DIM:
            k = tl.load(k_pool + row[None, :] + dims[:, None])
            v = tl.load(v_pool + row[:, None] + dims[None, :])
        else:
            k = tl.load(k_pool + row[None, :] + dims[:, None], mask=(dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_pool + row[:, None] + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0)
        if STORED > 0:
            k = widened(k, STORED, q.dtype)
        products = tl.dot(q, k.to(tl.float32), input_precision="ieee") if EXACT else tl.dot(q, k)
        if STORED > 0:
            products = products * tl.load(k_scales + slot * KV_HEADS + kv_head)[None, :]
        scores = log2_scores(products, SCALE, SOFT_CAP)
        if RAGGED:
            seen = (token[None, :] >= oldest[:, None]) & (token[None, :] <= newest[:, None])
        else:
            seen = (token < high)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # Nothing seen yet: subtract 0, so that exp2(-inf - 0) is 0 where exp2(-inf + inf) would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        factor = tl.exp2(maximum - shift)
        total = total * factor + tl.sum(weights, 1)
        if STORED > 0:
            v = widened(v, STORED, tl.float32 if EXACT else tl.bfloat16)
            weights = weights * tl.load(v_scales + slot * KV_HEADS + kv_head)[None, :]
        acc = add_weighted(acc * factor[:, None], weights, v, EXACT, PARTS)
        maximum = new_maximum
    missing = (tl.max(outside, 0) > 0) | ((high - 1) // PAGE_SIZE >= num_listed)
    total += tl.where(missing, float("nan"), 0.0)
    return maximum, total, acc


@triton.jit
def with_sink(maximum, total, acc, sink, HAS_SINKS: tl.constexpr):
    """``acc / total`` with one more logit (``sink``, ``[M]``, natural units) in the sum; zeros where no key is seen."""
    LOG2E: tl.constexpr = 1.4426950408889634
    divisor = total
    if HAS_SINKS:
        log2_sink = sink * LOG2E
        joint = tl.maximum(maximum, log2_sink)
        shift = tl.where(joint == float("-inf"), 0.0, joint)
        factor = tl.exp2(maximum - shift)
        acc = acc * factor[:, None]
        divisor = total * factor + tl.exp2(log2_sink - shift)
    nothing = total == 0.0
    return tl.where(nothing[:, None], 0.0, acc / tl.where(nothing, 1.0, divisor)[:, None])
