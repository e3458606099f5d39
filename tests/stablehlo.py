"""Reads a lowered program before XLA has compiled it: what stands between append and attend, and what aliases what.

For:        programs for devices that this machine does not have.
Not for:    compiled programs (hlo.py), or making either.
May import: the standard library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "collective_", "reduce_scatter")


@dataclass(frozen=True)
class Launched:
    """One custom call of StableHLO: its target, operands, results, and ``(result, operand)`` for each alias."""

    target: str
    operands: tuple[str, ...]
    result: str
    aliases: tuple[tuple[int, int], ...]


def launched(line: str) -> Launched:
    found = re.search(r"(%\w+)(?::\d+)? = stablehlo\.custom_call @([\w.$]+)\(([^)]*)\)", line)
    assert found is not None
    pairs = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", line)
    aliases = tuple((int(result or 0), int(operand)) for result, operand in pairs)
    return Launched(found[2], tuple(found[3].split(", ")), found[1], aliases)


def attention_regions(hlo: str) -> list[list[str]]:
    """Lines of each ``shard_map`` body, the one that opens it included."""
    regions, inside = [], False
    for line in hlo.splitlines():
        if "sdy.manual_computation" in line:
            inside = True
            regions.append([])
        if inside:
            regions[-1].append(line)
            inside = "sdy.return" not in line
    return regions


def check_in_place(
    hlo: str,
    target: str,
    *,
    local_pool: str,
    whole_pool: str,
    local_scales: str | None = None,
    whole_scales: str | None = None,
) -> None:
    """Two layers' pools go from append to decode to attend to the way out, and nothing else touches them.

    Args:
      target: of every custom call. local_pool, whole_pool: a pool's type, on one device and in all.
      local_scales, whole_scales: of a quantised pool's scales, which an append of their own writes.
    """
    regions = attention_regions(hlo)
    assert len(regions) == 2, "one of each layer"
    local = [local_pool] if local_scales is None else [local_pool, local_scales]
    whole = [whole_pool] if whole_scales is None else [whole_pool, whole_scales]
    for header, *body in regions:
        assert not [line for line in body if any(name in line for name in COLLECTIVES)]
        touching = [line for line in body if any(kind in line for kind in local)]
        *calls, last = touching
        assert all("custom_call" in line for line in calls), "a pool is read or copied elsewhere"
        *appends, decode, attend = map(launched, calls)
        assert {call.target for call in (*appends, decode, attend)} == {target}
        written = []
        for kind, append in zip(local, appends, strict=True):
            pools = tuple(re.findall(rf"(%arg\d+): {re.escape(kind)}", header))
            assert len(pools) == 2
            assert append.operands[3:] == pools and append.aliases == ((0, 3), (1, 4))
            written.append((f"{append.result}#0", f"{append.result}#1"))
        assert decode.operands[1:3] == attend.operands[1:3] == written[0]
        if local_scales is not None:
            assert decode.operands[6:8] == attend.operands[6:8] == written[1]
        assert decode.aliases == attend.aliases == ((0, 8),)
        assert attend.operands[8] == decode.result, "rows of one token and longer ones fill one output"
        results = [array for of_a_pool in zip(*written, strict=True) for array in of_a_pool]
        assert f"sdy.return {attend.result}, {', '.join(results)} :" in last
    outside = [
        line
        for line in hlo.splitlines()
        if any(kind in line for kind in whole) and not re.match(r"\s*(}|return|func)", line)
    ]
    assert all("sdy.manual_computation" in line for line in outside), "a whole pool is read or copied"
    [main] = [line for line in hlo.splitlines() if "func public @main" in line]
    kinds = "|".join(map(re.escape, whole))
    donated = re.findall(rf"(?:{kinds}) {{[^%]*tf.aliasing_output = (\d+)", main)
    assert donated == [str(i) for i in range(4 * len(whole))]
