"""Runs ``maxtext-paged`` in a process of its own and reports on it: under pytest MaxText behaves otherwise.

For:        tests of the command; run it as a script with a plan (JSON) as its only argument.
Not for:    importing.
May import: the standard library, maxtext_paged.

The plan is an object with
  commands      argument lists, run one after the other in this process;
  report        where to write [{"code", "out", "err"}, ...], the names of the imported packages, and what was
                unpickled, started or connected to;
  capture       whether to put what each command prints into the report instead of printing it;
  undecodable   ids of rows whose detokenising raises;
  noisy         whether something prints to stdout whenever a row is detokenised.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from maxtext_paged.__main__ import main


def disturb_decoding(undecodable: list[Any], *, noisy: bool) -> None:
    """Put a fault, and careless printing, where rows are detokenised."""
    from maxtext_paged.cli import generate

    decode = generate.completion_text

    def disturbed(tokenizer: Any, result: Any) -> str:
        if noisy:
            print("noise from Python")
            os.write(1, b"noise from C\n")
        if result.row.id in undecodable:
            raise RuntimeError("a fault in the tokenizer")
        return decode(tokenizer, result)

    generate.completion_text = disturbed


def run(argv: list[str], *, capture: bool) -> dict[str, Any]:
    """One command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        if capture:
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
        try:
            code = main(argv)
        except SystemExit as leaving:  # argparse's --help
            code = leaving.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


WATCHED = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")


def watch() -> list[str]:
    """Events of this process from now on that a loaded file has no business to cause; Python reports them itself."""
    seen: list[str] = []
    sys.addaudithook(lambda event, arguments: seen.append(f"{event} {arguments}") if event in WATCHED else None)
    return seen


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    disturb_decoding(plan.get("undecodable", []), noisy=plan.get("noisy", False))
    seen = watch()
    results = [run(argv, capture=plan.get("capture", False)) for argv in plan["commands"]]
    packages = sorted({name.split(".")[0] for name in sys.modules})
    Path(plan["report"]).write_text(json.dumps({"commands": results, "packages": packages, "seen": seen}))
    sys.exit(results[-1]["code"])
