"""Hugging Face transformers on torch CPU: ``generate`` in batches of similar prompt length.

For:        ``benchmarks.peers.compare``, in an environment that ``install.sh hf`` made.
Not for:    anything that this project imports.
May import: torch, transformers, engine_loop.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from engine_loop import serve

PAD = 2


class HuggingFace:
    """The model; a batch runs to its longest output, and what a request did not ask for is cut off."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import transformers

        self.version = f"transformers {transformers.__version__} torch {torch.__version__}"
        torch.set_num_threads(options.threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = self.model.config.eos_token_id = None
        self.batch = options.slots

    def run(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
        import torch

        start, order = time.perf_counter(), sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        times: list[list[float]] = [[] for _ in prompts]
        tokens: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(order), self.batch):
            group = order[first : first + self.batch]
            width, most = max(len(prompts[i]) for i in group), max(limits[i] for i in group)
            ids = torch.full((len(group), width), PAD)
            mask = torch.zeros((len(group), width), dtype=torch.long)
            for row, i in enumerate(group):
                ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, width - len(prompts[i]) :] = 1
            clock: list[float] = []

            def tick(input_ids: Any, scores: Any, clock: list[float] = clock, **_: Any) -> Any:
                clock.append(time.perf_counter() - start)
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

            with torch.inference_mode():
                made = self.model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    max_new_tokens=most,
                    pad_token_id=PAD,
                    use_cache=True,
                    stopping_criteria=[tick],
                )
            for row, i in enumerate(group):
                tokens[i] = made[row, width : width + limits[i]].tolist()
                times[i] = clock[: limits[i]]
        return times, tokens


if __name__ == "__main__":
    serve(HuggingFace, __doc__)
