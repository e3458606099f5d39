"""This project, and MaxText's dense engine, as ``benchmarks.peers.compare`` asks any engine.

For:        ``--arm paged`` (the default pool, warmed up) and ``--arm dense`` (MaxText's MaxEngine, ``--slots`` slots).
Not for:    other environments than this project's own.
May import: maxtext_paged, benchmarks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")

from benchmarks.peers.engine_loop import Engine, serve
from benchmarks.records import WrongPath, installed


class Paged:
    """A paged session with its defaults."""

    def __init__(self, options: argparse.Namespace) -> None:
        from maxtext_paged.cli.configuration import load_configuration
        from maxtext_paged.collector import collector_paused
        from maxtext_paged.session import open_session

        shape = [f"paged_max_num_seqs={options.slots}", f"max_target_length={options.context}"]
        with collector_paused(freeze=True):  # as the command does
            self.session = open_session(load_configuration(options.model, [*shape, *options.set]))
            self.session.runtime.warm_up()
        self.version = f"maxtext-paged {installed('maxtext-paged')} jax {installed('jax')} {self.session.backend.name}"
        if self.session.backend.name == "reference" and self.session.options.paged_backend != "reference":
            raise WrongPath(f"attention would run on the jnp reference: {self.session.backend.reason}")

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
        from benchmarks.paged_arm import run_requests

        times, tokens, counts = run_requests(self.session, prompts, limits)
        counts.check()
        return times, tokens


class Dense:
    """MaxText's dense engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        from benchmarks.dense_arm import DenseArm

        self.arm = DenseArm(
            options.model, slots=options.slots, prefill=512, decode=options.context - 512, overrides=options.set
        )
        self.arm.warm_up()
        self.version = f"maxtext {installed('maxtext')} jax {installed('jax')} attention={self.arm.config.attention}"

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
        times, tokens, counts = self.arm.run(prompts, limits)
        counts.check()
        return times, tokens


def make(options: argparse.Namespace) -> Engine:
    """The arm that the arguments name."""
    return Paged(options) if options.arm == "paged" else Dense(options)


if __name__ == "__main__":
    serve(
        make,
        __doc__,
        ("--arm", {"choices": ("paged", "dense"), "default": "paged"}),
        ("--context", {"type": int, "default": 640}),
        ("--set", {"action": "append", "default": [], "metavar": "key=value"}),
    )
