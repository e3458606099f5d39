"""A Ray Data job on a cluster of this machine, over tests' stand-in engine or a real one.

For:        tests of maxtext_paged.ray; run it as a script with a plan (JSON). It needs ray.
Not for:    importing.
May import: the standard library, numpy, pyarrow, ray, maxtext_paged.

The plan is an object with
  rows        how many rows are made, in blocks of ``block`` rows; or ``file``: JSON lines to read;
  actors      engines; ``batch``: rows of a batch;
  answers     the folder to write to;
  config      of a real engine, with ``overrides`` and ``params``; without one the engine is a stand-in;
  kill        a file: the first actor that ends ``kill_after`` batches while it is absent makes it and is killed;
  seen        a folder where each actor notes its batches;
  report      where the counts, seconds and peaks of resident memory (KiB) go.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from maxtext_paged.formats.own import RowError
from maxtext_paged.generation import Generation
from maxtext_paged.rows import Usage


def resident_kib(field: str = "VmHWM") -> int:
    """Of this process; ``RssAnon`` leaves out pages of the object store, which all processes share and map in turn."""
    return int(re.search(rf"{field}:\s*(\d+)", Path("/proc/self/status").read_text())[1])


class StandIn:
    """Answers with the prompt reversed; a row whose prompt is empty fails. Dies and takes notes as the plan says."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._batches = 0

    def generate(self, prompts: Any, params: Any = None) -> list[Generation]:
        rows = list(prompts)
        time.sleep(self._plan.get("batch_s", 0))
        self._batches += 1
        kill = self._plan.get("kill")
        if kill and self._batches > self._plan["kill_after"] and claim(Path(kill)):
            os.kill(os.getpid(), signal.SIGKILL)
        notes = Path(self._plan["seen"]) / f"{os.getpid()}.jsonl"
        with open(notes, "a") as file:
            note = {"ids": [row.get("id") for row in rows], "seeds": [row.get("seed") for row in rows]}
            file.write(
                json.dumps({**(note if self._plan.get("note_ids") else {}), "rss": resident_kib("RssAnon")}) + "\n"
            )
        return [answer(index, row) for index, row in enumerate(rows)]


def claim(path: Path) -> bool:
    """Whether this process is the first to ask."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def answer(index: int, row: dict[str, Any]) -> Generation:
    error = None if row.get("prompt") else RowError("prompt is empty", "empty_prompt")
    text = None if error else row["prompt"][::-1]
    ids = np.frombuffer((text or "").encode(), np.uint8).astype(np.int32)
    return Generation(
        index,
        row.get("id"),
        text,
        ids,
        np.zeros(len(ids), np.float32),
        ids,
        "error" if error else "length",
        Usage(len(ids), len(ids)),
        error,
    )


def made(batch: pyarrow.Table) -> pyarrow.Table:
    ids = batch.column("id").to_pylist()
    prompts = ["" if i % 1000 == 7 else f"prompt {i} " + "word " * 20 for i in ids]
    return pyarrow.table({"id": [f"r{i}" for i in ids], "prompt": prompts, "note": ids})


def main(plan: dict[str, Any]) -> None:
    import ray

    from maxtext_paged.ray import Generate, grouped, unfinished, write

    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=256 * 2**20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    if "file" in plan:
        lines = [json.loads(line) for line in Path(plan["file"]).read_text().splitlines()]
        names = list(dict.fromkeys(name for line in lines for name in line))
        table = pyarrow.table({name: [line.get(name) for line in lines] for name in names})
        rows = ray.data.from_arrow(table).repartition(plan.get("blocks", 2))
    else:
        num = -(-plan["rows"] // plan["block"])
        rows = ray.data.range(plan["rows"], override_num_blocks=num).map_batches(made, batch_format="pyarrow")
    rows = unfinished(rows, plan["answers"])
    if plan.get("grouped"):
        rows = grouped(rows, plan["batch"])
    stand_in = {"make_engine": lambda: StandIn(plan)}
    real = {"config": plan.get("config"), "overrides": plan.get("overrides"), "params": plan.get("params")}
    rows = rows.map_batches(
        Generate,
        fn_constructor_kwargs=real if "config" in plan else stand_in,
        batch_format="pyarrow",
        batch_size=plan["batch"],
        compute=ray.data.ActorPoolStrategy(size=plan["actors"]),
    )
    began = time.monotonic()
    counts = write(rows, plan["answers"])
    seconds = time.monotonic() - began
    Path(plan["report"]).write_text(json.dumps({**counts, "seconds": seconds, "peak_kib": resident_kib()}))
    ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
