"""``OfflineEngine``: a drop-in for MaxText's, over a paged pool; and the library's own entry points.

For:        prompts in, completions out: in MaxText's own types (``batch_inference``) and in ours (``generate``,
            ``stream``, ``astream``).
Not for:    the loops behind them (worker.py, prompt_runner.py) or files (the command).
May import: kv_common, kv_control, jax, maxtext, maxtext_paged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import Mesh

from kv_common.errors import ConfigError, KvCacheError, UnsupportedError
from kv_control.logit_options import LogitOptions
from kv_control.plan import SamplingSpec
from kv_execution.runtime import RuntimeMetrics
from maxtext_paged.async_stream import drawn_in_threads
from maxtext_paged.batch_rows import BatchRows
from maxtext_paged.completion_output import CompletionOutput
from maxtext_paged.config_file import read_config
from maxtext_paged.dense import check_dense_engine
from maxtext_paged.generation import Generation
from maxtext_paged.generation_stream import GenerationStream
from maxtext_paged.imports import import_dense_engine
from maxtext_paged.prompt_runner import PromptRunner
from maxtext_paged.prompts import Prompt
from maxtext_paged.rows import RowResult
from maxtext_paged.sampling_defaults import default_sampling
from maxtext_paged.sampling_params import SamplingParams
from maxtext_paged.session import PagedSession, open_session
from maxtext_paged.tokenizer import HfTokenizer, as_ids, load_tokenizer
from maxtext_paged.turns import Turns
from maxtext_paged.worker import PagedInferenceWorker

logger = logging.getLogger(__name__)
maxtext_engine = import_dense_engine()

_IRRELEVANT = {
    "enable_batch_prefill": (False, "prompts and decodes always share steps"),
    "min_decode_steps": (10, "rows are looked at after every step"),
    "prefill_lengths": ("auto", "prompts are not padded to buckets of their own"),
    "batch_prefill_max_batch_size": (16, "`paged_max_num_batched_tokens` bounds a step"),
}
"""Arguments that say how MaxText's dense engine works: their defaults, and why they do nothing here."""


class OfflineEngine(maxtext_engine.OfflineEngine):  # type: ignore[name-defined]
    """MaxText's ``OfflineEngine``, paged where the configuration says ``attention=gpu_paged``.

    ::

        with OfflineEngine("model/config.yml") as engine:
            for result in engine.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(result.text)

    Its calls may come from several threads, and from within each other (between the results of a stream, say): one
    thread runs steps at a time, and a call waits for its turn.

    Any other configuration is MaxText's dense engine, unchanged, where that can run (dense.py says when not).
    What differs under ``gpu_paged``:

    - A row fails alone: its output carries ``error``, the others are completed. Outputs come in input order.
    - A row may generate until the context is full (``max_target_length`` less its own prompt), not
      ``max_target_length - max_prefill_predict_length`` tokens whatever its prompt; ``max_tokens`` says less.
    - A prompt may be as long as the context (then it is only scored); a longer one fails and is never cut.
    - Sampling follows ``decode_sampling_*`` (see ``default_sampling``). Every row draws from a stream of its own,
      made from the run key, its seed (or its place in the call) and the position, so neither batch mates nor
      order change a token.
    - ``return_log_prob`` need not be set: logprobs are always returned. No thread is started.

    Attributes:
      tokenizer: the caller's own object, or the one the configuration names, or None (see ``eos_ids``).
      eos_ids: every token that ends a row, sorted. worker: what runs the rows. session: the loop behind it.
      params: the weights in use. mesh, rng: what is in use.
      max_decode_length: most tokens any row can get.
    """

    def __init__(
        self,
        config: Any,
        params: Any = None,
        enable_batch_prefill: bool = False,
        min_decode_steps: int = 10,
        tokenizer: Any = None,
        eos_ids: list[int] | None = None,
        prefill_lengths: list[int] | str = "auto",
        batch_prefill_max_batch_size: int = 16,
        mesh: Mesh | None = None,
        rng: Any = None,
        debug: bool = False,
        *,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the model and allocate its pool.

        Args:
          config: MaxText's configuration, or the path of its YAML file.
          params: weights (``nnx.State`` or mapping, scanned or not); None loads ``load_parameters_path``.
          enable_batch_prefill, min_decode_steps, prefill_lengths, batch_prefill_max_batch_size: accepted, and
            irrelevant under ``gpu_paged``; one INFO line says so where they are set.
          tokenizer: used for end tokens and handed out again; None loads the one the configuration names,
            unless ``eos_ids`` are given: then, as with MaxText, there is none.
          eos_ids: end tokens, besides those of the tokenizer (and of the generation config beside it).
          mesh: devices to use; None takes MaxText's mesh over all of them.
          rng: run key of sampling; None is key 0.
          debug: log a line for every finished row.
          overrides: options that win over the file's, ``{"max_target_length": 512}``; only beside a path.

        Raises:
          ConfigError, UnsupportedError: by name, before anything large is allocated.
        """
        config = read_config(config, overrides)
        settings = {
            "enable_batch_prefill": enable_batch_prefill,
            "min_decode_steps": min_decode_steps,
            "prefill_lengths": prefill_lengths,
            "batch_prefill_max_batch_size": batch_prefill_max_batch_size,
        }
        self.session: PagedSession | None = None
        self._closed, self._turns = False, Turns()
        self._paged = config.attention == "gpu_paged"
        if not self._paged:
            check_dense_engine(config.attention)
            super().__init__(
                config, params, tokenizer=tokenizer, eos_ids=eos_ids, mesh=mesh, rng=rng, debug=debug, **settings
            )
            return
        for name, value in settings.items():
            setattr(self, name, value)
        idle = [f"{name} ({why})" for name, (off, why) in _IRRELEVANT.items() if settings[name] != off]
        if idle:
            logger.info("attention=gpu_paged has no use for %s", ", ".join(idle))
        self._defaults = default_sampling(config)
        self.tokenizer, self.eos_ids, reader = _tokenizer_and_ends(config, tokenizer, eos_ids)
        logger.info("end tokens: %s", self.eos_ids or "none")
        self.config = config
        self.debug = debug
        self.session = open_session(config, mesh=mesh, params=params, rng=rng)
        self.params = self.session.runtime.params
        self.mesh = self.session.model.mesh
        self.rng = jax.random.PRNGKey(0) if rng is None else rng
        self.max_prefill_length = int(config.max_target_length)
        self.max_decode_length = int(config.max_target_length) - 1
        self.worker: Any = PagedInferenceWorker(self.session, self.eos_ids, reader)  # MaxText's, if dense
        self._runner = PromptRunner(
            self.worker,
            tokenizer=reader,
            defaults=self._defaults,
            turns=self._turns,
            check=self._running_session,
        )

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams | None] | None = None
    ) -> list[Generation]:
        """Complete every prompt; one result for each, in their order, whatever failed.

        Args:
          prompts: text, token ids (a list or array ``[n]``, ``[1, n]``, or a tokenizer's mapping with ``input_ids``), a
            chat's messages (``[{"role": ..., "content": ...}]``), or an object with the keys that a row of a file may
            have (docs/files.md), its own options among them. All of one kind or mixed.
          params: for all prompts, or one for each; a prompt's own options win. None asks for nothing.

        Prompts that share an ``id`` all fail, as in a file: whoever joins results by id could mistake them.

        Raises:
          ValueError: ``prompts`` is one prompt, ``params`` is something else or has another length.
          KvCacheError: the engine was closed.
        """
        self._paged_only("generate")
        self._running_session()
        return self._runner.generate(prompts, params)

    def stream(
        self, prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams | None] | None = None
    ) -> GenerationStream:
        """Complete prompts as they come; results are handed out in the order in which they finish.

        Nothing runs but inside ``next``. Prompts are drawn as there is room: at most ``3 * paged_max_num_seqs`` are
        under way, so neither the input nor the output is ever held as a whole. An iterable that waits makes all wait;
        one that raises ends the stream with its exception, and what is under way is cancelled.

        Args:
          prompts, params: as in ``generate``; both are drawn one at a time. A prompt fails whose ``id`` is that of one
            still under way.

        Raises:
          ValueError: as ``generate``; where ``params`` ends first, or has more, once that shows.
          KvCacheError: the engine was closed, also meanwhile.
        """
        self._paged_only("stream")
        self._running_session()
        return self._runner.stream(prompts, params)

    def astream(
        self, prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams | None] | None = None
    ) -> AsyncIterator[Generation]:
        """``stream`` for ``async for``: steps run in a worker thread, and the event loop goes on meanwhile.

        A task that is cancelled while it waits cancels what the stream has under way.
        """
        return drawn_in_threads(self.stream(prompts, params))

    def update_params(self, params: Any) -> None:
        """Exchange the weights for the next call: a trainer's parameters as they are, scanned or not. Nothing
        compiles."""
        if not self._paged:
            self._not_closed()
            super().update_params(params)
            return
        with self._turns:
            self._running_session()
            self.worker.update_params(params)
            self.params = self.worker.session.runtime.params

    def reset_prefix_cache(self) -> int:
        """Forget every cached page (``update_params`` does so by itself); returns how many there were."""
        self._paged_only("reset_prefix_cache")
        with self._turns:
            return self._running_session().reset_prefix_cache()

    def metrics(self) -> RuntimeMetrics:
        """What the engine did so far: pages, sharing, preemptions, steps and programs."""
        self._paged_only("metrics")
        return self._running_session().runtime.metrics()

    def batch_inference(
        self,
        data: Iterable[Any],
        desc: str = "",
        rng: Any = None,
        *,
        max_tokens: int | Sequence[int | None] | None = None,
        min_tokens: int | Sequence[int | None] | None = None,
        ignore_eos: bool = False,
        sampling: SamplingSpec | Sequence[SamplingSpec | None] | None = None,
        seed: int | Sequence[int | None] | None = None,
        n: int = 1,
        options: LogitOptions | Sequence[LogitOptions | None] | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[CompletionOutput]:
        """Complete every row; outputs come in input order, one per row, whatever failed.

        Args:
          data: rows, of one kind or mixed: ``InputData`` (tokens beyond ``true_length`` are padding), jax or numpy
            arrays ``[n]`` or ``[1, n]``, lists of token ids, or a tokenizer's mapping with ``input_ids``. Anything
            else is that row's error.
          desc: named in the log line of this call.
          rng: run key from this call on; None keeps the one there is, and with it the samples of equal rows.
          max_tokens: most tokens to generate, for all rows or one per row; None is as many as fit.
          min_tokens: before it has so many, a row chooses no token that would end it, and no stop string counts.
          ignore_eos: no token ends a row; stop strings do.
          sampling: instead of ``decode_sampling_*``, for all rows or one per row; seeds come from ``seed``.
          seed: of each row's samples; one number for all rows means the same stream for each. None makes one from
            the row's place in the call.
          n: samples of every row, under one seed but from different streams; they share the prompt's pages. With more
            than one, outputs carry ``samples``.
          options: penalties, bias and alternatives, for all rows or one per row.
          stop: strings that end a row, for all rows; ids and logprobs keep the tokens that completed one.

        Raises:
          ValueError: two rows share an id (as text, for that is how outputs carry it), or an argument has another
            length than ``data``.
        """
        per_row: dict[str, Any] = {
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "sampling": sampling,
            "seed": seed,
            "options": options,
        }
        if not self._paged:
            self._not_closed()
            flags = {"ignore_eos": ignore_eos or None, "n": None if n == 1 else n, "stop": stop or None}
            asked = [name for name, value in {**per_row, **flags}.items() if value is not None]
            if asked:
                raise UnsupportedError(f"{', '.join(asked)}: only with attention=gpu_paged")
            return super().batch_inference(data, desc, rng)
        session = self._running_session()
        rows = BatchRows(data, defaults=self._defaults, ignore_eos=ignore_eos, n=n, stop=stop, **per_row)
        with self._turns:
            self._running_session()
            self.rng = self.rng if rng is None else rng
            started, before = time.monotonic(), session.driver.metrics
            results = self.worker.run_inference(self.worker.in_file_order(rows), rng) + rows.unreadable
            results.sort(key=lambda result: result.row.index)
            self._report(desc, results, time.monotonic() - started, before)
        return [CompletionOutput.of(result) for result in results]

    def cancel(self, row_id: Any) -> None:
        """End a row of the calls under way, from any thread: by its id (``InputData.id``, or a prompt's own), or by its
        place in the call where it has none.

        Its output says "cancelled" and has what it got by then; a row that has not started yet is not run. Ids that
        the call does not have, or whose row has ended, are ignored.
        """
        self._paged_only("cancel")
        self._running_session()
        self.worker.cancel(row_id)

    def close(self) -> None:
        """Give the pool's memory back; weights are let go, and stay the caller's where they are. Once is enough.

        What streams have under way is cancelled; a call of another thread is waited for.

        Raises:
          KvCacheError: asked from within a call, by the prompts that it draws.
        """
        with self._turns:
            if self._turns.nested:
                raise KvCacheError("close: a call of this OfflineEngine is under way; close it when that has returned")
            if self.session is not None:
                self._runner.close()
                self.session.close()
            self.session = self.worker = self.params = None
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare_data(self, data: Any) -> Any:
        """MaxText's padding and sorting, which has no place here.

        Raises:
          UnsupportedError: under ``gpu_paged``.
        """
        self._dense_only("prepare_data")
        return super().prepare_data(data)

    def pad_data(self, data: Any) -> Any:
        """As ``prepare_data``."""
        self._dense_only("pad_data")
        return super().pad_data(data)

    def _dense_only(self, name: str) -> None:
        if self._paged:
            raise UnsupportedError(f"{name}: attention=gpu_paged neither pads, sorts nor cuts rows")

    def _paged_only(self, name: str) -> None:
        if not self._paged:
            raise UnsupportedError(f"{name}: only with attention=gpu_paged")

    def _running_session(self) -> PagedSession:
        self._not_closed()
        assert self.session is not None
        return self.session

    def _not_closed(self) -> None:
        if self._closed:
            raise KvCacheError("this OfflineEngine was closed")

    def _report(self, desc: str, results: list[RowResult], seconds: float, before: Any) -> None:
        metrics = self._running_session().driver.metrics
        for result in results if self.debug else ():
            logger.info("row %s: %s, %s %s", result.row.id, result.finish_reason, result.usage, result.error or "")
        logger.info(
            "batch_inference%s: %d rows (%d failed), %d tokens generated in %.2f s, %d steps, %d preemptions",
            f" {desc}" if desc else "",
            len(results),
            sum(result.finish_reason == "error" for result in results),
            sum(result.usage.completion_tokens for result in results),
            seconds,
            metrics.num_steps - before.num_steps,
            metrics.num_preemptions - before.num_preemptions,
        )


def _tokenizer_and_ends(config: Any, tokenizer: Any, eos_ids: Any) -> tuple[Any, list[int], HfTokenizer | None]:
    """The tokenizer to hand out, the union of its end tokens and the caller's, and what reads text, if it can."""
    if tokenizer is None and eos_ids is None:
        try:
            tokenizer = load_tokenizer(config)
        except ConfigError as error:
            raise ConfigError(f"{error}; or give the engine `tokenizer=` or `eos_ids=`") from error
    ends = set(as_ids(eos_ids))
    reader = None
    if tokenizer is not None:
        try:
            reader = HfTokenizer.wrap(tokenizer)
            ends |= reader.eos_ids
        except ConfigError as error:
            if eos_ids is None:
                raise
            logger.warning("only the given eos_ids end a row: %s", error)
    return tokenizer, sorted(ends), reader
