"""How a step's decode rows are run, as a value with a reason and its numbers.

All rows of one new token are one dispatch, a batch of one included; rows with several tokens are ``attend``'s. The
choice comes before anything is built or written: it depends on counts alone, so a decline costs nothing, no plan
either, and leaves lengths and pages as they were. On a CPU the kernel's own work list applies the same rule
(``NativeBackend``'s floors), so no floor is in a traced program; ``native_library().counts()`` says what it really did.

For:        deciding, announcing and counting fused decodes.
Not for:    running them (attention/native.py), or choosing the backend (attention/select.py).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from kv_common.page_table import KvPageTableV1
from kv_execution.split_plan import SplitPlan, SplitPlanCache, SplitPlans

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SplitFloors:
    """Visible KV tokens from which decode rows are cut over their keys.

    Attributes:
      min_tokens: for one request alone. min_tokens_per_request: on average, for several in a step.
    """

    min_tokens: int = 0
    min_tokens_per_request: int = 0


MEASURED_FLOORS = {"cpu": SplitFloors(512, 512)}
"""Floors by jax platform that ``benchmarks/attention.py`` has decided (docs/adr/0002 names the cells)."""

UNMEASURED_FLOORS = SplitFloors(4096, 512)
"""Floors of every other platform, until it has been measured."""


def floors_for(platform: str, min_tokens: int = -1, min_tokens_per_request: int = -1) -> SplitFloors:
    """The platform's floors, each unless another is given; -1 gives none.

    >>> floors_for("cuda", min_tokens_per_request=0)
    SplitFloors(min_tokens=4096, min_tokens_per_request=0)
    """
    own = MEASURED_FLOORS.get(platform, UNMEASURED_FLOORS)
    return SplitFloors(
        own.min_tokens if min_tokens < 0 else min_tokens,
        own.min_tokens_per_request if min_tokens_per_request < 0 else min_tokens_per_request,
    )


@dataclass(frozen=True, slots=True)
class DispatchOutcome:
    """What became of one step's decode rows under one attention window.

    Attributes:
      kind: ``"fused"`` (split-KV owns the rows), ``"gather"`` (each row is walked whole) or ``"none"`` (no such row).
      cause: what distinguishes one kind of outcome from another: announced once each.
      reason: one line with the numbers; a decline names its own fix.
      batch: decode rows. visible_tokens: keys they see together.
      plan: how fused rows are cut; None where nothing is. plan_built: whether it had to be built for this step.
    """

    kind: Literal["fused", "gather", "none"]
    cause: str
    reason: str
    batch: int
    visible_tokens: int
    plan: SplitPlan | None = None
    plan_built: bool = False


def visible_tokens(table: KvPageTableV1, window: int | None) -> tuple[int, int]:
    """Decode rows of a step and the keys they see together, from the page table's counts."""
    lengths = table.seq_lens[: table.num_reqs]
    single = np.diff(table.query_start_loc[: table.num_reqs + 1]) == 1
    visible = (lengths - table.kv_first_page_offset[: table.num_reqs])[single].astype(np.int64)
    if window is not None:
        visible = np.minimum(visible, window)
    return int(single.sum()), int(visible.sum())


def decide(
    table: KvPageTableV1, *, window: int | None, fused_kernel: str | None, floors: SplitFloors, forced: bool = False
) -> DispatchOutcome:
    """Whether split-KV owns a step's decode rows. Pure; reads counts only.

    Args:
      window: the layers' sliding window.
      fused_kernel: None where split-KV is available, else why it is not and what would help.
      forced: ``paged_attention_native=1``: the floors do not count.
    """
    batch, visible = visible_tokens(table, window)
    seen = f"batch {batch}, {visible} visible KV tokens"
    if not batch:
        return DispatchOutcome("none", "no decode rows", "no decode rows in this step", 0, 0)
    if fused_kernel is not None:
        return DispatchOutcome("gather", fused_kernel, f"gather ({seen}): {fused_kernel}", batch, visible)
    if forced:
        reason = f"{seen}, floors bypassed by paged_attention_native=1"
        return DispatchOutcome("fused", "forced", f"fused split-KV launch ({reason})", batch, visible)
    if batch == 1 and visible < floors.min_tokens:
        return _below(batch, visible, "paged_split_kv_min_tokens", floors.min_tokens, floors.min_tokens)
    if batch > 1 and visible < floors.min_tokens_per_request * batch:
        floor = floors.min_tokens_per_request
        return _below(batch, visible, "paged_split_kv_min_tokens_per_request", floor, floor * batch)
    return DispatchOutcome("fused", "fused", f"fused split-KV launch ({seen})", batch, visible)


def _below(batch: int, visible: int, option: str, floor: int, needed: int) -> DispatchOutcome:
    reason = (
        f"gather (batch {batch}, {visible} visible KV tokens < {needed}): below {option}={floor}; lower it, or bypass "
        "the floors with paged_attention_native=1"
    )
    return DispatchOutcome("gather", f"below {option}", reason, batch, visible)


@dataclass(slots=True)
class DecodeDispatch:
    """The dispatch of one runtime: decides per step, announces each cause once at INFO, counts.

    Attributes:
      windows: the distinct sliding windows of the model's layers, None for full attention.
      fused_kernel, floors, forced: as in ``decide``.
      plans: how fused rows are cut, kept from step to step.
      counts: kind to decisions, one per step with decode rows and window. causes: (kind, cause) to the same decisions.
      num_plans_built: plans of fused launches that were not in the cache.
    """

    windows: Sequence[int | None] = (None,)
    fused_kernel: str | None = None
    floors: SplitFloors = field(default_factory=SplitFloors)
    forced: bool = False
    plans: SplitPlans = field(default_factory=SplitPlanCache)
    counts: dict[str, int] = field(default_factory=dict)
    causes: dict[tuple[str, str], int] = field(default_factory=dict)
    num_plans_built: int = 0

    def outcomes(self, table: KvPageTableV1, block_epoch: int = 0) -> tuple[DispatchOutcome, ...]:
        """What each window's layers do with this step; counts nothing.

        Args:
          block_epoch: of the page map when the table was packed: kept plans are forgotten when it moves.
        """
        return tuple(self._outcome(table, window, block_epoch) for window in self.windows)

    def _outcome(self, table: KvPageTableV1, window: int | None, block_epoch: int) -> DispatchOutcome:
        outcome = decide(table, window=window, fused_kernel=self.fused_kernel, floors=self.floors, forced=self.forced)
        if outcome.kind != "fused":
            return outcome
        plan, built = self.plans.plan(table, window, block_epoch)
        numbers = f", {plan.num_chunks} chunks, merge {plan.merge})"
        return replace(outcome, reason=outcome.reason[:-1] + numbers, plan=plan, plan_built=built)

    def describe(self) -> Iterator[str]:
        """What decodes will come to, for a report: one line for each window."""
        for window in self.windows:
            layers = "full attention" if window is None else f"window of {window}"
            if self.fused_kernel is not None:
                yield f"{layers}: gather, {self.fused_kernel}"
            elif self.forced:
                yield f"{layers}: fused split-KV on {self.plans.where}, always (paged_attention_native=1)"
            else:
                yield (
                    f"{layers}: fused split-KV on {self.plans.where}, for one request from "
                    f"{self.floors.min_tokens} visible KV tokens on (paged_split_kv_min_tokens), for several from "
                    f"{self.floors.min_tokens_per_request} each (paged_split_kv_min_tokens_per_request); else gather"
                )

    def launched(self, outcomes: Sequence[DispatchOutcome]) -> None:
        """Count and announce the outcomes of a step that was dispatched."""
        for outcome in outcomes:
            if outcome.kind == "none":
                continue
            self.counts[outcome.kind] = self.counts.get(outcome.kind, 0) + 1
            self.num_plans_built += outcome.plan_built
            why = outcome.kind, outcome.cause
            if why not in self.causes:
                _log.info("decode: %s", outcome.reason)
            self.causes[why] = self.causes.get(why, 0) + 1
