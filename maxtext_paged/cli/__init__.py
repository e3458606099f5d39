"""The command ``maxtext-paged``: its arguments, exit codes and one-line errors.

For:        reading the command line and running one subcommand.
Not for:    what a subcommand does (one module each), importing MaxText (they do, late).
May import: the standard library, kv_common; subcommands when they run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from enum import IntEnum
from typing import NoReturn

from kv_common.errors import ConfigError, UnsupportedError
from maxtext_paged.printable import printable

PROGRAM = "maxtext-paged"
_SAID_CHARACTERS = 4000


class ExitCode(IntEnum):
    """How the command ended."""

    OK = 0
    ROWS_FAILED = 1
    """The job is complete; some rows have error records."""
    USAGE = 2
    """Nothing was run: an argument, a file or an option is unusable."""
    ENGINE = 3
    """The job ended early: the engine or the output failed. What was written is good."""
    INTERRUPTED = 130
    TERMINATED = 143


class CommandError(Exception):
    """Ends the command with one line on stderr."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


def say(message: str) -> None:
    """One line on stderr, where everything goes that is not output; what a terminal would obey is written out."""
    print(f"{PROGRAM}: {printable(message, _SAID_CHARACTERS)}", file=sys.stderr, flush=True)


def one_line(error: BaseException | str) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of seconds above 0")
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see `{self.prog} --help`)")


_EXIT_CODES = """\
exit codes:
  0  all rows were answered          3    the engine or the output failed; what was written is good
  1  some rows have error records    130  interrupted (143: terminated); what was written is good
  2  nothing was run: usage
After 3, 130 and 143 the output is incomplete: the same command with --resume runs the rest.
"""

_OVERRIDES = "MaxText's options and this package's paged_* ones; they win over CONFIG.yml"


def build_parser() -> argparse.ArgumentParser:
    """The arguments of all subcommands."""
    parser = _Parser(
        prog=PROGRAM,
        description="MaxText models over a paged KV cache: a file of prompts in, a file of completions out.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    generate = commands.add_parser(
        "generate",
        help="complete the prompts of a file",
        description="Complete the prompts of a file with the model that CONFIG.yml describes.",
        epilog="""\
each input line is one JSON object with exactly one of
  prompt          text to continue
  messages        [{"role": ..., "content": ...}, ...], written with the model's chat template
  tokens          token ids
and any of id, max_tokens, temperature, top_k, top_p, min_p, seed, stop_token_ids, ignore_eos, min_tokens, n.
Where a line is silent, decode_sampling_* of the configuration apply (greedy by default), and a completion may
be as long as max_target_length has room for.

each output line, in order of completion, has id, index, line, text, token_ids, finish_reason, usage, status_code and
error, and with n above 1 choices, one for each sample.

OpenAI batch files (custom_id, method, url, body) are recognised and answered in their own form; Parquet is read and,
where the output's name ends in .parquet, written (docs/files.md).

"""
        + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    generate.add_argument("config", metavar="CONFIG.yml", help="MaxText configuration, such as `convert` writes")
    generate.add_argument("overrides", metavar="key=value", nargs="*", help=_OVERRIDES)
    generate.add_argument("-i", "--input", required=True, metavar="FILE", help="prompts, one a row; - reads stdin")
    generate.add_argument("-o", "--output", required=True, metavar="FILE", help="completions; - writes to stdout")
    generate.add_argument("--strict", action="store_true", help="list every unusable line and run nothing if any is")
    generate.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    generate.add_argument("--resume", action="store_true", help="run the rows that have no record in the output yet")
    generate.add_argument(
        "--resume-anyway", action="store_true", help="as --resume, also where model, options or input have changed"
    )
    generate.add_argument(
        "--warmup",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="obtain all programs before the first row; without it, each when a step first needs it",
    )
    generate.add_argument("--no-progress", action="store_true", help="say nothing while running")
    generate.add_argument(
        "--progress-interval",
        type=_seconds,
        metavar="SECONDS",
        help="time between lines of progress where stderr is not a terminal (60)",
    )
    generate.add_argument(
        "--metrics-file",
        action="append",
        default=[],
        metavar="FILE",
        help="keep the job's figures in FILE as JSON, or as Prometheus text where it ends in .prom; may be repeated",
    )
    generate.add_argument(
        "--metrics-format", choices=("json", "prometheus"), help="of every --metrics-file, whatever its name"
    )
    generate.add_argument(
        "--metrics-interval",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="time between two writings of it (15)",
    )
    generate.add_argument(
        "--report", metavar="FILE.html", help="write a page about the job: charts, slow and failed rows"
    )

    convert = commands.add_parser(
        "convert",
        help="make a MaxText directory of a GGUF file",
        description="Write an Orbax checkpoint, tokenizer files and config.yml from a GGUF file.",
        allow_abbrev=False,
    )
    convert.add_argument("model", metavar="MODEL.gguf", help="the file to read")
    convert.add_argument(
        "out_dir", metavar="OUT_DIR", help="the directory to write; `generate` takes OUT_DIR/config.yml"
    )
    convert.add_argument("--overwrite", action="store_true", help="replace an earlier conversion in OUT_DIR")

    doctor = commands.add_parser(
        "doctor",
        help="show the device, the versions and the attention backend",
        description="Show device, versions and the chosen attention backend; with a configuration also its model's "
        "KV pool and what decided its size. Loads no weights.",
        allow_abbrev=False,
    )
    doctor.add_argument("config", metavar="CONFIG.yml", nargs="?", help="MaxText configuration")
    doctor.add_argument("overrides", metavar="key=value", nargs="*", help=_OVERRIDES)

    plan = commands.add_parser(
        "plan",
        help="show what a configuration costs in memory, and what fits",
        description="Show the bytes of pages, weights and workspace, per device and in all, and how many requests of "
        "which length fit at once. Loads no weights and allocates no pool.",
        allow_abbrev=False,
    )
    plan.add_argument("config", metavar="CONFIG.yml", help="MaxText configuration")
    plan.add_argument("overrides", metavar="key=value", nargs="*", help=_OVERRIDES)
    plan.add_argument("--json", action="store_true", help="print one JSON object, all sizes in bytes")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with ``key=value`` allowed between and behind options.

    Raises:
      CommandError: something is missing or unknown.
    """
    parser = build_parser()
    # argparse gives up on optional positionals behind an option; it hands them back instead.
    arguments, extra = parser.parse_known_args(argv)
    unknown = [word for word in extra if word.startswith("-") or not hasattr(arguments, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if extra:
        arguments.overrides += extra
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    arguments.own_process = argv is None
    if arguments.command is None and not arguments.version:
        parser.error("which COMMAND? generate, convert, doctor or plan")
    return arguments


def run(argv: Sequence[str] | None) -> int:
    """Run the command and return its exit code; every deliberate error becomes one line on stderr."""
    try:
        arguments = parse(argv)
        if arguments.version:
            from importlib.metadata import version

            print(version(PROGRAM))
            return ExitCode.OK
        return int(importlib.import_module(f"maxtext_paged.cli.{arguments.command}").run(arguments))
    except CommandError as error:
        say(f"error: {one_line(error)}")
        return error.code
    except (ConfigError, UnsupportedError) as error:
        say(f"error: {one_line(error)}")
        return ExitCode.USAGE
    except KeyboardInterrupt:
        say("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:  # Python's own exit code for it, 1, means something else here
        traceback.print_exc()
        say(f"error: unexpected, please report it: {type(error).__name__}: {one_line(error)}")
        return ExitCode.ENGINE
