"""What Triton makes of our kernels for GPUs that need not be here: registers, spills, shared memory, per target.

For:        the table target x kernel x registers x spills x shared memory, and the ceilings that tests hold it to.
Not for:    speed: a device decides that (benchmarks/attention.py --device gpu).
May import: the standard library, numpy, jax, kv_common, kv_execution, triton.

    python -m benchmarks.triton_offline                                   # every target and case: some minutes
    python -m benchmarks.triton_offline --targets sm_90 --cases bf16-128-g4
    python -m benchmarks.triton_offline --write                           # new ceilings, after a look at the table
    python -m benchmarks.triton_offline --page docs/gpu-kernels.md        # the page, from the ceilings: no compiling

Leaves with status 1 if a kernel spills or is above its ceiling. The launches are the backend's own, recorded.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kv_common.layout import KvStorageLayoutV1
from kv_execution.attention.triton_backend import TritonBackend
from kv_execution.attention.triton_bridge import GpuTarget, KernelLaunch, compile_options, signature, triton_target
from kv_execution.metadata import PageMetadata
from kv_execution.pool import pool_struct
from kv_execution.quantised import QUANTISED_DTYPES

CEILINGS = Path(__file__).parents[1] / "tests" / "data" / "triton_ceilings.json"
CACHE = Path(__file__).parents[1] / ".cache" / "triton"

TARGETS = {
    "sm_80": GpuTarget("cuda", "80", 108),
    "sm_90": GpuTarget("cuda", "90", 132),
    "sm_100": GpuTarget("cuda", "100", 148),
    "gfx942": GpuTarget("rocm", "gfx942", 304),
    "gfx950": GpuTarget("rocm", "gfx950", 256),
}
SHARED_LIMITS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
"""Bytes of shared memory (LDS) that one program may have."""

KERNELS = ("append_kernel", "attend_kernel", "decode_whole_kernel", "decode_split_kernel", "merge_kernel")
"""Of a case; a quantised one has ``APPEND_SCALES`` too, the append kernel once more."""
APPEND_SCALES = "append_kernel (scales)"

PAGE_SIZE, NUM_PAGES = 16, 4096
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int8": "i8", "float8_e4m3fn": "f8"}


@dataclass(frozen=True)
class Case:
    """One geometry.

    Attributes:
      dtype: of the pools. plain: full attention; else a window, a cap and sinks at once.
      activations: of queries, where pools are quantised; others are of their pools' dtype.
    """

    dtype: str
    head_dim: int
    group_size: int
    plain: bool = True
    activations: str = "bfloat16"

    @property
    def name(self) -> str:
        other = self.quantised and self.activations != "bfloat16"
        ending = ("" if self.plain else "-options") + (f"-{SHORT[self.activations]}" if other else "")
        return f"{SHORT[self.dtype]}-{self.head_dim}-g{self.group_size}{ending}"

    @property
    def quantised(self) -> bool:
        return self.dtype in QUANTISED_DTYPES

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of what is compiled for it."""
        return (*KERNELS, APPEND_SCALES) if self.quantised else KERNELS


CASES = (
    *(Case("bfloat16", dim, 4) for dim in (64, 80, 96, 128, 256)),
    Case("bfloat16", 256, 8, plain=False),
    Case("float16", 128, 4),
    *(Case("float32", dim, 4) for dim in (128, 256)),
    *(Case(dtype, dim, 4) for dtype in QUANTISED_DTYPES for dim in (64, 80, 128, 256)),
    *(Case(dtype, 256, 8, plain=False) for dtype in QUANTISED_DTYPES),
    Case("int8", 128, 4, activations="float16"),
    Case("int8", 256, 4, activations="float32"),
    Case("float8_e4m3fn", 128, 4, activations="float32"),
)
"""Every head size that the backend says it serves, each element type, and all options at once."""


@dataclass(frozen=True)
class Compiled:
    """What one kernel came to.

    Attributes:
      registers: of a thread (AMD: vector registers, accumulation registers included). spilled_bytes: of a thread.
      shared_bytes: of a program. num_threads: of a program.
    """

    target: str
    case: str
    kernel: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_threads: int


def recorded_launches(
    case: Case, target: GpuTarget, *, backend: TritonBackend | None = None
) -> dict[str, KernelLaunch]:
    """Every launch of a step of this geometry: with few rows, which are cut, and with many, which are not."""
    launches: dict[str, KernelLaunch] = {}

    def record(call: KernelLaunch, target: GpuTarget) -> tuple[jax.Array, ...]:
        structs = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in part] for part in (call.inputs, call.in_place)]
        name = call.kernel.__name__
        if case.quantised and name == KERNELS[0] and structs[1][0].dtype == jnp.float32:
            name = APPEND_SCALES
        launches[name] = replace(call, inputs=structs[0], in_place=structs[1])
        return tuple(jnp.zeros(x.shape, x.dtype) for x in (*structs[1], *call.outputs))

    backend = replace(backend or TritonBackend(), target=target, launcher=record)
    kv_heads, heads = 2, 2 * case.group_size
    pool = pool_struct(KvStorageLayoutV1(1, NUM_PAGES, PAGE_SIZE, kv_heads, case.head_dim, case.dtype))
    activations = case.activations if case.quantised else case.dtype
    options: dict[str, Any] = {"scale": 0.125, "sliding_window": None, "soft_cap": None}
    if not case.plain:
        options = {"scale": 1.0, "sliding_window": 512, "soft_cap": 50.0}
    for num_rows in (8, 4096):
        pages = PageMetadata(*(jax.ShapeDtypeStruct((num_rows,), jnp.int32) for _ in range(9)))
        ends = jax.ShapeDtypeStruct((num_rows + 1,), jnp.int32)
        listed = jax.ShapeDtypeStruct((64 * num_rows,), jnp.int32)
        pages = replace(pages, query_start_loc=ends, kv_indptr=ends, kv_indices=listed)
        query = jax.ShapeDtypeStruct((num_rows, heads, case.head_dim), activations)
        new = jax.ShapeDtypeStruct((num_rows, kv_heads, case.head_dim), activations)
        sinks = None if case.plain else jax.ShapeDtypeStruct((heads,), jnp.float32)

        def step(query: Any, new: Any, k: Any, v: Any, pages: PageMetadata, sinks: Any) -> Any:
            k, v = backend.append(k, v, new, new, pages.slot_mapping)
            return backend.attend(query, k, v, pages, sinks=sinks, **options)

        jax.eval_shape(step, query, new, pool, pool, pages, sinks)
    return launches


def compile_launch(call: KernelLaunch, name: str, case: str, kernel: str) -> Compiled:
    """Compile one launch (``kernel``: its name in the table) for a target and read its resources off the result."""
    import triton
    from triton.compiler import ASTSource

    triton.knobs.cache.dir = str(CACHE)
    types, attributes = signature(call)
    source = ASTSource(call.kernel, types, constexprs=dict(call.constants), attrs=attributes)
    made = triton.compile(source, target=triton_target(TARGETS[name]), options=compile_options(call))
    if "cubin" in made.asm:
        registers, spilled = _cubin_resources(made.asm["cubin"])
    else:
        listing = made.asm["amdgcn"]
        counts = {
            key: int(re.search(rf"\.{key}:\s+(\d+)", listing)[1])  # type: ignore[index]
            for key in ("vgpr_count", "private_segment_fixed_size")
        }
        registers = counts["vgpr_count"]
        # Scalar registers spill into lanes of vector registers; what is in memory is the private segment.
        spilled = counts["private_segment_fixed_size"]
    threads = call.num_warps * TARGETS[name].warp_size
    return Compiled(name, case, kernel, registers, spilled, int(made.metadata.shared), threads)


@cache
def _cuobjdump() -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of local memory it has: stack and spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_cuobjdump(), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def compiled(targets: Sequence[str], cases: Sequence[Case]) -> Iterator[Compiled]:
    """Compile every kernel of every case for every target."""
    for case in cases:
        for name in targets:
            for kernel, call in recorded_launches(case, TARGETS[name]).items():
                yield compile_launch(call, name, case.name, kernel)


Ceilings = dict[str, dict[str, list[int]]]
"""``{target: {"case kernel": [registers, spilled bytes, shared bytes]}}``, the most that a kernel may need."""


def ceilings() -> Ceilings:
    """Those that are recorded."""
    return json.loads(CEILINGS.read_text(encoding="utf-8"))


def as_json(limits: Ceilings) -> str:
    """One line for each kernel, so that a change of one shows as one."""
    parts = []
    for target in sorted(limits):
        lines = [f"  {json.dumps(name)}: {json.dumps(limits[target][name])}" for name in sorted(limits[target])]
        parts.append(f" {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


PAGE_OPENING = """# What the GPU kernels need of five GPUs

Written by `python -m benchmarks.triton_offline --page docs/gpu-kernels.md` from `tests/data/triton_ceilings.json`; a
test compares the two. Compiled without a GPU by Triton and, for NVIDIA, its own `ptxas`: 32-bit registers of a thread
(AMD: vector registers, accumulation registers included), bytes of a thread in local memory (spills and stack), bytes of
shared memory of a program. `make test` compiles one geometry for each of them and holds it to these ceilings,
`make test-long` compiles all.

A geometry is the pools' element type, head size and query heads of a KV head; `options` has a window, a cap and sinks
at once. Queries are of the pools' type; over pools with scales (`i8`: int8, `f8`: float8_e4m3fn) they are bfloat16
unless a type stands at the end. `append_kernel` writes those in two launches, values and scales:
{cases}."""


def page(limits: Ceilings) -> str:
    """``docs/gpu-kernels.md``: what is recorded, a table for each target."""
    lines = [PAGE_OPENING.format(cases=",\n".join(f"`{case.name}`" for case in CASES))]
    for target in TARGETS:
        lines += [
            "",
            f"## {target}: at most {SHARED_LIMITS[target]} bytes of shared memory",
            "",
            "| geometry | kernel | registers | spilled | shared |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
        for case in CASES:
            for kernel in case.kernels:
                found = limits.get(target, {}).get(f"{case.name} {kernel}")
                if found is not None:
                    lines.append(f"| `{case.name}` | `{kernel}` | " + " | ".join(map(str, found)) + " |")
    return "\n".join(lines) + "\n"


def complaint(one: Compiled, limits: Ceilings) -> str | None:
    """What is wrong with a compiled kernel; None if it keeps within its ceilings."""
    where = f"{one.target} {one.case} {one.kernel}"
    if one.spilled_bytes:
        return f"{where}: {one.spilled_bytes} bytes a thread in local memory"
    if one.shared_bytes > SHARED_LIMITS[one.target]:
        return f"{where}: {one.shared_bytes} bytes of shared memory, the device has {SHARED_LIMITS[one.target]}"
    ceiling = limits.get(one.target, {}).get(f"{one.case} {one.kernel}")
    if ceiling is None:
        return f"{where}: no ceiling is recorded"
    registers, _, shared = ceiling
    if one.registers > registers or one.shared_bytes > shared:
        used = f"{one.registers} registers, {one.shared_bytes} bytes shared"
        return f"{where}: {used}; the ceiling is {registers} and {shared}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {case.name: case for case in CASES}
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=tuple(TARGETS))
    parser.add_argument("--cases", nargs="+", choices=names, default=tuple(names))
    parser.add_argument("--write", action="store_true", help="keep what is printed as the new ceilings")
    parser.add_argument("--page", type=Path, help="write what is recorded as a page, and compile nothing")
    options = parser.parse_args(arguments)
    limits = ceilings() if CEILINGS.exists() else {}
    if options.page is not None:
        options.page.write_text(page(limits), encoding="utf-8")
        return 0
    wrong = []
    print(f"{'target':8}{'case':22}{'kernel':22}{'threads':>8}{'registers':>10}{'spilled':>8}{'shared':>8}")
    for one in compiled(options.targets, [names[name] for name in options.cases]):
        if options.write:
            entry = [one.registers, one.spilled_bytes, one.shared_bytes]
            limits.setdefault(one.target, {})[f"{one.case} {one.kernel}"] = entry
            CEILINGS.write_text(as_json(limits), encoding="utf-8")
        found = complaint(one, limits)
        wrong += [found] if found else []
        print(
            f"{one.target:8}{one.case:22}{one.kernel:22}{one.num_threads:8}{one.registers:10}{one.spilled_bytes:8}"
            f"{one.shared_bytes:8}{'  !' if found else ''}",
            flush=True,
        )
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
