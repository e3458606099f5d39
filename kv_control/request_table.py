"""What the loop needs of every running request, one array per fact, so that a step looks at none of them singly.

For:        tokens, lengths, limits and sampling of the requests that hold a row, indexed by that row.
Not for:    requests that wait or have ended (request.py keeps theirs), pages (page_map) or order (scheduler).
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_control.plan import Int64, SamplingColumns

NOBODY = -1
"""``ids`` of a row that no request of this table holds."""


class RequestTable:
    """Rows of requests; a row's values mean something while ``ids`` names its request.

    Memory is reserved for ``max_num_seqs`` rows of ``max_model_len`` tokens and used as far as rows have tokens.

    Attributes:
      ids: int64 ``[R]``, the request, ``NOBODY`` where there is none. epochs: int64 ``[R]``, of its handle.
      num_tokens: int64 ``[R]``, prompt and generated tokens that are known.
      num_in_flight: int64 ``[R]``, tokens behind them that dispatched steps choose, not read back yet.
      sample_index: int64 ``[R]``, where the last dispatched step that sampled for the row leaves its token: an index
        into the tokens of that step.
      num_computed: int64 ``[R]``, tokens whose K/V is written or in flight.
      num_prompt: int64 ``[R]``, tokens of the prompt.
      end_at: int64 ``[R]``, tokens at which ``max_tokens`` ends it.
      may_stop_at: int64 ``[R]``, tokens from which a stop token ends it.
      max_kv_tokens: int64 ``[R]``, most tokens whose K/V it will ever hold.
      wants_targets: bool ``[R]``, prompt logprobs are wanted and not all known.
      num_seen: int64 ``[R]``, tokens that were computed at least once, also before a preemption.
      num_published: int64 ``[R]``, leading pages that were offered to the prefix index.
      has_options: bool ``[R]``, something is done to its logits. counts_tokens: bool ``[R]``, by its tokens.
      num_top: int32 ``[R]``, alternatives wanted at each token.
      options_sent: bool ``[R]``, the device has its options since it was let in.
      num_with_options: rows that have any of these.
      sampling: columns of ``[R]``.
      tokens: int32 ``[R, max_model_len + 1]``. logprobs: float32 beside it, of generated tokens.
    """

    __slots__ = (
        "counts_tokens",
        "end_at",
        "epochs",
        "has_options",
        "ids",
        "logprobs",
        "max_kv_tokens",
        "may_stop_at",
        "num_computed",
        "num_in_flight",
        "num_prompt",
        "num_published",
        "num_seen",
        "num_tokens",
        "num_top",
        "num_with_options",
        "options_sent",
        "sample_index",
        "sampling",
        "tokens",
        "wants_targets",
    )

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.ids: Int64 = np.full(max_num_seqs, NOBODY, np.int64)
        self.epochs: Int64 = np.zeros(max_num_seqs, np.int64)
        self.num_tokens: Int64 = np.zeros(max_num_seqs, np.int64)
        self.num_in_flight: Int64 = np.zeros(max_num_seqs, np.int64)
        self.sample_index: Int64 = np.zeros(max_num_seqs, np.int64)
        self.num_computed: Int64 = np.zeros(max_num_seqs, np.int64)
        self.num_prompt: Int64 = np.zeros(max_num_seqs, np.int64)
        self.end_at: Int64 = np.zeros(max_num_seqs, np.int64)
        self.may_stop_at: Int64 = np.zeros(max_num_seqs, np.int64)
        self.max_kv_tokens: Int64 = np.zeros(max_num_seqs, np.int64)
        self.wants_targets: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.num_published: Int64 = np.zeros(max_num_seqs, np.int64)
        self.num_seen: Int64 = np.zeros(max_num_seqs, np.int64)
        self.has_options: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.counts_tokens: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.num_top: NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)
        self.options_sent: NDArray[np.bool_] = np.zeros(max_num_seqs, np.bool_)
        self.num_with_options = 0
        self.sampling = SamplingColumns.greedy(max_num_seqs)
        # Zeros that the system gives page by page: a row costs memory as far as it is used.
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.logprobs: NDArray[np.float32] = np.zeros((max_num_seqs, max_model_len + 1), np.float32)

    def append(self, rows: Int64, tokens: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
        """Add one generated token to each of the distinct ``rows``."""
        at = self.num_tokens[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.num_tokens[rows] = at + 1

    def num_to_come(self, rows: Int64) -> Int64:
        """int64 ``[len(rows)]``, each row's tokens once everything in flight is known."""
        total: Int64 = self.num_tokens[rows] + self.num_in_flight[rows]
        return total

    def last_tokens(self, rows: Int64) -> NDArray[np.int32]:
        """int32 ``[len(rows)]``, each row's newest token."""
        last: NDArray[np.int32] = self.tokens[rows, self.num_tokens[rows] - 1]
        return last

    def held_by(self, rows: Int64, epochs: Int64) -> NDArray[np.bool_]:
        """bool ``[len(rows)]``, whether these handles' requests still hold their rows."""
        held: NDArray[np.bool_] = (self.epochs[rows] == epochs) & (self.ids[rows] != NOBODY)
        return held
