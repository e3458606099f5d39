"""``maxtext-paged convert``: a GGUF file into a directory that ``generate`` takes.

For:        the subcommand's arguments and messages.
Not for:    converting (maxtext_paged.convert).
May import: maxtext_paged.convert.
"""

from __future__ import annotations

import argparse
import time

from maxtext_paged.cli import ExitCode, say
from maxtext_paged.cli.environment import prepare_environment


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print the config's path on stdout."""
    prepare_environment()
    from maxtext_paged.convert import convert_gguf

    started = time.monotonic()
    directory = convert_gguf(arguments.model, arguments.out_dir, overwrite=arguments.overwrite)
    say(f"converted in {time.monotonic() - started:.0f} s; the configuration is")
    print(directory / "config.yml")
    return ExitCode.OK
