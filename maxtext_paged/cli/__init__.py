"""The command ``maxtext-paged``: its arguments, exit codes and one-line errors.

For:        reading the command line and running one subcommand.
Not for:    what a subcommand does (one module each), importing MaxText (they do, late).
May import: the standard library, kv_common; subcommands when they run.
"""

from __future__ import annotations

import argparse
import difflib
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


def _above_0(text: str, of: str = "") -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number{of} above 0")
    return value


def _seconds(text: str) -> float:
    return _above_0(text, " of seconds")


def _replicas(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= 256):
        raise argparse.ArgumentTypeError(f"{text!r}: must be auto, or a number from 1 to 256")
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse names key=value among what is missing: it counts as given only once CONFIG.yml stands before it.
        message = message.replace(" key=value,", "").removesuffix(", key=value")
        raise CommandError(f"{message} (see `{self.prog} --help`)")

    def unrecognized(self, words: Sequence[str]) -> NoReturn:
        """Refuse words that are no arguments, with the option that the first was likely meant to be."""
        near = difflib.get_close_matches(words[0].partition("=")[0], self._option_string_actions, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{hint}")


_EXIT_CODES = """\
exit codes:
  0  all rows were answered          3    the engine or the output failed; what was written is good
  1  some rows have error records    130  interrupted (143: terminated); what was written is good
  2  nothing was run: usage
After 3, 130 and 143 the output is incomplete: the same command with --resume runs the rest.
"""

_VERIFY_CODES = """\
exit codes:
  0  rows were compared and none differs beyond ties
  1  some rows differ beyond ties
  2  nothing could be compared: usage, another model or input, only rows that cannot be verified
"""

_OVERRIDES = "MaxText's options and this package's paged_* ones; they win over CONFIG.yml"


def build_parser() -> _Parser:
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
    generate.add_argument(
        "--replicas",
        type=_replicas,
        metavar="N|auto",
        help="run N engines, each in a process on its share of devices and cores; auto: one for each group of devices",
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

    verify = commands.add_parser(
        "verify",
        help="replay rows of an output through MaxText's dense forward",
        description="Draw finished rows of an output of `generate` and replay them through MaxText's own dense "
        "forward, teacher-forced. Which model and input: as OUT.run.json says, unless given.",
        epilog=_VERIFY_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verify.add_argument("output", metavar="OUT", help="the completions to verify: JSON lines or Parquet")
    verify.add_argument("overrides", metavar="key=value", nargs="*", help=_OVERRIDES)
    verify.add_argument("--config", metavar="CONFIG.yml", help="the configuration, if not the run's own")
    verify.add_argument("-i", "--input", metavar="FILE", help="the prompts, if they are elsewhere now")
    verify.add_argument("--sample", default="1%", metavar="SHARE", help="rows to draw: 1%%, 100%%, or a number (1%%)")
    verify.add_argument("--seed", type=int, default=0, help="of the draw: the same seed draws the same rows (0)")
    verify.add_argument(
        "--tolerance",
        type=_above_0,
        metavar="SHARE",
        help="how far a logit may be off by rounding, as a share of the largest (by dtype: 1e-4 for float32)",
    )
    verify.add_argument("--anyway", action="store_true", help="also with another model or input than the run's")
    verify.add_argument("--json", action="store_true", help="print one JSON object")

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


def _of_command(parser: _Parser, command: str | None) -> _Parser:
    """The parser of a subcommand; ``parser`` itself where none was named."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and command is not None:
            chosen = action.choices[command]
            assert isinstance(chosen, _Parser)
            return chosen
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
        _of_command(parser, arguments.command).unrecognized(unknown)
    if extra:
        arguments.overrides += extra
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    arguments.own_process = argv is None
    if arguments.command is None and not arguments.version:
        parser.error("which COMMAND? generate, verify, convert, doctor or plan")
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
