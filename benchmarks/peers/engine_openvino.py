"""OpenVINO GenAI's continuous batching pipeline on the CPU.

For:        ``benchmarks.peers.compare``, in an environment that ``install.sh openvino`` made.
Not for:    anything that this project imports.
May import: openvino, openvino_genai, numpy, engine_loop.

``--model`` is a GGUF file. ``--precision f32`` computes and keeps K/V in float32 (weights stay as the file has them);
``default`` leaves both to the library.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from engine_loop import serve


class OpenVino:
    """The pipeline; tokens are timed as its step hands them out."""

    def __init__(self, options: argparse.Namespace) -> None:
        import openvino_genai as genai

        self._genai = genai
        self.version = f"openvino-genai {genai.__version__} {options.precision}"
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 2, options.slots, 512
        scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
        f32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        properties = {"INFERENCE_NUM_THREADS": options.threads, **(f32 if options.precision == "f32" else {})}
        self.pipe = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
        self._count = 0

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
        import numpy as np
        import openvino as ov

        start, handles = time.perf_counter(), []
        for prompt, limit in zip(prompts, limits, strict=True):
            config = self._genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = limit
            config.ignore_eos, config.do_sample = True, False
            self._count += 1
            handles.append(self.pipe.add_request(self._count, ov.Tensor(np.array([prompt], np.int64)), config))
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            now = time.perf_counter() - start
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[i] += output.generated_ids
                        times[i] += [now] * len(output.generated_ids)
        return times, tokens


if __name__ == "__main__":
    serve(OpenVino, __doc__, ("--precision", {"choices": ("f32", "default"), "default": "f32"}))
