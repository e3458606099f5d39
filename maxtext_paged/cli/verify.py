"""``maxtext-paged verify``: can this file be trusted?

For:        drawing finished rows of an output and replaying them through MaxText's own dense forward.
Not for:    the parts: drawing (sampled_records.py), scores (dense_forward.py), the verdict on one row (replay.py).
May import: the standard library, numpy, maxtext_paged; MaxText through ``import_maxtext`` only.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from maxtext_paged.cli import CommandError, ExitCode, say
from maxtext_paged.cli.configuration import check_arguments
from maxtext_paged.cli.files import STANDARD, open_input, rows_path
from maxtext_paged.cli.run_file import SUFFIX, RunFile, differences
from maxtext_paged.cli.sampled_records import SampledRecords, Share
from maxtext_paged.formats import OWN, BadRow, InputRow
from maxtext_paged.formats.sources import open_source
from maxtext_paged.printable import printable
from maxtext_paged.replay import Verdict, judge, logit_error, why_not_argmax
from maxtext_paged.rows import Row

MAX_SHOWN = 20
"""Rows that differ and are listed; all are counted, and all are in the JSON."""
NOTHING = "nothing was generated"

Scorer = Callable[[Any], Any]
"""Token ids of a sequence to its ``DenseScores``."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What rows are replayed with.

    Attributes:
      scores: of a sequence. error: how far a logit may be off, as a share of the largest.
      tokenizer, intake: of the configuration. identity: of the run that it would be, the weights' digest among it.
    """

    scores: Scorer
    error: float
    tokenizer: Any
    intake: Any
    identity: Mapping[str, Mapping[str, Any]]


@dataclass(slots=True)
class Findings:
    """What was found; every count is of the rows that were drawn.

    Attributes:
      drawn: rows. replayed: those of which something could be compared. without: why not, to how many of the others.
      tokens, ties, logprobs: compared. worst_margin, worst_logprob: the largest, and the row it is in.
      by_logprobs: rows whose tokens need not be the likeliest, compared by their logprobs.
      differ: what is wrong with each row in which something is, by row.
    """

    drawn: int = 0
    replayed: int = 0
    by_logprobs: int = 0
    without: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    ties: int = 0
    logprobs: int = 0
    worst_margin: tuple[float, int | None] = (0.0, None)
    worst_logprob: tuple[float, int | None] = (0.0, None)
    differ: dict[int, dict[str, Any]] = field(default_factory=dict)

    def add(self, index: int, verdicts: Sequence[Verdict]) -> None:
        """Count a row's samples."""
        for verdict in verdicts:
            self.tokens += verdict.num_tokens
            self.ties += verdict.num_ties
            self.logprobs += verdict.num_logprobs
            if verdict.worst_margin > self.worst_margin[0]:
                self.worst_margin = verdict.worst_margin, index
            if verdict.worst_logprob > self.worst_logprob[0]:
                self.worst_logprob = verdict.worst_logprob, index


def run(arguments: argparse.Namespace) -> int:
    """Verify; the exit code is 0 only where rows were compared and none differs."""
    try:
        share = Share.parse(arguments.sample)
    except ValueError as error:
        raise CommandError(f"--sample {error}") from error
    output = os.path.abspath(arguments.output)
    if not (Path(output).is_file() or Path(rows_path(output)).is_file()):
        raise CommandError(f"{arguments.output}: no such output")
    run_file = RunFile(output)
    run_file.read()
    config, source_path, overrides = _places(arguments, run_file)
    check_arguments(config, overrides)
    records = SampledRecords(output, share, arguments.seed)
    if not len(records):
        raise CommandError(f"{arguments.output}: no row was answered ({records.num_failed} failed): nothing to verify")
    yardstick = open_yardstick(config, overrides, arguments.tolerance)
    with open_input(source_path) as file:
        source = open_source(source_path, file)
        if source.form is not OWN:
            raise CommandError(
                f"{source_path}: records of the {source.form.name} form carry no token ids, so nothing can be replayed"
            )
        check_provenance(arguments, run_file, {**yardstick.identity, "input": {"sha256": source.digest()}})
        found = verify_rows(source.rows(), records, yardstick)
    show(arguments, records, found, yardstick.error)
    if found.differ:
        return ExitCode.ROWS_FAILED
    if not found.replayed:
        raise CommandError("nothing was verified: no row that was drawn can be compared (see above)")
    return ExitCode.OK


def _places(arguments: argparse.Namespace, run_file: RunFile) -> tuple[str, str, list[str]]:
    """Configuration, input and overrides: as given, else as the run file has them."""
    made: Mapping[str, Any] = run_file.made_with or {}
    config, source = arguments.config or made.get("config"), arguments.input or made.get("input")
    for value, option in ((config, "--config CONFIG.yml"), (source, "-i INPUT")):
        if value is None or value == STANDARD:
            raise CommandError(f"{arguments.output}{SUFFIX} does not say where it came from: give {option}")
    overrides, config, source = list(arguments.overrides), str(config), str(source)
    if arguments.config is None:
        overrides = [*made.get("overrides", ()), *overrides]
        config, source = os.path.abspath(config), os.path.abspath(source)
        if Path(made.get("directory", "")).is_dir():
            os.chdir(made["directory"])  # the configuration may name files from there
    if not Path(source).is_file():
        raise CommandError(f"{source}: no such input file; give -i INPUT")
    return config, source, overrides


def open_yardstick(config_path: str, overrides: Sequence[str], tolerance: float | None) -> Yardstick:
    """Load the weights as the engine holds them, and MaxText's dense forward over them; no pool is allocated."""
    from maxtext_paged.cli.model import open_model

    model = open_model(config_path, overrides, level=logging.WARNING)
    assert model.assembly is not None
    from maxtext_paged.dense_forward import DenseForward
    from maxtext_paged.loading import load_params
    from maxtext_paged.namespace import weights_fingerprint

    assembly = model.assembly
    params = load_params(assembly.model)
    dense = DenseForward(assembly.config, assembly.model.mesh)
    dtypes = (np.dtype(assembly.config.dtype).name, assembly.model.layout.dtype)
    return Yardstick(
        scores=lambda tokens: dense.scores(params, tokens),
        error=logit_error(*dtypes) if tolerance is None else tolerance,
        tokenizer=model.tokenizer,
        intake=model.intake,
        identity={**model.identity, "model": {"weights": weights_fingerprint(params)}},
    )


def check_provenance(arguments: argparse.Namespace, run_file: RunFile, now: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to compare a file with a model, tokenizer or input that it was not made with.

    Options that decide no token may differ: they are named.

    Raises:
      CommandError: what differs.
    """
    if run_file.last is None:
        if not arguments.anyway:
            raise CommandError(f"no {arguments.output}{SUFFIX} says what the file was made with: --anyway verifies it")
        return
    made = {part: dict(values) for part, values in run_file.last.items()}
    made.get("input", {}).pop("rows", None)
    deciding = {part: now[part] for part in ("input", "tokenizer", "model", "sampling") if part in now}
    found = differences(made, deciding)
    if found and not arguments.anyway:
        raise CommandError(f"{arguments.output} was made with something else: {'; '.join(found)}: --anyway compares")
    for difference in [*found, *differences(made, {"configuration": now.get("configuration", {})})]:
        say(f"note: {difference}")
    if len(run_file.runs) > 1:
        say(f"note: {len(run_file.runs)} runs wrote {arguments.output}; it is compared with the last one's model")


def verify_rows(sources: Iterator[InputRow | BadRow], records: SampledRecords, yardstick: Yardstick) -> Findings:
    """Replay the drawn rows, in the order of the input."""
    found, left = Findings(drawn=len(records)), records.indices
    for source in sources:
        if source.index not in left:
            continue
        left.discard(source.index)
        wrong = _verify_row(source, records.record(source.index), yardstick, found)
        if wrong is not None:
            found.differ[source.index] = {"line": source.line, "id": source.id, **wrong}
        if not left:
            break
    for index in sorted(left):
        found.differ[index] = {"line": None, "id": None, "what": "the input has no such row"}
    return found


def _verify_row(
    source: InputRow | BadRow, record: dict[str, Any], yardstick: Yardstick, found: Findings
) -> dict[str, Any] | None:
    """Compare one record; what is wrong with it, or None."""
    row = yardstick.intake.row(source)
    if isinstance(row, BadRow) or isinstance(source, BadRow):
        why = row.error.message if isinstance(row, BadRow) else ""
        return {"what": f"the row is answered, and cannot run: {why}"}
    if record.get("id") != source.id and str(record.get("id")) != str(source.id):
        return {"what": f"the record's id is {record.get('id')!r}"}
    samples = record.get("choices") or [record]
    if len(samples) != row.n:
        return {"what": f"the row asks for {row.n} samples, the record has {len(samples)}"}
    reason, verdicts = why_not_argmax(row), []
    for number, sample in enumerate(samples):
        where = {"sample": number} if row.n > 1 else {}
        written = np.asarray(sample["token_ids"], np.int32)
        prompt = np.asarray(row.tokens, np.int32)
        if source.echo:
            if not np.array_equal(written[: len(prompt)], prompt):
                return {**where, "what": "its tokens do not begin with the prompt's"}
            written = written[len(prompt) :]
        tokens = np.concatenate([prompt, written])
        vocab_size = yardstick.intake.vocab_size
        if len(tokens) > yardstick.intake.max_model_len or not np.all((0 <= tokens) & (tokens < vocab_size)):
            return {**where, "what": "its tokens cannot be this model's"}
        if wrong := _text_differs(source, row, sample, written, yardstick.tokenizer):
            return {**where, "what": wrong}
        listed, first = sample.get("logprobs"), len(prompt) if not source.echo else 0
        scored = record.get("prompt_logprobs") if number == 0 else None
        if reason is not None and not listed and not scored:
            continue
        scores = yardstick.scores(tokens)
        verdict = judge(
            scores,
            tokens,
            len(prompt),
            error=yardstick.error,
            argmax=reason is None,
            logprobs=listed or (),
            first_logprob=first,
        )
        verdicts.append(verdict)
        if scored:
            verdicts.append(
                judge(
                    scores, tokens, len(prompt), error=yardstick.error, argmax=False, logprobs=scored, first_logprob=0
                )
            )
        for each in verdicts:
            if each.difference is not None:
                found.add(source.index, verdicts)
                found.replayed += 1
                return {**where, "what": "a token is not the likeliest", **asdict(each.difference)}
            if each.wrong_logprobs:
                found.add(source.index, verdicts)
                found.replayed += 1
                return {**where, "what": f"{each.wrong_logprobs} logprobs differ, by up to {each.worst_logprob:.3g}"}
    found.add(source.index, verdicts)
    if any(verdict.checked for verdict in verdicts):
        found.replayed += 1
        found.by_logprobs += reason is not None
    else:
        found.without[reason or NOTHING] += 1
    return None


def _text_differs(source: InputRow, row: Row, sample: Mapping[str, Any], written: Any, tokenizer: Any) -> str | None:
    """Whether a text is that of its tokens; of rows with stop strings only what is sure."""
    if row.stop:
        return None
    ids = written.tolist()
    text = tokenizer.decode(ids[:-1] if sample["finish_reason"] == "stop" else ids)
    if source.echo:
        prompt = tokenizer.decode(row.tokens.tolist()) if source.prompt is None else source.prompt
        text = prompt + text
    return None if text == sample["text"] else "its text is not that of its tokens"


# --- what is said of it ------------------------------------------------------------------------------------


def show(arguments: argparse.Namespace, records: SampledRecords, found: Findings, error: float) -> None:
    """Print the findings on stdout."""
    if arguments.json:
        content = asdict(found) | {"without": dict(found.without), "records": records.num_records}
        content |= {"failed": records.num_failed, "logit_error": error}
        content["differ"] = [{"index": index, **wrong} for index, wrong in found.differ.items()]
        for name in ("worst_margin", "worst_logprob"):
            value, index = getattr(found, name)
            content[name] = {"value": value, "index": index}
        print(json.dumps(content))
        return
    for line in lines(arguments.output, records, found, error):
        print(printable(line, 2000))


def lines(output: str, records: SampledRecords, found: Findings, error: float) -> Iterator[str]:
    """The findings, for people."""
    answered = records.num_records - records.num_failed
    yield f"{output}: {found.drawn} of {answered} answered rows drawn, {found.replayed} replayed"
    agree = found.tokens - found.ties - sum("place" in wrong for wrong in found.differ.values())
    if found.tokens:
        share = agree / found.tokens
        yield (
            f"tokens: {agree} of {found.tokens} ({share:.3%}) are the dense forward's likeliest, {found.ties} within a "
            f"tie (2 x {error:g} of the largest logit); worst margin {_worst(found.worst_margin)}"
        )
    if found.logprobs:
        yield f"logprobs: {found.logprobs} compared, the largest difference {_worst(found.worst_logprob)}"
    if found.by_logprobs:
        yield f"{found.by_logprobs} rows whose tokens need not be the likeliest were compared by their logprobs"
    for reason, count in found.without.most_common():
        more = "" if reason == NOTHING else ", and no logprobs"
        yield f"not verifiable: {count} rows ({reason}{more})"
    yield f"rows that differ beyond ties: {len(found.differ)}"
    for index, wrong in list(found.differ.items())[:MAX_SHOWN]:
        name = f" id={json.dumps(wrong['id'])}" if wrong["id"] is not None else ""
        which = f" sample {wrong['sample']}:" if "sample" in wrong else ""
        token = ""
        if "place" in wrong:
            token = (
                f": token {wrong['place']} is {wrong['token']}, the dense forward has {wrong['best']}, by "
                f"{wrong['margin']:.3g} (a tie: {wrong['bound']:.2g})"
            )
        yield f"  row {index} (line {wrong['line']}){name}:{which} {wrong['what']}{token}"
    if len(found.differ) > MAX_SHOWN:
        yield f"  ... and {len(found.differ) - MAX_SHOWN} more (--json lists all)"


def _worst(found: tuple[float, int | None]) -> str:
    value, index = found
    return f"{value:.3g}" + ("" if index is None else f" (row {index})")
