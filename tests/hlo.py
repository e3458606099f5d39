"""Reading optimised HLO text: instructions, who reads whom, and which collectives meet which values.

For:        assertions about what XLA made of a program: no pool is gathered, nothing stands between append and attend.
Not for:    executing or timing anything.
May import: the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "reduce-scatter",
    "ragged-all-to-all",
)
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<opcode>[a-z][\w-]*)\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_VIEWS = ("get-tuple-element", "tuple", "bitcast", "copy", "copy-start", "copy-done", "reshape", "optimization-barrier")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO.

    Attributes:
      computation, name: of it. type: its result's, such as ``f32[16,8,1,16]{3,2,1,0}``. opcode: such as ``fusion``.
      operands: names it reads. source: the traced operation it came from (``op_name``), "" if unknown.
      text: the whole line.
    """

    computation: str
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    source: str
    text: str

    @property
    def is_collective(self) -> bool:
        return self.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def instructions(hlo: str) -> list[Instruction]:
    """Every instruction of every computation."""
    found, computation = [], ""
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            computation = opened["name"]
        elif match := _INSTRUCTION.match(line):
            arguments = re.split(r"\), |\)$", match["rest"], maxsplit=1)[0]
            source = re.search(r'op_name="([^"]*)"', line)
            found.append(
                Instruction(
                    computation,
                    match["name"],
                    match["type"],
                    match["opcode"],
                    tuple(re.findall(r"%([\w.-]+)", arguments)),
                    source[1] if source else "",
                    line,
                )
            )
    return found


def dims_of(shape: Iterable[int]) -> str:
    """A shape as HLO prints it, without the element type."""
    return f"[{','.join(map(str, shape))}]"


def collectives_touching(hlo: str, shapes: Iterable[Iterable[int]]) -> list[str]:
    """Collectives that read or make an array of one of these shapes."""
    wanted, all_of = [dims_of(shape) for shape in shapes], instructions(hlo)
    types = {(one.computation, one.name): one.type for one in all_of}
    return [
        one.text.strip()
        for one in all_of
        if one.is_collective
        and any(
            dims in text
            for dims in wanted
            for text in (one.type, *(types.get((one.computation, name), "") for name in one.operands))
        )
    ]


def collectives_inside(hlo: str, scope: str) -> list[str]:
    """Collectives traced inside a named scope, such as ``shard_map``; not those that XLA puts at its border."""
    return [
        one.text.strip()
        for one in instructions(hlo)
        if one.is_collective and scope in one.source and one.source.rsplit(scope, 1)[1].strip("/")
    ]


def made_by(hlo: str, reader: Instruction, operand: int) -> Instruction:
    """Who made an operand, looking through tuples, views and copies of the same computation."""
    by_name = {one.name: one for one in instructions(hlo) if one.computation == reader.computation}
    one = by_name[reader.operands[operand]]
    while one.opcode in _VIEWS:
        one = by_name[one.operands[0]]
    return one


def custom_calls(hlo: str, target: str) -> list[Instruction]:
    """Calls of one foreign function."""
    return [
        one for one in instructions(hlo) if one.opcode == "custom-call" and f'custom_call_target="{target}"' in one.text
    ]
