"""Prompts in, generations out: the loop behind ``OfflineEngine.generate`` and ``stream``.

For:        joining prompts, intake, worker and text, for callers who are Python programs.
Not for:    files (cli/generate.py) or MaxText's types (offline_engine.py). Steps are the worker's.
May import: the standard library, numpy, kv_common, maxtext_paged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kv_common.errors import ConfigError
from kv_control.plan import SamplingSpec
from maxtext_paged.formats import BadRow, InputRow
from maxtext_paged.generation import Generation
from maxtext_paged.generation_stream import GenerationStream
from maxtext_paged.intake import IdCheck, Intake, RepeatedIds, id_digest
from maxtext_paged.prompts import Prompt, row_of_prompt, with_params
from maxtext_paged.rows import Row, RowResult
from maxtext_paged.sampling_params import SamplingParams
from maxtext_paged.tokenizer import HfTokenizer
from maxtext_paged.turns import Turns
from maxtext_paged.worker import PagedInferenceWorker


class NoTokenizer:
    """Stands where an engine has none: prompts of token ids run, and nothing else can."""

    def encode(self, text: str) -> list[int]:
        """Never.

        Raises:
          ConfigError: always.
        """
        raise ConfigError("this engine has no tokenizer: give it `tokenizer=`, or prompts as token ids")

    def encode_chat(self, messages: Any) -> list[int]:
        """Never, as ``encode``."""
        return self.encode("")

    def decode(self, ids: Any) -> str:
        """Never, as ``encode``."""
        self.encode("")
        return ""


class PromptRunner:
    """Runs prompts through one worker.

    Args:
      worker: of an open session.
      tokenizer: the caller's, or None. defaults: sampling where a prompt is silent.
      turns: shared by everything that uses the session. check: raises where that was closed.
    """

    def __init__(
        self,
        worker: PagedInferenceWorker,
        *,
        tokenizer: Any,
        defaults: SamplingSpec,
        turns: Turns,
        check: Callable[[], object],
    ) -> None:
        self._worker = worker
        self._tokenizer = None if tokenizer is None else HfTokenizer.wrap(tokenizer)
        self._turns, self._check = turns, check
        self._streams: weakref.WeakSet[GenerationStream] = weakref.WeakSet()
        config = worker.session.config
        self._intake = Intake(
            self._tokenizer or NoTokenizer(),
            defaults,
            vocab_size=int(config.vocab_size),
            max_model_len=int(config.max_target_length),
        )

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams | None] | None
    ) -> list[Generation]:
        """As ``OfflineEngine.generate``."""
        listed = list(with_params(prompts, params))
        found: list[Generation] = []
        sources = [row_of_prompt(prompt, own, index) for index, (prompt, own) in enumerate(listed)]
        ids = IdCheck()
        for source in sources:
            ids.add(source.id, source.line)
        intake = replace(self._intake, repeated=ids.repeated())

        def rows() -> Iterator[Row]:
            for source in sources:
                row = intake.row(source)
                if isinstance(row, BadRow):
                    found.append(Generation.refused(row))
                else:
                    yield _with_place(row)

        with self._turns:
            self._check()
            for result in self._worker.complete(self._worker.in_file_order(rows())):
                source = sources[result.row.index]
                echo = self._echo(source, result.row)
                found.append(Generation.of(result, self._tokenizer, named=source.id is not None, echo=echo))
        return sorted(found, key=lambda generation: generation.index)

    def stream(
        self, prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams | None] | None
    ) -> GenerationStream:
        """As ``OfflineEngine.stream``."""
        pairs = with_params(prompts, params)
        stream = GenerationStream(self._turns, lambda look: self._results(pairs, look), self._check)
        self._streams.add(stream)
        return stream

    def close(self) -> None:
        """Cancel what streams have under way."""
        for stream in list(self._streams):
            stream.close()

    def _echo(self, source: InputRow | BadRow, row: Row) -> str | None:
        """The prompt's text, where the row asks for it to be repeated."""
        if isinstance(source, BadRow) or not source.echo or self._tokenizer is None:
            return None
        return self._tokenizer.decode(row.tokens.tolist()) if source.prompt is None else source.prompt

    def _results(
        self, pairs: Iterator[tuple[Any, SamplingParams | None]], stop_if_closing: Callable[[], None]
    ) -> Generator[Generation, None, None]:
        refused: dict[int, BadRow] = {}
        echoes: dict[int, str] = {}
        unnamed: set[int] = set()
        under_way: dict[int, int] = {}  # digests of ids, and whose they are

        def rows() -> Iterator[Row | RowResult]:
            for index, (prompt, own) in enumerate(pairs):
                stop_if_closing()
                source = row_of_prompt(prompt, own, index)
                row = self._intake.row(source)
                digest = None if source.id is None else id_digest(source.id)
                if not isinstance(row, BadRow) and digest is not None:
                    first = under_way.setdefault(digest, index)
                    if first != index:
                        error = RepeatedIds({digest: (first + 1, index + 1, 2)}).error(source.id, source.line)
                        assert error is not None
                        row = BadRow(index, source.line, error, source.id)
                if isinstance(row, BadRow):
                    refused[index] = row
                    nothing = Row(index=index, id=source.id, tokens=np.zeros(0, np.int32))
                    yield RowResult.refused(nothing, row.error.message)
                else:
                    echo = self._echo(source, row)
                    if echo is not None:
                        echoes[index] = echo
                    if source.id is None:
                        unnamed.add(index)
                    yield _with_place(row)

        completed = self._worker.complete(rows(), lambda _: stop_if_closing())
        try:
            for result in completed:
                index = result.row.index
                bad = refused.pop(index, None)
                if bad is None:
                    named = index not in unnamed
                    unnamed.discard(index)
                    if named:
                        under_way.pop(id_digest(result.row.id), None)  # type: ignore[arg-type]  # str or int
                    yield Generation.of(result, self._tokenizer, named=named, echo=echoes.pop(index, None))
                else:
                    yield Generation.refused(bad)
        finally:
            completed.close()


def _with_place(row: Row) -> Row:
    """A row that ``cancel`` can name: by its place, where the caller gave it no id."""
    return replace(row, id=row.index) if row.id is None else row
