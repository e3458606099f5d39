"""llama.cpp through llama-cpp-python: continuous batching over one unified KV cache, as llama-server does it in C++.

For:        ``benchmarks.peers.compare``, in an environment that ``install.sh llamacpp`` made.
Not for:    anything that this project imports.
May import: llama_cpp, numpy, engine_loop.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Sequence

from engine_loop import serve

BATCH_TOKENS, SLOT_TOKENS = 512, 640


class LlamaCpp:
    """A context with ``--slots`` sequences. ``--model`` is a GGUF file."""

    def __init__(self, options: argparse.Namespace) -> None:
        import llama_cpp as lib

        self._lib = lib
        self.version = f"llama-cpp-python {lib.__version__}"
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(options.model.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = options.slots * SLOT_TOKENS, BATCH_TOKENS, BATCH_TOKENS
        params.n_seq_max, params.kv_unified = options.slots, True
        params.n_threads = params.n_threads_batch = options.threads
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp does not open {options.model}")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.memory = lib.llama_get_memory(self.context)
        self.slots = options.slots
        self.batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
        lib, start = self._lib, time.perf_counter()
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        waiting, free = list(range(len(prompts))), list(range(self.slots))
        live: dict[int, list[int]] = {}  # slot -> request, tokens in the cache
        while waiting or live:
            while waiting and free:
                live[free.pop(0)] = [waiting.pop(0), 0]
            wanted = self._fill(prompts, tokens, live)
            if status := lib.llama_decode(self.context, self.batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for slot, request, row in wanted:
                tokens[request].append(self._argmax(row))
                times[request].append(time.perf_counter() - start)
                if len(tokens[request]) == limits[request]:
                    lib.llama_memory_seq_rm(self.memory, slot, -1, -1)
                    del live[slot]
                    free.append(slot)
        return times, tokens

    def _fill(
        self, prompts: Sequence[list[int]], tokens: list[list[int]], live: dict[int, list[int]]
    ) -> list[tuple[int, int, int]]:
        """Sequences that decode first, then chunks of prompts in the room that is left."""
        batch, wanted = self.batch, []
        batch.n_tokens = 0
        for slot, (request, position) in sorted(live.items(), key=lambda item: not tokens[item[1][0]]):
            room = BATCH_TOKENS - batch.n_tokens
            made = tokens[request]
            todo = [made[-1]] if made else prompts[request][position : position + room]
            if len(todo) > room:
                break
            for offset, token in enumerate(todo):
                i = batch.n_tokens
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position + offset, 1
                batch.seq_id[i][0], batch.logits[i] = slot, 0
                batch.n_tokens += 1
            live[slot][1] += len(todo)
            if todo and live[slot][1] >= len(prompts[request]):
                batch.logits[batch.n_tokens - 1] = 1
                wanted.append((slot, request, batch.n_tokens - 1))
        return wanted

    def _argmax(self, row: int) -> int:
        import numpy as np

        pointer = ctypes.cast(self._lib.llama_get_logits_ith(self.context, row), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(pointer, (self.vocab,)).argmax())


if __name__ == "__main__":
    serve(LlamaCpp, __doc__)
