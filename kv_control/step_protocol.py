"""The order that steps keep: a slice continues what is written, and a step goes reserve, confirm, plan, commit.

For:        refusing a call out of turn by name, before it changes anything.
Not for:    pages and rows (control_plane.py), which this knows nothing of.
May import: the standard library, numpy, kv_common.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_common.errors import PageStateError
from kv_control.limits import PoolLimits
from kv_control.plan import PageChores, Reservation, ScrubbedReservation, StepBatch, StepPlan

Int64 = NDArray[np.int64]


def lengths_after(batch: StepBatch, written: Int64, limits: PoolLimits) -> Int64:
    """int64 ``[num_reqs]``, each request's tokens once the step has run.

    Args:
      batch: of live requests. written: int64 ``[max_num_seqs]``, tokens written per row.

    Raises:
      PageStateError: a slice does not start where its request's K/V ends, has no tokens, or shares its request with
        another slice.
      RequestTooLarge: a slice reaches beyond the context.
    """
    rows, start, num_new = batch.rows, batch.start, batch.num_tokens
    if len(rows) and np.bincount(rows).max() > 1:
        raise PageStateError(f"two slices of one step share a request: rows {rows.tolist()}")
    if (num_new < 1).any():
        raise PageStateError(f"row {rows[(num_new < 1).argmax()]}: a slice without tokens")
    wrong = start != written[rows]
    if wrong.any():
        i = int(wrong.argmax())
        raise PageStateError(
            f"row {rows[i]}: the slice starts at position {start[i]}, but {written[rows[i]]} tokens are written"
        )
    length = start + num_new
    if len(rows) and int(length.max()) > limits.max_model_len:
        limits.check_fits(int(length.max()))
    return length


@dataclass(slots=True)
class CurrentStep:
    """The one reservation that may still be confirmed, planned, committed or cancelled.

    Attributes:
      num_added: int64 ``[num_reqs]``, pages that it gave each request; window_added: the same of each window group.
      length: int64 ``[num_reqs]``, each request's tokens once the step has run.
      scrubbed, plan: how far it has come.
    """

    reservation: Reservation
    num_added: Int64
    window_added: tuple[Int64, ...]
    length: Int64
    scrubbed: ScrubbedReservation | None = None
    plan: StepPlan | None = None


class StepProtocol:
    """One reservation is current at a time: what was superseded, cancelled or committed is refused from then on."""

    def __init__(self) -> None:
        self._serial = 0
        self._current: CurrentStep | None = None

    def begin(
        self,
        batch: StepBatch,
        chores: PageChores,
        windows: tuple[PageChores, ...],
        *,
        num_added: Int64,
        window_added: tuple[Int64, ...],
        length: Int64,
    ) -> Reservation:
        """A reservation of these pages' chores, the current one from now on."""
        self._serial += 1
        reservation = Reservation(batch, chores.dirty_pages, chores.copies, self._serial, windows)
        self._current = CurrentStep(reservation, num_added, window_added, length)
        return reservation

    def to_confirm(self, reservation: Reservation) -> CurrentStep:
        """The step, if its pages may be confirmed as scrubbed now.

        Raises:
          PageStateError: it is not current, or was confirmed already.
        """
        current = self._require(reservation.serial)
        if current.scrubbed is not None:
            raise PageStateError(f"reservation {reservation.serial} was confirmed already")
        return current

    def to_plan(self, scrubbed: ScrubbedReservation) -> CurrentStep:
        """The step, if it may be planned now.

        Raises:
          PageStateError: it is not current, was never confirmed, or was planned already.
        """
        current = self._require(scrubbed.serial)
        if current.scrubbed is not scrubbed:
            raise PageStateError(f"reservation {scrubbed.serial} was never confirmed as scrubbed")
        if current.plan is not None:
            raise PageStateError(f"reservation {scrubbed.serial} was planned already")
        return current

    def to_commit(self, plan: StepPlan) -> CurrentStep:
        """The step, if it may be committed now.

        Raises:
          PageStateError: it was committed already, or is not current.
        """
        if self._current is None or self._current.plan is not plan:
            raise PageStateError("this plan was committed already, or a later reservation superseded it")
        return self._current

    def to_cancel(self, reservation: Reservation) -> CurrentStep:
        """The step, if it may be cancelled now.

        Raises:
          PageStateError: it is not current, or was planned already.
        """
        current = self._require(reservation.serial)
        if current.plan is not None:
            raise PageStateError(f"reservation {reservation.serial} was planned already: release its requests instead")
        return current

    def end(self) -> None:
        """Nothing is current any more: it was committed or cancelled."""
        self._current = None

    def _require(self, serial: int) -> CurrentStep:
        if self._current is None or self._current.reservation.serial != serial:
            raise PageStateError(
                f"reservation {serial} is not the current one: it was committed, cancelled or superseded"
            )
        return self._current
