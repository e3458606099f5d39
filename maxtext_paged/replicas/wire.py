"""What goes between a job and its replicas: messages on a socket, and rows and results as plain values.

For:        framing, and each value written and read in one place.
Not for:    what the messages mean (group.py, child.py).
May import: the standard library, numpy, msgspec, kv_control, maxtext_paged.rows.

A message is a MessagePack map behind its length. Nothing is pickled: what is read can only be data.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from kv_control.logit_options import Alternatives, LogitOptions
from kv_control.plan import SamplingSpec
from maxtext_paged.rows import Row, RowResult, Usage

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16
Message = dict[str, Any]


class Channel:
    """One end of a stream socket. Writing blocks; reading hands out what has arrived."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._unread = bytearray()

    def send(self, what: str, **values: Any) -> None:
        """Write one message.

        Raises:
          OSError: the other end is gone.
        """
        body = msgspec.msgpack.encode({"what": what, **values})
        self.socket.sendall(_LENGTH.pack(len(body)) + body)

    def arrived(self) -> tuple[list[Message], bool]:
        """The whole messages that one read brings (it waits for some bytes), and whether the other end is gone."""
        try:
            piece = self.socket.recv(_PIECE)
        except OSError:
            piece = b""
        self._unread += piece
        return list(self._whole()), not piece

    def messages(self) -> Iterator[Message]:
        """All messages until the other end is gone."""
        gone = False
        while not gone:
            found, gone = self.arrived()
            yield from found

    def close(self) -> None:
        """The other end reads that this one is gone."""
        self.socket.close()

    def _whole(self) -> Iterator[Message]:
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            end = _LENGTH.size + length
            if len(self._unread) < end:
                return
            body = bytes(self._unread[_LENGTH.size : end])
            del self._unread[:end]
            yield msgspec.msgpack.decode(body)


# --- rows and results --------------------------------------------------------------------------------------


def packed_row(row: Row) -> Message:
    """A row as plain values; its id stays with the job."""
    return {
        "index": row.index,
        "tokens": np.asarray(row.tokens, np.int32).tobytes(),
        "max_tokens": row.max_tokens,
        "sampling": asdict(row.sampling),
        "stop_token_ids": sorted(row.stop_token_ids),
        "ignore_eos": row.ignore_eos,
        "min_tokens": row.min_tokens,
        "want_prompt_logprobs": row.want_prompt_logprobs,
        "n": row.n,
        "options": {**asdict(row.options), "logit_bias": list(row.options.logit_bias.items())},
        "stop": list(row.stop),
        "include_stop": row.include_stop,
    }


def row_of(packed: Mapping[str, Any]) -> Row:
    """The row again; its index stands for its id."""
    return Row(
        index=packed["index"],
        id=packed["index"],
        tokens=np.frombuffer(packed["tokens"], np.int32),
        max_tokens=packed["max_tokens"],
        sampling=SamplingSpec(**packed["sampling"]),
        stop_token_ids=frozenset(packed["stop_token_ids"]),
        ignore_eos=packed["ignore_eos"],
        min_tokens=packed["min_tokens"],
        want_prompt_logprobs=packed["want_prompt_logprobs"],
        n=packed["n"],
        options=LogitOptions(**{**packed["options"], "logit_bias": dict(packed["options"]["logit_bias"])}),
        stop=tuple(packed["stop"]),
        include_stop=packed["include_stop"],
    )


def packed_result(result: RowResult) -> Message:
    """What became of a row, as plain values; the row itself the job has."""
    return {
        "index": result.row.index,
        "completion": np.asarray(result.completion_ids, np.int32).tobytes(),
        "logprobs": np.asarray(result.logprobs, np.float32).tobytes(),
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "error": result.error,
        "text": result.text,
        "alternatives": [
            (best.ids.astype(np.int32).tobytes(), best.logprobs.astype(np.float32).tobytes())
            for best in result.alternatives
        ],
        "samples": [packed_result(sample) for sample in result.samples],
    }


def result_of(packed: Mapping[str, Any], row: Row) -> RowResult:
    """The result again, of the job's own row."""
    completion = np.frombuffer(packed["completion"], np.int32)
    return RowResult(
        row=row,
        token_ids=np.concatenate([np.asarray(row.tokens, np.int32), completion]),
        logprobs=np.frombuffer(packed["logprobs"], np.float32),
        finish_reason=packed["finish_reason"],
        usage=Usage(**packed["usage"]),
        error=packed["error"],
        samples=tuple(result_of(sample, row) for sample in packed["samples"]),
        text=packed["text"],
        alternatives=tuple(
            Alternatives(np.frombuffer(ids, np.int32), np.frombuffer(logprobs, np.float32))
            for ids, logprobs in packed["alternatives"]
        ),
    )
