"""From a Triton kernel to an XLA custom call: the one place that knows how.

For:        launching a ``triton.jit`` kernel inside a jitted program, also inside ``jax.shard_map``, arrays written in
            place included; saying whether that is possible here.
Not for:    any kernel, tile size or grid.
May import: jax; triton and jax_triton inside functions.

Two routes, both replaceable, since neither side's interface is settled. A kernel's pointer parameters are its inputs,
then the arrays it writes in place, then its outputs.

- ``jax_triton``: Triton compiles, the call carries the program (target ``triton_kernel_call_ffi``). NVIDIA's default.
- ``xla``: the call carries Triton's IR and XLA compiles it (target ``__gpu$xla.gpu.triton``). AMD's default, where
  jax-triton 0.4.1 does not work with Triton 3.9; needs nothing but triton and jax.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from kv_common.errors import ConfigError, UnsupportedError

JAX_TRITON_TARGET, XLA_TARGET = "triton_kernel_call_ffi", "__gpu$xla.gpu.triton"
ROUTES = ("jax_triton", "xla")

_ELEMENT_TYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
}


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What kernels are compiled for.

    Attributes:
      vendor: ``"cuda"`` or ``"rocm"``. arch: such as ``"90"`` or ``"gfx942"``.
      num_sms: multiprocessors (compute units on AMD).
      route: one of ``ROUTES``; None takes the vendor's default.
    """

    vendor: str
    arch: str
    num_sms: int
    route: str | None = None

    @property
    def warp_size(self) -> int:
        """Threads of a warp."""
        return 64 if self.vendor == "rocm" else 32

    @property
    def effective_route(self) -> str:
        """The route that is taken.

        Raises:
          ConfigError: ``route`` is not a known one.
        """
        route = self.route or ("jax_triton" if self.vendor == "cuda" else "xla")
        if route not in ROUTES:
            raise ConfigError(f"route={route!r}: choose one of {', '.join(ROUTES)}")
        return route


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch.

    Attributes:
      kernel: the ``triton.jit`` function.
      inputs, in_place: arrays it reads, and arrays it writes in place (donated to the call, returned first).
      outputs: shape and dtype of arrays it makes; what it does not write there is undefined.
      grid: up to three numbers of programs. constants: its compile-time parameters.
    """

    kernel: Any
    inputs: Sequence[jax.Array]
    in_place: Sequence[jax.Array]
    outputs: Sequence[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int


Launcher = Callable[[KernelLaunch, GpuTarget], tuple[jax.Array, ...]]
"""Returns the arrays written in place, then the outputs."""


def launch(call: KernelLaunch, target: GpuTarget) -> tuple[jax.Array, ...]:
    """Put a launch into the program that is being traced."""
    return {"jax_triton": _launch_by_jax_triton, "xla": _launch_by_xla}[target.effective_route](call, target)


def missing(route: str | None = None) -> str | None:
    """Why no kernel can be launched by a route in this installation; None when it can."""
    modules = ["triton"] + (["jax_triton"] if route in (None, "jax_triton") else [])
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"{module.replace('_', '-')} is not installed: pip install 'maxtext-paged[gpu]'"
    return None


def missing_cuda_plugin() -> str | None:
    """Why the ``jax_triton`` route cannot even be lowered for NVIDIA here; None when it can."""
    if importlib.util.find_spec("jax_cuda12_plugin") is None and importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax's CUDA plugin, which makes the call, is not installed"
    return missing("jax_triton")


def local_target() -> GpuTarget:
    """The GPU of this process.

    Raises:
      UnsupportedError: it has none.
    """
    device = jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda", "rocm"):
        raise UnsupportedError(f"paged_backend=triton runs on GPUs, and this process has {device.device_kind}")
    vendor = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    arch = str(device.compute_capability).split(":")[0]
    return GpuTarget(vendor, arch.replace(".", "") if vendor == "cuda" else arch, int(device.core_count))


def triton_target(target: GpuTarget) -> Any:
    """Triton's own description of a target."""
    from triton.backends.compiler import GPUTarget

    if target.vendor == "cuda":
        return GPUTarget("cuda", int(target.arch), target.warp_size)
    return GPUTarget("hip", target.arch, target.warp_size)


def signature(call: KernelLaunch) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """A kernel's parameter types, and what Triton may assume of them: XLA's buffers begin at multiples of 16 bytes."""
    types = {name: "constexpr" for name in call.constants}
    pointers = [name for name in call.kernel.arg_names if name not in call.constants]
    arrays: list[Any] = [*call.inputs, *call.in_place, *call.outputs]
    for name, array in zip(pointers, arrays, strict=True):
        types[name] = f"*{_ELEMENT_TYPES[np.dtype(array.dtype).name]}"
    attributes = {(call.kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    return {name: types[name] for name in call.kernel.arg_names}, attributes


def compile_options(call: KernelLaunch) -> dict[str, Any]:
    """Options of the compiler; fused multiply-adds are asked for, since Triton is about to change the default."""
    return {"num_warps": call.num_warps, "num_stages": call.num_stages, "enable_fp_fusion": True}


def _launch_by_jax_triton(call: KernelLaunch, target: GpuTarget) -> tuple[jax.Array, ...]:
    import jax_triton

    references = [jax.new_ref(array) for array in call.in_place]
    outputs = jax_triton.triton_call(
        *call.inputs,
        *references,
        kernel=call.kernel,
        out_type=list(call.outputs),
        grid=call.grid,
        num_warps=call.num_warps,
        num_stages=call.num_stages,
        compute_capability=int(target.arch) if target.vendor == "cuda" else None,
        backend_options={"enable_fp_fusion": True},
        **call.constants,
    )
    return (*(jax.freeze(reference) for reference in references), *outputs)


def _launch_by_xla(call: KernelLaunch, target: GpuTarget) -> tuple[jax.Array, ...]:
    first, num_outputs = len(call.inputs), len(call.outputs)
    foreign = jax.ffi.ffi_call(
        XLA_TARGET,
        [*call.outputs, *_structs(call.in_place)],
        input_output_aliases={first + i: num_outputs + i for i in range(len(call.in_place))},
    )
    x, y, z = (*call.grid, 1, 1)[:3]
    results = foreign(
        *call.inputs,
        *call.in_place,
        name=call.kernel.__name__,
        ir=_ttir(call, target),
        num_stages=np.int32(call.num_stages),
        num_warps=np.int32(call.num_warps),
        grid_x=np.int32(x),
        grid_y=np.int32(y),
        grid_z=np.int32(z),
        debug=False,
    )
    return (*results[num_outputs:], *results[:num_outputs])


def _structs(arrays: Sequence[jax.Array]) -> tuple[Any, ...]:
    return tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)


def _ttir(call: KernelLaunch, target: GpuTarget) -> str:
    """Triton's IR of a launch as XLA calls it."""
    types, attributes = signature(call)
    return _cached_ttir(
        call.kernel,
        tuple(types.items()),
        tuple(attributes),
        tuple(call.constants.items()),
        tuple(compile_options(call).items()),
        len(call.in_place),
        len(call.outputs),
        target,
    )


@cache
def _cached_ttir(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    aligned: tuple[tuple[int], ...],
    constants: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
    num_in_place: int,
    num_outputs: int,
    target: GpuTarget,
) -> str:
    import triton
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource

    described = triton_target(target)
    backend = triton.compiler.make_backend(described)
    parsed = backend.parse_options(dict(options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    attributes = {index: [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(kernel, dict(types), constexprs=dict(constants), attrs=attributes)
    codegen = backend.get_codegen_implementation(parsed)
    module = source.make_ir(described, parsed, codegen, backend.get_module_map(), context)
    return with_results_in_place(str(module), num_in_place, num_outputs)


def with_results_in_place(ttir: str, num_in_place: int, num_outputs: int) -> str:
    """Triton IR whose entry also takes the results that are its arrays written in place, last and unread.

    XLA passes operands, then results; where a result is an operand, its buffer comes twice.
    """
    from jax._src.lib import triton as jaxlib_triton
    from jax._src.lib.mlir import ir

    context = ir.Context()
    jaxlib_triton.dialect.register_dialect(context)
    context.load_all_available_dialects()
    with context, ir.Location.unknown():
        module = ir.Module.parse(ttir)
        [entry] = [one for one in module.body.operations if "public" in str(one.attributes["sym_visibility"])]
        block = entry.regions[0].blocks[0]
        attributes = list(ir.ArrayAttr(entry.attributes["arg_attrs"]))
        first = len(block.arguments) - num_outputs - num_in_place
        for i in range(first, first + num_in_place):
            block.add_argument(block.arguments[i].type, ir.Location.unknown())
            attributes.append(attributes[i])
        kind = ir.FunctionType.get([argument.type for argument in block.arguments], [])
        entry.attributes["function_type"] = ir.TypeAttr.get(kind)
        entry.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
        module.operation.verify()
        return str(module)
