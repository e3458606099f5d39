"""The matrix products of a decode step on this CPU: native ones against XLA's, and against what the cores can read.

For:        milliseconds of all products of one step by the number of rows, all ways in turn in one run, and their
            share of the read bandwidth measured beside them: what kv_execution/products.py takes its row limit from.
            ``--half`` adds bfloat16 weights, which the kernel widens as it reads them.
Not for:    whole steps, attention (benchmarks/attention.py), or sampling.
May import: the standard library, numpy, jax, kv_common, kv_execution.

    python -m benchmarks.products --json out/products.json
    python -m benchmarks.products --rows 1 4 16 --half

Leaves with status 1 if an arm's products were not computed by the kernel it names.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.attention import bandwidth, machine
from benchmarks.records import Figure, WrongPath
from kv_execution.attention.native import native_threads
from kv_execution.products import native_product, num_native_products

Product = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Model:
    """Sizes that decide a step's products."""

    layers: int
    embedding: int
    queries: int
    keys: int
    mlp: int
    vocabulary: int

    def kernels(self) -> dict[str, tuple[int, int]]:
        """``[depth, columns]`` of a layer's products."""
        emb, mlp = self.embedding, self.mlp
        return {
            "query": (emb, self.queries),
            "key": (emb, self.keys),
            "value": (emb, self.keys),
            "out": (self.queries, emb),
            "gate": (emb, mlp),
            "up": (emb, mlp),
            "down": (mlp, emb),
        }

    @property
    def num_products(self) -> int:
        """Of one step."""
        return self.layers * len(self.kernels()) + 1

    @property
    def num_weights(self) -> int:
        """That one step reads."""
        return self.layers * sum(a * b for a, b in self.kernels().values()) + self.embedding * self.vocabulary


MODELS = {
    "smollm2-135m": Model(30, 576, 576, 192, 1536, 49152),
    "qwen3-0.6b": Model(28, 1024, 2048, 1024, 3072, 151936),
}


@dataclass(frozen=True)
class Cell:
    """All products of one step, one way; rates are those of the median pass."""

    model: str
    rows: int
    arm: str
    milliseconds: Figure
    gigabytes_per_second: float
    share_of_read_bandwidth: float
    gigaflops_per_second: float


def step_of(product: Product, model: Model) -> Callable[..., jax.Array]:
    """A program of one step's products in their order, each waiting for the one before as in a model."""

    @jax.jit
    def step(x: jax.Array, layers: list[dict[str, jax.Array]], head: jax.Array) -> jax.Array:
        for kernels in layers:
            query, key, value = (product(x, kernels[name]) for name in ("query", "key", "value"))
            mixed = query + jnp.tile(key + value, (1, model.queries // model.keys))
            x = x + product(mixed, kernels["out"])
            gated = jax.nn.silu(product(x, kernels["gate"])) * product(x, kernels["up"])
            x = x + product(gated, kernels["down"])
            x = x / (1 + jnp.max(jnp.abs(x)))
        return product(x, head)

    return step


def weights_of(model: Model, seed: int) -> tuple[list[dict[str, jax.Array]], jax.Array]:
    """Random float32 weights, exactly representable in bfloat16 so that all arms compute the same."""
    rng = np.random.default_rng(seed)

    def one(depth: int, columns: int) -> jax.Array:
        values = rng.standard_normal((depth, columns), dtype=np.float32) * np.float32(0.02)
        return jnp.asarray((values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32))

    layers = [{name: one(*shape) for name, shape in model.kernels().items()} for _ in range(model.layers)]
    return layers, one(model.embedding, model.vocabulary)


def measure(name: str, rows: Sequence[int], *, half: bool, passes: int, seed: int) -> list[Cell]:
    """Time every arm at each number of rows, arms in turn.

    Raises:
      WrongPath: an arm did not run what it is named after, or computed something else than the others.
    """
    model = MODELS[name]
    float32 = weights_of(model, seed)
    weights = {"xla": float32, "native": float32}
    if half:
        weights["native-bfloat16"] = jax.tree.map(lambda kernel: kernel.astype(jnp.bfloat16), float32)
    steps = {arm: step_of(jnp.matmul if arm == "xla" else native_product, model) for arm in weights}
    threads, cells = native_threads(), []
    for count in rows:
        x = jax.random.normal(jax.random.key(seed), (count, model.embedding)) * 0.1
        results = {arm: np.asarray(steps[arm](x, *weights[arm])) for arm in weights}
        for arm, result in results.items():
            if not np.allclose(result, results["xla"], rtol=0, atol=1e-4 * np.abs(results["xla"]).max()):
                raise WrongPath(f"{arm}, {count} rows: another result than xla's")
        seconds: dict[str, list[float]] = {arm: [] for arm in weights}
        for _ in range(passes):
            for arm, step in steps.items():
                before = num_native_products()
                start = time.perf_counter()
                step(x, *weights[arm]).block_until_ready()
                seconds[arm].append(time.perf_counter() - start)
                ran, wanted = num_native_products() - before, 0 if arm == "xla" else model.num_products
                if ran != wanted:
                    raise WrongPath(f"{arm}, {count} rows: {ran} native products in a step, not {wanted}")
        readable = bandwidth(threads, seconds=0.3)
        for arm, times in seconds.items():
            figure = records.figure([1e3 * one for one in times])
            middle = figure.median / 1e3
            rate = model.num_weights * (2 if arm.endswith("bfloat16") else 4) / middle / 1e9
            cells.append(
                Cell(
                    model=name,
                    rows=count,
                    arm=arm,
                    milliseconds=figure,
                    gigabytes_per_second=rate,
                    share_of_read_bandwidth=rate / readable,
                    gigaflops_per_second=2 * model.num_weights * count / middle / 1e9,
                )
            )
    return cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that were asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 2, 4, 8, 16, 32, 64))
    parser.add_argument("--half", action="store_true", help="bfloat16 weights too, widened in registers")
    parser.add_argument("--passes", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    try:
        cells = measure(options.model, options.rows, half=options.half, passes=options.passes, seed=options.seed)
    except WrongPath as error:
        print(f"benchmarks.products: {error}", file=sys.stderr)
        return 1
    print(f"{'model':14}{'rows':>5}  {'arm':16}{'ms':>9}{'spread':>8}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}")
    for cell in cells:
        taken, doubt = cell.milliseconds, "" if cell.milliseconds.reportable else "?"
        print(
            f"{cell.model:14}{cell.rows:5}  {cell.arm:16}{taken.median:8.2f}{doubt:1}{taken.spread:8.2f}"
            f"{cell.gigabytes_per_second:8.2f}{cell.share_of_read_bandwidth:9.0%}{cell.gigaflops_per_second:9.1f}"
        )
    environment = records.environment(options.seed)
    records.write(
        options.json,
        {"environment": environment, "machine": machine(), "threads": native_threads(), "cells": cells},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
