"""vLLM on CPU: its offline ``LLM`` with an output length for each request.

For:        ``benchmarks.peers.compare``, in an environment that ``install.sh vllm`` made.
Not for:    anything that this project imports.
May import: vllm, engine_loop.

Tokens are timed as the engine hands them out, through its own add-and-step loop.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from engine_loop import serve


class Vllm:
    """The engine, compiled, with as many sequences at once as the caller says."""

    def __init__(self, options: argparse.Namespace) -> None:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
        import vllm

        self.version = f"vllm-cpu {vllm.__version__} {options.dtype}"
        self._params = vllm.SamplingParams
        self._count = 0
        self.llm = vllm.LLM(
            options.model,
            dtype=options.dtype,
            max_model_len=1024,
            enable_prefix_caching=False,
            max_num_seqs=options.slots,
            max_num_batched_tokens=options.max_batch_tokens,
        )

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
        engine = self.llm.llm_engine
        start, ids = time.perf_counter(), {}
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            self._count += 1
            ids[str(self._count)] = i
            params = self._params(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False)
            engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        while engine.has_unfinished_requests():
            for output in engine.step():
                now, i = time.perf_counter() - start, ids[output.request_id]
                tokens[i] = list(output.outputs[0].token_ids)
                times[i] += [now] * (len(tokens[i]) - len(times[i]))
        return times, tokens


if __name__ == "__main__":
    serve(
        Vllm,
        __doc__,
        ("--dtype", {"default": "float32"}),
        ("--max-batch-tokens", {"type": int, "default": 4608, "help": "16 prompts of 256 prefill in one step"}),
    )
