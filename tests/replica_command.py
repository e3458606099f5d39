"""Runs ``maxtext-paged`` with replicas that are tests/fake_replica.py.

For:        tests of the command with replicas, killed from outside; run it as a script with the command's words.
Not for:    importing.
May import: the standard library, maxtext_paged, tests/fake_engine.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from maxtext_paged.__main__ import main
from maxtext_paged.cli import generate
from maxtext_paged.replicas import devices, group, model
from tests.fake_engine import ByteTokenizer, fake_model


def use_fakes() -> None:
    """Replicas without a model, and a machine of CPUs that nobody has to be asked about."""
    processes: Any = group
    tokenizers: Any = model
    processes.COMMAND = (sys.executable, str(Path(__file__).with_name("fake_replica.py")))
    tokenizers.tokenizer_of = lambda options: ByteTokenizer()
    devices._devices = lambda: ("cpu", False, 1)
    generate.open_model = lambda path, overrides: fake_model()  # type: ignore[assignment]


if __name__ == "__main__":
    use_fakes()
    sys.exit(main(sys.argv[1:]))
