"""One Ray Data job over real engines: the Ray arm of benchmarks/replicas.py, a process of its own.

For:        rows of a file through ``maxtext_paged.ray`` on a cluster of this machine, with so many actors.
Not for:    timing (the parent's), or examples (examples/ray_batch.py).
May import: the standard library, benchmarks.records, ray, pyarrow, maxtext_paged.

    python -m benchmarks.ray_arm CONFIG ROWS.jsonl ANSWERS --engines 2 --batch 16 [key=value ...] --record FILE
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import ray

from benchmarks import records
from maxtext_paged.ray import Generate, write

OTHER_TASKS = 2
"""Places for what reads and writes: actors that held them all would wait for ever."""


class NotedGenerate(Generate):
    """Says which backend its engine's attention runs on."""

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """As ``Generate``, with a column more."""
        engine: Any = self.engine
        name = pyarrow.array([engine.session.backend.name] * batch.num_rows)
        return super().__call__(batch).append_column("backend", name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("rows", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--record", type=Path)
    options = parser.parse_intermixed_args(arguments)
    cores = max(1, len(os.sched_getaffinity(0)) // options.engines)
    ray.init(
        num_cpus=options.engines + OTHER_TASKS,
        include_dashboard=False,
        object_store_memory=256 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    blocks = [
        pyarrow.Table.from_pylist(rows[first : first + options.batch]) for first in range(0, len(rows), options.batch)
    ]
    dataset = ray.data.from_arrow(blocks).map_batches(
        NotedGenerate,
        fn_constructor_args=[options.config, dict(word.split("=", 1) for word in options.overrides)],
        batch_format="pyarrow",
        batch_size=options.batch,
        compute=ray.data.ActorPoolStrategy(size=options.engines),
        num_cpus=1,
        runtime_env={"env_vars": {"NPROC": str(cores), "OMP_NUM_THREADS": str(cores)}},
    )
    counts = write(dataset, options.answers)
    ray.shutdown()
    records.write(options.record, {**counts, "cores_of_each": cores})
    return 0


if __name__ == "__main__":
    sys.exit(main())
