"""MaxText's own dense ``MaxEngine`` with continuous batching over its slots: what a paged engine is compared with.

For:        the dense arm of ``benchmarks.serving`` and ``benchmarks.peers.compare``.
Not for:    anything paged; the loop is MaxText's users' (prefill into a free slot, insert, generate), not ours.
May import: the standard library, numpy, jax, flax, maxtext, kv_execution.compile_events, benchmarks.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
from maxtext.inference.maxengine import maxengine

from benchmarks.records import WrongPath
from kv_execution.compile_events import CompileCounter

SMALLEST_BUCKET = 64


@dataclass(frozen=True, slots=True)
class DenseCounts:
    """One run: ``steps`` of decoding, ``prefills``, requests at once per step, programs obtained during it."""

    steps: int
    prefills: int
    padded_prefill_tokens: int
    mean_running: float
    peak_running: int
    compile_events: int
    compiled: dict[str, int]

    def check(self) -> None:
        """Raises:
        WrongPath: a program was obtained after warm-up.
        """
        if self.compile_events:
            raise WrongPath(f"{self.compile_events} programs were obtained after warm-up: {self.compiled}")


def buckets(longest: int) -> list[int]:
    """Prompt lengths that prompts are padded to, as MaxText's offline engine chooses them: powers of two.

    >>> buckets(512), buckets(100), buckets(10)
    ([64, 128, 256, 512], [64, 100], [10])
    """
    sizes = [SMALLEST_BUCKET << i for i in range(32) if SMALLEST_BUCKET << i < longest]
    return [*sizes, longest]


class DenseArm:
    """The engine, its weights and its slots.

    Args:
      config: a MaxText configuration file; its checkpoint gives the weights unless ``params`` does.
      slots: requests at once. prefill, decode: tokens reserved in each slot for prompts and for completions.
    """

    def __init__(
        self,
        config: str,
        *,
        slots: int,
        prefill: int,
        decode: int,
        overrides: Sequence[str] = (),
        params: Mapping[str, Any] | None = None,
    ) -> None:
        shape = [
            f"per_device_batch_size={slots}",
            f"max_prefill_predict_length={prefill}",
            f"max_target_length={prefill + decode}",
            "attention=dot_product",
            "scan_layers=false",
            "decode_sampling_strategy=greedy",
            "base_output_directory=unused",
            "log_config=false",
            "skip_jax_distributed_system=true",
            "enable_checkpointing=false",
        ]
        self.config = pyconfig.initialize(["dense", config, *shape, *overrides])
        self.slots, self.prefill_tokens, self.decode_tokens = slots, prefill, decode
        self.buckets = buckets(prefill)
        _let_results_leave_jit()
        self.engine = maxengine.MaxEngine(self.config, jax.devices()[:1])
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", DeprecationWarning)  # MaxText's own uses of nnx.State
            given = params is not None or self.config.load_parameters_path
            self.params = self.engine.load_params(params=self._weights(params) if given else None)
        self.state = self.engine.init_decode_state()
        self._compiles = CompileCounter()

    def _weights(self, given: Mapping[str, Any] | None) -> nnx.State:
        """The checkpoint by MaxText's own loader, into the engine's own parameter tree."""
        engine = self.engine
        with logical_axis_rules(self.config.logical_axis_rules):
            _, wanted, _ = nnx.split(engine.model, nnx.Param, ...)
        if given is not None:
            nnx.replace_by_pure_dict(wanted, jax.tree.map(jnp.asarray, dict(given)))
            return wanted
        whole = jax.sharding.NamedSharding(engine.mesh, jax.sharding.PartitionSpec())
        wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), wanted)
        return checkpointing.load_params_from_path(self.config.load_parameters_path, wanted, 8)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values in all slots, as the decode state holds them."""
        leaves = jax.tree_util.tree_leaves_with_path(self.state["cache"])
        return sum(leaf.nbytes for path, leaf in leaves if str(path[-1].key).endswith(("_key", "_value")))

    def warm_up(self) -> None:
        """Obtain the programs of all buckets, of decoding, and of inserting before and after a decode step."""
        count, few = self.slots + 2, min(3, self.decode_tokens)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            for size in self.buckets:
                self.run([[1] * size] * count, [few] * count)

    def run(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> tuple[list[list[float]], list[list[int]], DenseCounts]:
        """Everything at once: token times, generated tokens, and what was counted.

        A free slot is filled before the next decode step; a step decodes all slots, used or not.

        Raises:
          WrongPath: a prompt or completion is longer than a slot has room for.
        """
        for prompt, limit in zip(prompts, limits, strict=True):
            if len(prompt) > self.prefill_tokens or limit > self.decode_tokens:
                raise WrongPath(
                    f"{len(prompt)} + {limit} tokens: a slot has {self.prefill_tokens} + {self.decode_tokens}"
                )
        compiled, padded, running = self._compiles.by_function(), 0, []
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        waiting, free, live = list(range(len(prompts))), list(range(self.slots)), {}
        start = time.perf_counter()

        def note(request: int, token: int) -> bool:
            tokens[request].append(token)
            times[request].append(time.perf_counter() - start)
            return len(tokens[request]) == limits[request]

        while waiting or live:
            while waiting and free:
                request, slot = waiting.pop(0), free.pop(0)
                size = next(size for size in self.buckets if size >= len(prompts[request]))
                row = np.zeros(size, np.int32)
                row[: len(prompts[request])] = prompts[request]
                prefix, result = self.engine.prefill(
                    params=self.params, padded_tokens=row, true_length=len(prompts[request]), slot=slot
                )
                padded += size
                if note(request, int(np.asarray(result.data)[0, 0])):
                    free.insert(0, slot)
                    continue
                self.state = self.engine.insert(prefix, self.state, slot=slot)
                live[slot] = request
            if not live:
                continue
            running.append(len(live))
            self.state, result = self.engine.generate(self.params, self.state)
            made = np.asarray(result.data)[:, 0]
            for slot, request in list(live.items()):
                if note(request, int(made[slot])):
                    del live[slot]
                    free.append(slot)
        after = self._compiles.by_function()
        new = {name: n - compiled.get(name, 0) for name, n in after.items() if n != compiled.get(name, 0)}
        return (
            times,
            tokens,
            DenseCounts(
                steps=len(running),
                prefills=len(prompts),
                padded_prefill_tokens=padded,
                mean_running=sum(running) / len(running) if running else 0.0,
                peak_running=max(running, default=0),
                compile_events=sum(new.values()),
                compiled=new,
            ),
        )

    def close(self) -> None:
        """Give the slots' memory back."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()


def _let_results_leave_jit() -> None:
    """JetStream's ``ResultTokens`` is a pytree; the stub that MaxText has in its place is not, and a jitted prefill
    returns one. Here and not in the product: nobody else runs the dense engine on the stub."""
    results = maxengine.engine_api.ResultTokens
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(results(data=np.zeros(1)))):
        names = ("tokens_idx", "valid_idx", "length_idx", "samples_per_slot")
        jax.tree_util.register_pytree_node(
            results,
            lambda result: ((result.data, result.log_prob), tuple(getattr(result, name) for name in names)),
            lambda rest, data: results(data=data[0], log_prob=data[1], **dict(zip(names, rest, strict=True))),
        )
