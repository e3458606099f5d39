"""A step's arrays as they enter the jitted forward: registered dataclasses of fixed shape.

For:        carrying one step's inputs; every array is built in numpy and sent once.
Not for:    deciding them (kv_control) or reading them (attention, sampling, the model).
May import: kv_common, kv_control, jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax

from kv_common.page_table import KvPageTableV1

Array = Any
"""A numpy array where a step is built, a traced jax array where it runs."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class WindowMetadata:
    """The part of a step's ``PageMetadata`` that is another one for layers of a window group: their pools' pages."""

    slot_mapping: Array
    kv_indptr: Array
    kv_indices: Array
    kv_last_page_len: Array
    kv_first_page_offset: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PageMetadata:
    """What an attention layer needs to know of a step; ``kv_common.KvPageTableV1`` without its counts.

    Shapes and padding are those of ``KvPageTableV1``; all int32.

    Attributes:
      max_seqlen_k: a rung above every row's length, for kernels that are compiled for one (each is a program of its
        own); None where none are.
      windows: what differs for the layers of each window group; empty where one page table serves all layers.
    """

    query_start_loc: Array
    seq_lens: Array
    positions: Array
    slot_mapping: Array
    row_of_token: Array
    kv_indptr: Array
    kv_indices: Array
    kv_last_page_len: Array
    kv_first_page_offset: Array
    max_seqlen_k: int | None = field(default=None, metadata={"static": True})
    windows: tuple[WindowMetadata, ...] = ()

    def of_group(self, group: int) -> PageMetadata:
        """The step as one layer sees it: of the window group with this number, from 1 on, or (0) of no window.

        Where one table serves all layers it is everybody's, as for callers who bring page tables of their own.
        """
        if not self.windows:
            return self
        own = () if group == 0 else ((f.name, getattr(self.windows[group - 1], f.name)) for f in fields(WindowMetadata))
        return replace(self, windows=(), **dict(own))

    @classmethod
    def from_table(
        cls, table: KvPageTableV1, max_seqlen_k: int | None = None, windows: Sequence[KvPageTableV1] = ()
    ) -> PageMetadata:
        """The arrays of a packed table, not copied; ``windows``: each window group's."""
        return cls(
            query_start_loc=table.query_start_loc,
            seq_lens=table.seq_lens,
            positions=table.positions,
            slot_mapping=table.slot_mapping,
            row_of_token=table.row_of_token,
            kv_indptr=table.kv_indptr,
            kv_indices=table.kv_indices,
            kv_last_page_len=table.kv_last_page_len,
            kv_first_page_offset=table.kv_first_page_offset,
            max_seqlen_k=max_seqlen_k,
            windows=tuple(
                WindowMetadata(**{f.name: getattr(window, f.name) for f in fields(WindowMetadata)})
                for window in windows
            ),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How each of ``S`` rows chooses its token; padding rows are greedy and never looked up.

    Attributes:
      temperature: float32 ``[S]``; 0 is greedy.
      top_k: int32 ``[S]``; 0 keeps all.
      top_p: float32 ``[S]``; 1 keeps all.
      min_p: float32 ``[S]``; 0 keeps all.
      seed: uint32 ``[S]``.
      sample_index: int32 ``[S]``.
      position: int32 ``[S]``, absolute position of the token to be chosen.
      options_row: int32 ``[S]``, the row of ``logit_adjust.OptionRows`` that acts on it; -1 for none. None: for nobody.
      num_top: int32 ``[S]``, alternatives wanted beside it; None: for nobody.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    sample_index: Array
    position: Array
    options_row: Array = None
    num_top: Array = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class StepInputs:
    """Everything one step sends to the device: ``T`` flat token rows, ``S`` rows to sample.

    Attributes:
      token_ids: int32 ``[T]``; padding 0.
      previous_index: int32 ``[T]``: where ``>= 0`` the token is that entry of the previous step's
        sampled tokens instead (it may never have left the device); elsewhere -1.
      segment_ids: int32 ``[T]``, request row + 1; padding 0.
      pages: the attention layers' part.
      sample_rows: int32 ``[S]``, the token row whose logits are sampled; padding 0.
      num_samples: int32 ``[]``, how many of them are real.
      sampling: the ``S`` rows' sampling parameters.
      target_rows: int32 ``[T]``, token rows whose ``target`` logprob is wanted, packed first; padding 0.
      targets: int32 ``[T]``, the wanted token of each such row; padding 0.
      num_targets: int32 ``[]``, how many of them are real. 0 costs nothing.
    """

    token_ids: Array
    previous_index: Array
    segment_ids: Array
    pages: PageMetadata
    sample_rows: Array
    num_samples: Array
    sampling: SamplingInputs
    target_rows: Array
    targets: Array
    num_targets: Array
