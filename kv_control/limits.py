"""The most that one pool takes: of a request, of a step, of a page table.

For:        what follows from the pool's geometry and the options alone, whoever holds which page.
Not for:    whether there is room now (control_plane.py, admission.py).
May import: the standard library, kv_common.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_common.errors import ConfigError, RequestTooLarge
from kv_common.layout import KvStorageLayoutV1
from kv_control.bucketing import row_rung

MAX_REFERENCES_PER_PAGE = 4
"""Page references of a step, on average per page of the pool. A page table has room for this many; sharing beyond it
counts as no room, as too few pages do."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Upper bounds of one pool.

    Attributes:
      layout: geometry of the pool of layers that see everything.
      max_num_seqs: rows, that is requests that can hold pages at once.
      max_model_len: most tokens of one request, prompt and completion.

    >>> layout = KvStorageLayoutV1(1, 8, 4, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> limits = PoolLimits(layout, max_num_seqs=2, max_model_len=64)
    >>> limits.max_request_tokens, limits.fits(32), limits.fits(33)
    (32, True, False)
    """

    layout: KvStorageLayoutV1
    max_num_seqs: int
    max_model_len: int

    def __post_init__(self) -> None:
        if self.max_model_len < 1:
            raise ConfigError(f"max_target_length={self.max_model_len}: a request needs room for at least 1 token")

    @property
    def max_pages_per_request(self) -> int:
        """Columns of a page map: the pages of a full context."""
        return self.layout.pages_for(self.max_model_len)

    @property
    def max_step_references(self) -> int:
        """Page references of the largest step that ``ControlPlane.reserve`` takes."""
        return MAX_REFERENCES_PER_PAGE * self.layout.num_pages

    @property
    def max_request_tokens(self) -> int:
        """Most tokens one request can ever hold: the context, or the pool where that is smaller."""
        return min(self.max_model_len, self.layout.num_slots)

    def row_rung(self, token_rung: int) -> int:
        """Request rows of a step of ``token_rung`` tokens."""
        return row_rung(token_rung, self.max_num_seqs)

    def index_capacity(self, row_rung: int) -> int:
        """Page references of a step of ``row_rung`` rows: all of them full, or as many as a step may have."""
        return min(row_rung * self.max_pages_per_request, self.max_step_references)

    def fits(self, num_tokens: int) -> bool:
        """Whether one request of ``num_tokens`` tokens can ever be held."""
        return num_tokens <= self.max_request_tokens

    def check_fits(self, num_tokens: int) -> None:
        """As ``fits``, for those who cannot go on without.

        Raises:
          RequestTooLarge: it cannot; the message has both numbers and the option to turn.
        """
        if num_tokens > self.max_model_len:
            raise RequestTooLarge(
                f"request needs {num_tokens} tokens, the context holds {self.max_model_len}: raise `max_target_length`"
            )
        needed = self.layout.pages_for(num_tokens)
        if needed > self.layout.num_pages:
            raise RequestTooLarge(
                f"request needs {needed} pages for {num_tokens} tokens, the pool has {self.layout.num_pages}: "
                "raise `paged_num_pages` or lower `max_target_length`"
            )
