"""The one owner of a step's order: reserve, scrub, confirm, plan, build, run.

Warm-up, the driver, the engine's entry points and every paged benchmark make the same two calls,
``prepare_step`` and ``run_step``. There is no other paged loop.

For:        mechanics: pages, pools, arrays and the jitted program.
Not for:    policy: which request runs, waits or is preempted (driver.py, kv_control.scheduler).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from kv_common.errors import ConfigError
from kv_control.bucketing import Ladder
from kv_control.control_plane import ControlPlane
from kv_control.metrics import ControlMetrics
from kv_control.plan import RequestHandle, RequestSlice, StepPlan
from kv_execution.compile_events import CompileCounter
from kv_execution.dispatch import DecodeDispatch
from kv_execution.group_scrubber import GroupScrubber
from kv_execution.huge_pages import back_with_huge_pages
from kv_execution.logit_adjust import OptionTable
from kv_execution.model import PagedModel, Params, Pools
from kv_execution.packing import Packing, pack
from kv_execution.step import StepOutputs, make_step_program
from kv_execution.step_inputs import build_step_inputs
from kv_execution.step_outcome import StepOutcome


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose pages are held, scrubbed and planned, and whose arrays are built (``StepInputs``, packed)."""

    plan: StepPlan
    buffer: NDArray[np.int32]
    packing: Packing


@dataclass(frozen=True, slots=True)
class RuntimeMetrics:
    """Counts since the runtime was made.

    Attributes:
      control: pages, sharing and scheduling.
      num_steps: steps run. num_tokens: tokens run, padding left out. num_padded_tokens: rungs summed.
      num_scrubbed_pages: recycled pages overwritten before reuse. num_copied_pages: pages copied for a group's samples.
      steps_by_backend: attention backend to the steps it ran.
      decodes_by_kind: ``"fused"`` or ``"gather"`` to the launches of decode rows, one per step and attention window.
      decodes_by_cause: the same launches by (kind, what decided it).
      num_plans_built: plans that fused launches needed; the others reused the last one.
      steps_by_rung: token rung to steps.
      compiled: jitted function to programs obtained in this process since the runtime was made.
    """

    control: ControlMetrics
    num_steps: int
    num_tokens: int
    num_padded_tokens: int
    num_scrubbed_pages: int
    num_copied_pages: int
    steps_by_backend: dict[str, int]
    decodes_by_kind: dict[str, int]
    decodes_by_cause: dict[tuple[str, str], int]
    num_plans_built: int
    steps_by_rung: dict[int, int]
    compiled: dict[str, int]

    @property
    def num_compile_events(self) -> int:
        """Programs obtained, compiled or from the cache on disk."""
        return sum(self.compiled.values())


class PagedRuntime:
    """Pools, weights and the jitted step of one model.

    Args:
      model: the bound model. params: its weights; or only their shapes, dtypes and shardings, until ``params`` is set.
      control: page bookkeeping over ``model.layout``.
      run_key: random key of the run; with a row's seed, sample index and position it fixes every sample.
      backend: name of the attention backend the model was bound with, for reports.
      decode: how decode rows are dispatched; None: by a backend that knows no split-KV.
      context_ladder: rungs of ``PageMetadata.max_seqlen_k``; None: no kernel is compiled for a longest context.
      poison_on_free: fill pages with NaN when they are freed (a debugging aid: a stray read cannot hide).
    """

    def __init__(
        self,
        model: PagedModel,
        params: Params,
        control: ControlPlane,
        *,
        run_key: jax.Array,
        backend: str,
        decode: DecodeDispatch | None = None,
        context_ladder: Ladder | None = None,
        poison_on_free: bool = False,
    ) -> None:
        self.model = model
        self.control = control
        self._take_params(params)
        self.params_revision = 0
        self.run_key = run_key
        self._backend = backend
        self._decode = decode or DecodeDispatch(fused_kernel=f"the {backend} backend has no split-KV")
        self._context_ladder = context_ladder
        self._poison_on_free = poison_on_free
        self._compiles = CompileCounter()
        leaves, self._pools_structure = jax.tree.flatten(model.create_pools())
        self._pool_leaves: Sequence[jax.Array] = leaves
        back_with_huge_pages(leaves)
        self._scrubber = GroupScrubber(
            [model.layout.num_pages, *(pages.allocator.num_pages for pages in control.windows)],
            getattr(model, "leaf_groups", ()) if control.windows else None,
        )
        limits = control.limits
        self._program = make_step_program(model, params=params, pools=self.pools, max_num_seqs=limits.max_num_seqs)
        tokens = np.zeros(limits.max_num_seqs, np.int32)
        mesh = model.mesh
        # Placed as the program's own outputs are: fed differently, the first step would compile twice.
        self._previous_tokens = (
            jax.device_put(tokens, NamedSharding(mesh, PartitionSpec())) if mesh is not None else jax.device_put(tokens)
        )
        self._num_tokens = self._num_padded = self._num_scrubbed = self._num_copied = 0
        self._rungs: dict[int, int] = {}
        self._options = OptionTable(
            max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len, mesh=model.mesh
        )

    def open(self) -> RequestHandle | None:
        """A row for a request; None when all are taken."""
        return self.control.open()

    def release(self, handle: RequestHandle) -> NDArray[np.int32]:
        """End a request's hold on its row and pages; the pages that were actually freed, now dirty."""
        freed = self.control.release(handle)
        self._poison(freed)
        return freed

    def prepare_step(self, slices: Sequence[RequestSlice]) -> PreparedStep | None:
        """Hold pages for a step, scrub what was recycled, and build its arrays.

        Returns:
          None when the pool has no room now: nothing changed, preempt something and try again.
        """
        reservation = self.control.reserve(slices)
        if reservation is None:
            return None
        self._poison()  # what left a window since; pages that are held again are about to be scrubbed
        for group, chores in enumerate(reservation.chores):
            if len(chores.dirty_pages):
                self._pool_leaves = self._scrubber.scrub(self._pool_leaves, chores.dirty_pages, group)
                self._num_scrubbed += len(chores.dirty_pages)
            if chores.copies.size:
                self._pool_leaves = self._scrubber.copy(self._pool_leaves, chores.copies, group)
                self._num_copied += chores.copies.shape[1]
        plan = self.control.plan(self.control.confirm_scrubbed(reservation))
        longest = int(plan.table.seq_lens.max(initial=1))
        rung = None if self._context_ladder is None else self._context_ladder.rung(longest)
        return PreparedStep(plan, *pack(build_step_inputs(plan, rung)))

    def run_step(self, prepared: PreparedStep, *, after: StepOutcome | None = None) -> StepOutcome:
        """Dispatch a prepared step. Returns at once; ``StepOutcome.read`` waits.

        Args:
          after: the step whose tokens ``previous_sample`` names; None: the last one that ran, whoever ran it.
        """
        plan = prepared.plan
        decode = self._decode.outcomes(plan.table, plan.block_epoch)
        if after is not None:
            self._previous_tokens = after.outputs.tokens
        outputs = self._dispatch(prepared)
        self._decode.launched(decode)
        self._num_tokens += plan.table.num_tokens
        self._num_padded += plan.token_rung
        self._rungs[plan.token_rung] = self._rungs.get(plan.token_rung, 0) + 1
        return StepOutcome(plan, outputs, self._backend, decode)

    def _dispatch(self, prepared: PreparedStep) -> StepOutputs:
        self._options.follow(prepared.plan.slices, self._previous_tokens)
        self._pool_leaves, outputs = self._program(self._param_leaves, *self._arguments(prepared))
        self._previous_tokens = outputs.tokens
        self.control.commit(prepared.plan)
        return outputs

    def _arguments(self, prepared: PreparedStep) -> tuple[Any, ...]:
        """The program's, behind the weights."""
        rows, key = self._options.rows, self.run_key
        return self._pool_leaves, prepared.buffer, self._previous_tokens, rows, key, prepared.packing

    def compile_step(self, num_tokens: int) -> None:
        """Obtain the program of a step of so many tokens, and run nothing: weights may still be on their way.

        Raises:
          ConfigError: the ladder holds no such step.
        """
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in self._param_leaves]
        context = None if self._context_ladder is None else self._context_ladder.rungs[0]
        step = self._padding(self.control.token_ladder.rung(num_tokens), context)
        self._program.lower(leaves, *self._arguments(step)).compile()
        self.control.commit(step.plan)

    def _padding(self, num_tokens: int, context: int | None = None) -> PreparedStep:
        """A step of so many tokens that are all padding."""
        reservation = self.control.reserve([])
        assert reservation is not None  # an empty step needs no page
        plan = self.control.plan(self.control.confirm_scrubbed(reservation), min_token_rung=num_tokens)
        return PreparedStep(plan, *pack(build_step_inputs(plan, context)))

    def warm_up(self, on_rung: Callable[[int, int], None] | None = None) -> None:
        """Obtain every program a run can need, by walking the ladders with steps of padding alone.

        Touches no page and counts as no step. Afterwards nothing compiles, whatever the requests are.

        Args:
          on_rung: called with ``(rungs done, rungs in all)`` after each.
        """
        contexts = (None,) if self._context_ladder is None else self._context_ladder.rungs
        rungs = list(product(self.control.token_ladder.rungs, contexts))
        self._pool_leaves = self._scrubber.warm_up(self._pool_leaves)
        self._options.warm_up(self._previous_tokens)
        for done, (rung, context) in enumerate(rungs, start=1):
            self._dispatch(self._padding(rung, context))
            if on_rung is not None:
                jax.block_until_ready(self._previous_tokens)
                on_rung(done, len(rungs))

    def update_params(self, params: Params, *, prefix_namespace: bytes | None = None) -> int:
        """Exchange the weights; same shapes and shardings, so nothing compiles. Cached pages are the old weights'
        and are forgotten.

        Args:
          prefix_namespace: digest of the new weights' namespace, where the prefix cache is on.

        Returns:
          The cached pages that were forgotten.

        Raises:
          ConfigError: they are another model's.
        """
        self.params = params
        self.params_revision += 1
        return self.reset_prefix_cache(prefix_namespace)

    def reset_prefix_cache(self, prefix_namespace: bytes | None = None) -> int:
        """Forget every cached page; returns how many there were."""
        cleared, freed = self.control.reset_prefix_cache(prefix_namespace)
        self._poison(freed)
        return cleared

    def _poison(self, freed: NDArray[np.int32] | None = None) -> None:
        """Poison pages that became free: these, and those of window groups since the last call."""
        if not self._poison_on_free:
            return
        for group, pages in enumerate((freed, *self.control.windows.take_freed())):
            if pages is not None and len(pages):
                self._pool_leaves = self._scrubber.poison(self._pool_leaves, pages, group)

    @property
    def params(self) -> Params:
        """The weights; others of the same structure, shapes and shardings may take their place."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        structures: set[object] = {jax.tree.structure(params), jax.tree.structure(self._params)}
        if len(structures) > 1:
            raise ConfigError("these weights are another model's: their tree differs")
        self._take_params(params)

    def _take_params(self, params: Params) -> None:
        self._params, self._param_leaves = params, jax.tree.leaves(params)
        back_with_huge_pages(self._param_leaves)

    @property
    def pools(self) -> Pools:
        """The pools as they stand; the next step donates them."""
        return jax.tree.unflatten(self._pools_structure, self._pool_leaves)

    @pools.setter
    def pools(self, pools: Pools) -> None:
        self._pool_leaves = jax.tree.leaves(pools)
        back_with_huge_pages(self._pool_leaves)

    @property
    def has_pools(self) -> bool:
        """Whether there are pools: not from ``drop_pools`` until others take their place."""
        return bool(self._pool_leaves)

    def drop_pools(self) -> None:
        """Give the pools' memory back; no step may run until ``pools`` is set again."""
        leaves, self._pool_leaves = self._pool_leaves, []
        for leaf in leaves:
            if not leaf.is_deleted():
                leaf.delete()

    def metrics(self) -> RuntimeMetrics:
        """Counts so far."""
        steps = sum(self._rungs.values())
        return RuntimeMetrics(
            control=self.control.metrics(),
            num_steps=steps,
            num_tokens=self._num_tokens,
            num_padded_tokens=self._num_padded,
            num_scrubbed_pages=self._num_scrubbed,
            num_copied_pages=self._num_copied,
            steps_by_backend={self._backend: steps} if steps else {},
            decodes_by_kind=dict(sorted(self._decode.counts.items())),
            decodes_by_cause=dict(sorted(self._decode.causes.items())),
            num_plans_built=self._decode.num_plans_built,
            steps_by_rung=dict(sorted(self._rungs.items())),
            compiled=self._compiles.by_function(),
        )
