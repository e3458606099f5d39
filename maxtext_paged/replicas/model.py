"""A ``Model`` whose engine is several processes; the one that a job runs in opens no device.

For:        ``generate --replicas``: what the first replica says of its model, as the command wants it.
Not for:    processes (group.py), rows (worker.py), what makes an output whole or resumable: that is the job's as ever.
May import: the standard library, kv_control, maxtext_paged without MaxText.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kv_control.plan import SamplingSpec
from maxtext_paged.cli.model import Engine, Model
from maxtext_paged.intake import Intake
from maxtext_paged.replicas.devices import Placement
from maxtext_paged.replicas.group import ReplicaGroup
from maxtext_paged.replicas.wire import Message
from maxtext_paged.replicas.worker import ReplicaSession, ReplicaWorker


def tokenizer_of(options: Mapping[str, Any]) -> Any:
    """The tokenizer that the configuration names."""
    from maxtext_paged.tokenizer import load_tokenizer

    return load_tokenizer(SimpleNamespace(**options))


def open_replicas(
    placements: Sequence[Placement], config: str, overrides: Sequence[str], *, warmup: bool = False
) -> Model:
    """A model that runs in several processes; this one opens no device.

    Raises:
      CommandError: as ``open_model``.
    """
    group = ReplicaGroup(placements, config, overrides, warmup=warmup)
    try:
        opened = group.open()
        tokenizer = tokenizer_of(opened["tokenizer"])
    except BaseException:
        group.close()
        raise
    ready: Message = {}

    def start(first_step_tokens: int) -> Engine:
        try:
            ready.update(group.start())
        except BaseException:
            group.close()
            raise
        worker: Any = ReplicaWorker(group, ready)
        session: Any = ReplicaSession(group)
        return Engine(session, worker, ready["weights"], worker.recorder)

    def facts() -> dict[str, Mapping[str, str]]:
        shares = {
            f"replica {replica.number}": f"cores {', '.join(map(str, replica.placement.cores))}"
            + "".join(f", {name}={value}" for name, value in replica.placement.environment.items())
            for replica in group.replicas
        }
        return {**ready["facts"], "Replicas": shares}

    defaults = SamplingSpec(**opened["defaults"])
    intake = Intake(tokenizer, defaults, vocab_size=opened["vocab_size"], max_model_len=opened["max_model_len"])
    # Which replica's first step has which rows is open: none obtains a program beside its weights.
    return Model(tokenizer, intake, opened["identity"], start, 0, facts, close=group.close)
