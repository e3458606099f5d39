"""Ray Data: rows of a dataset in, rows with completions out, one engine for each actor.

::

    rows = ray.data.read_parquet("prompts/")
    rows = grouped(unfinished(rows, "answers/"), 256)
    rows = rows.map_batches(Generate, fn_constructor_args=["model/config.yml"], batch_format="pyarrow",
                            batch_size=256, compute=ray.data.ActorPoolStrategy(size=8))
    print(write(rows, "answers/"))

For:        ``map_batches``: rows like those of a file (docs/files.md), each with its own error where it fails.
Not for:    one machine without Ray (``generate --replicas``), or anything that a dataset does by itself.
May import: the standard library, numpy, pyarrow, maxtext_paged; ray is the caller's; MaxText where an engine is opened.

A batch that Ray runs again, because an actor died, gives the same rows: a row without a seed has one made from its id.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray

from maxtext_paged.formats.own import error_object
from maxtext_paged.generation import Generation
from maxtext_paged.intake import id_digest
from maxtext_paged.row_fields import KEYS
from maxtext_paged.rows import row_seed

SUFFIX = ".parquet"
_PREFIX = "__prefix__"
_PREFIX_BYTES = 4096
_SEEDS = 1 << 31
_ERROR = pyarrow.struct([(name, pyarrow.string()) for name in ("message", "type", "code")])
_IDS = pyarrow.list_(pyarrow.int32())
_NUMBERS = pyarrow.list_(pyarrow.float64())
_SAMPLE = pyarrow.struct([("text", pyarrow.string()), ("token_ids", _IDS), ("finish_reason", pyarrow.string())])

RESULT_COLUMNS: dict[str, Any] = {
    "text": pyarrow.string(),
    "token_ids": _IDS,
    "finish_reason": pyarrow.string(),
    "prompt_tokens": pyarrow.int64(),
    "completion_tokens": pyarrow.int64(),
    "cached_tokens": pyarrow.int64(),
    "status_code": pyarrow.int32(),
    "error": _ERROR,
}
"""Columns that every batch has behind its own."""


class Engine(Protocol):
    """What is needed of ``OfflineEngine``."""

    def generate(self, prompts: Iterable[Any], params: Any = None) -> list[Generation]:
        """One result for each prompt, in their order."""
        ...


class Generate:
    """A callable for ``Dataset.map_batches(..., batch_format="pyarrow")``; each actor makes one and keeps its engine.

    Columns by the names that a row of a file may have (``id``, ``prompt``, ``messages``, ``tokens``, ``max_tokens``,
    ...) say what is asked; all columns pass. Those of ``RESULT_COLUMNS`` stand behind them, with ``choices`` where rows
    may ask for several samples and ``logprobs`` where they ask for those. A row that fails has its ``error``, and
    the others their answers. Rows of one batch are started along their common prefixes, as those of a file are.

    Args:
      config: path of a configuration. overrides: options that win over the file's.
      params: ``SamplingParams`` or its options, for rows that are silent.
      make_engine: instead of opening ``OfflineEngine(config, overrides=overrides)``.
    """

    def __init__(
        self,
        config: str = "",
        overrides: Mapping[str, Any] | None = None,
        params: Any = None,
        *,
        make_engine: Callable[[], Engine] | None = None,
    ) -> None:
        if make_engine is None:
            from maxtext_paged import OfflineEngine

            self.engine: Engine = OfflineEngine(config, overrides=dict(overrides or {}))
        else:
            self.engine = make_engine()
        self._params = dict(params) if isinstance(params, Mapping) else {} if params is None else params.options()

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """Complete the rows of one batch."""
        names = [name for name in batch.column_names if name in KEYS]
        rows = [self._row(row) for row in batch.select(names).to_pylist()] if names else [{}] * batch.num_rows
        results = self.engine.generate(rows)
        columns: dict[str, list[Any]] = {name: [] for name in RESULT_COLUMNS}
        for result in results:
            for name, value in _result(result).items():
                columns[name].append(value)
        kinds = dict(RESULT_COLUMNS)
        if "n" in names or self._params.get("n", 1) > 1:
            kinds["choices"] = pyarrow.list_(_SAMPLE)
            columns["choices"] = [[_sample(sample) for sample in result.samples or (result,)] for result in results]
        if "logprobs" in names or self._params.get("logprobs"):
            kinds["logprobs"] = _NUMBERS
            columns["logprobs"] = [result.logprobs.astype(float).tolist() for result in results]
        kept = batch.drop_columns([name for name in kinds if name in batch.column_names])
        for name, kind in kinds.items():
            kept = kept.append_column(name, pyarrow.array(columns[name], kind))
        return kept

    def _row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        asked = {**self._params, **{name: _plain(value) for name, value in row.items() if value is not None}}
        if asked.get("seed") is None and asked.get("id") is not None:
            asked["seed"] = row_seed(None, id_digest(asked["id"]) % _SEEDS) % _SEEDS
        return asked


def _plain(value: Any) -> Any:
    """Structs have all their fields in every row, asked for or not."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [{name: part for name, part in entry.items() if part is not None} for entry in value]
    return value


def _result(result: Generation) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids.tolist(),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "cached_tokens": result.usage.cached_tokens,
        "status_code": 200 if result.error is None else result.error.status_code,
        "error": error_object(result.error),
    }


def _sample(result: Generation) -> dict[str, Any]:
    return {"text": result.text, "token_ids": result.token_ids.tolist(), "finish_reason": result.finish_reason}


# --- datasets ----------------------------------------------------------------------------------------------


def grouped(dataset: Any, batch_size: int) -> Any:
    """The dataset with rows of a common prefix beside each other, so that they meet in one batch.

    Ray sorts the whole dataset for that, which keeps it in its object store; rows that share little need it not. What
    is sorted is few large blocks, and a block is what one actor takes: they are cut to batches.
    """
    dataset = dataset.map_batches(_with_prefix, batch_format="pyarrow")
    ordered = dataset.sort(_PREFIX).drop_columns([_PREFIX])
    return ordered.repartition(target_num_rows_per_block=batch_size)


def _with_prefix(batch: pyarrow.Table) -> pyarrow.Table:
    rows = batch.select([name for name in ("prompt", "messages", "tokens") if name in batch.column_names]).to_pylist()
    return batch.append_column(_PREFIX, pyarrow.array(map(prefix_key, rows), pyarrow.binary()))


def prefix_key(row: Mapping[str, Any]) -> bytes:
    """Sorts rows so that those with a common beginning stand together.

    >>> prefix_key({"prompt": "ab", "tokens": None}), prefix_key({"tokens": [1, 256]})
    (b'ab', b'\\x00\\x00\\x00\\x01\\x00\\x00\\x01\\x00')
    """
    if row.get("prompt") is not None:
        return str(row["prompt"]).encode("utf-8", "replace")[:_PREFIX_BYTES]
    if row.get("tokens") is not None:
        return np.asarray(row["tokens"][: _PREFIX_BYTES // 4], ">i4").tobytes()
    return json.dumps(row.get("messages"), sort_keys=True).encode()[:_PREFIX_BYTES]


def unfinished(dataset: Any, folder: str | os.PathLike[str]) -> Any:
    """The rows whose ``id`` has no record in ``folder`` yet; all of them where there is none.

    Raises:
      ValueError: records there have no ``id``.
    """
    done = finished_ids(folder)
    if not len(done):
        return dataset
    import ray

    kept = ray.put(done)
    one = ray.data.ActorPoolStrategy(size=1)
    # It holds no core: engines and what reads may need them all.
    return dataset.map_batches(_Without, fn_constructor_args=[kept], batch_format="pyarrow", compute=one, num_cpus=0)


class _Without:
    """Leaves out rows by the digests of their ids."""

    def __init__(self, done: Any) -> None:
        import ray

        self._done: NDArray[np.uint64] = ray.get(done) if isinstance(done, ray.ObjectRef) else done

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        return batch.filter(pyarrow.array(missing(batch.column("id").to_pylist(), self._done)))


def missing(ids: Sequence[Any], done: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Which of these ids are not among those; rows without one always are missing."""
    digests = np.array([0 if one is None else id_digest(one) for one in ids], np.uint64)
    return ~np.isin(digests, done) | np.array([one is None for one in ids], np.bool_)


def finished_ids(folder: str | os.PathLike[str]) -> NDArray[np.uint64]:
    """Digests of the ids that have a record in a folder's Parquet files, sorted."""
    found: list[NDArray[np.uint64]] = []
    for path in sorted(Path(folder).glob(f"*{SUFFIX}")):
        file = pyarrow.parquet.ParquetFile(path)
        if "id" not in file.schema_arrow.names:
            raise ValueError(f"{path}: its records have no `id`, so nobody can say which rows they are of")
        for batch in file.iter_batches(columns=["id"], use_threads=False):
            ids = (one for one in batch.column(0).to_pylist() if one is not None)
            found.append(np.fromiter(map(id_digest, ids), np.uint64))
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint64)


def write(dataset: Any, folder: str | os.PathLike[str]) -> dict[str, int]:
    """Run a dataset that ends with completions, and write each batch to a Parquet file of its own as it comes.

    A file appears whole. Its name is made of the ids in it, so a batch that is run again replaces its own file and
    never stands there twice. ``folder`` has to be one that every machine of the cluster sees.

    Returns:
      ``{"rows": ..., "failed": ...}``, of those that were written now.
    """
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    counts = {"rows": 0, "failed": 0}
    written = dataset.map_batches(_write_batch, fn_args=[str(path)], batch_format="pyarrow", batch_size=None)
    for batch in written.iter_batches(batch_format="pyarrow", batch_size=None):
        for name in counts:
            counts[name] += sum(batch.column(name).to_pylist())
    return counts


def _write_batch(batch: pyarrow.Table, folder: str) -> pyarrow.Table:
    failed = 0
    if batch.num_rows:
        path = Path(folder) / f"{batch_name(batch)}{SUFFIX}"
        staged = path.with_suffix(f".{os.getpid()}.new")
        pyarrow.parquet.write_table(batch, staged)
        os.replace(staged, path)
        failed = batch.num_rows - batch.column("error").null_count
    return pyarrow.table({"rows": [batch.num_rows], "failed": [failed]})


def batch_name(batch: pyarrow.Table) -> str:
    """Of the ids in it.

    Raises:
      ValueError: it has none.
    """
    if "id" not in batch.column_names:
        raise ValueError("rows without an `id` cannot be written: nobody could say which of them are done")
    return hashlib.sha256(json.dumps(batch.column("id").to_pylist(), default=str).encode()).hexdigest()[:32]
