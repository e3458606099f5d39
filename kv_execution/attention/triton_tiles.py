"""Tile sizes of the Triton kernels, as data.

For:        how many query rows and keys one program holds, with how many warps and pipeline stages.
Not for:    the kernels, or finding out what a device is (triton_bridge.py).
May import: kv_common, kv_control, jax.

Held by the offline table (``python -m benchmarks.triton_offline``): no entry spills a register on any target.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_execution.attention.triton_bridge import GpuTarget


@dataclass(frozen=True, slots=True)
class Tile:
    """One program's share.

    Attributes:
      block_m: query rows (tokens x heads of one KV head). block_t: keys at a time.
      num_warps: of 32 threads on NVIDIA, 64 on AMD. num_stages: key blocks on their way at once.
    """

    block_m: int
    block_t: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The power of two, at least 16, that holds ``size``.

    >>> padded(3), padded(80), padded(128)
    (16, 128, 128)
    """
    return max(16, 1 << (size - 1).bit_length())


def decode_tile(target: GpuTarget, *, head_dim: int, exact: bool, quantised: bool) -> Tile:
    """Of one token's query heads of one KV head; more than 16 heads take several tiles.

    Args:
      exact: whether products are made of float32 numbers, which tensor cores do not take.
      quantised: whether pools hold 8 bits and scales; widening them takes registers.
    """
    if exact:
        return Tile(16, 16, 4, 1)
    blackwell = target.vendor == "cuda" and int(target.arch) >= 100
    num_stages = 2 if target.vendor == "rocm" else 3
    if padded(head_dim) > 128:
        return Tile(16, 32, 4, 2 if quantised else num_stages)
    if blackwell:
        return Tile(16, 16 if quantised else 32, 4, 4)
    return Tile(16, 32 if quantised else 64, 4, num_stages)


def attend_tile(target: GpuTarget, *, head_dim: int, exact: bool, quantised: bool) -> Tile:
    """Of neighbouring tokens' query heads of one KV head."""
    if exact:
        return Tile(16, 16, 4, 1)
    arch = int(target.arch) if target.vendor == "cuda" else None
    if padded(head_dim) > 128:
        if quantised and arch is None:
            return Tile(64, 16, 4, 2)
        before_this = arch is not None and arch < (100 if quantised else 90)
        return Tile(32 if before_this else 64, 32, 4, 2)
    if arch is not None and arch < 90:
        return Tile(64, 32, 8 if quantised else 4, 2)
    return Tile(64, 32 if quantised and arch is None else 64, 4, 2)


def heads_per_tile(group_size: int, block_m: int) -> int:
    """Query heads of one KV head that share a tile: all of them where they fit, else equal shares.

    >>> heads_per_tile(3, 16), heads_per_tile(16, 16), heads_per_tile(100, 64)
    (3, 16, 50)
    """
    blocks = -(-group_size // block_m)
    return -(-group_size // blocks)
