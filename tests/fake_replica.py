"""A replica over tests/fake_engine.py, that dies when it is told to.

For:        tests of ``generate --replicas`` in processes that import neither jax nor MaxText; run as a script.
Not for:    importing.
May import: the standard library, maxtext_paged, tests/fake_engine.py.

The configuration file is the plan, a JSON object with
  model   arguments of ``fake_model``; slow: a replica's number to other ones for it;
  die     a replica's number to its lives' ends: ``"start"``, ``"rows:N"`` (killed when the N-th result is due),
          ``"raise:N"`` (its engine raises there) or null;
  lives   the folder where lives are counted, and what each replica ran and where is written down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from maxtext_paged.replicas.child import prepare, serve
from tests.fake_engine import fake_model


def life(folder: Path, number: int) -> int:
    """Which life of this replica it is, from 0."""
    for count in range(100):
        try:
            (folder / f"{number}.{count}").touch(exist_ok=False)
            return count
        except FileExistsError:
            continue
    raise AssertionError


def dying(engine: Any, end: str | None, seen: Path) -> Any:
    """The engine, whose process comes to its end when a result is due."""
    how, _, after = (end or "").partition(":")
    complete = engine.worker.complete

    def until(*arguments: Any, **options: Any) -> Iterator[Any]:
        for count, result in enumerate(complete(*arguments, **options)):
            if after == str(count):
                if how == "raise":
                    raise RuntimeError("the device is lost")
                os.kill(os.getpid(), signal.SIGKILL)
            with open(seen, "a") as file:
                file.write(f"{result.row.index}\n")
            yield result

    engine.worker.complete = until
    return engine


def main() -> None:
    given = json.loads(sys.argv[1])
    plan = json.loads(Path(given["config"]).read_text())
    number = given["number"]
    prepare(given)
    count = life(Path(plan["lives"]), number)
    ends = plan.get("die", {}).get(str(number), [])
    end = ends[count] if count < len(ends) else None

    def open_model(path: str, overrides: list[str], share: int) -> Any:
        model = fake_model(**plan.get("model", {}) | plan.get("slow", {}).get(str(number), {}))
        start = model.start

        def begin(first_step_tokens: int) -> Any:
            if end == "start":
                os.kill(os.getpid(), signal.SIGKILL)
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            (Path(plan["lives"]) / f"cores.{number}").write_text(cores)
            return dying(start(first_step_tokens), end, Path(plan["lives"]) / f"seen.{number}.{count}")

        return replace(model, start=begin)

    serve(given, open_model)


if __name__ == "__main__":
    main()
