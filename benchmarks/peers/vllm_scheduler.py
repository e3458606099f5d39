"""vLLM's v1 scheduler on the decode steps of ``benchmarks.control_plane``: schedule, then account for one token each.

For:        a peer's host time per step, in an environment of its own (vLLM installed; torch never enters ours).
Not for:    anything that this project imports.

    VENV/bin/python benchmarks/peers/vllm_scheduler.py MODEL_DIR    # a directory with a Hugging Face config.json

Its step leaves out what ours has in it besides: the packed page table (vLLM's workers build theirs).
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from statistics import median
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="2", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

PAGE = 16


def accepted(call: Any, **values: Any) -> dict[str, Any]:
    """The arguments that this version of vLLM knows."""
    known = inspect.signature(call).parameters
    return {name: value for name, value in values.items() if name in known}


def decode_step_us(model: str, running: int, context: int, num_steps: int = 60) -> float:
    """Median microseconds of schedule + update_from_output with every request decoding."""
    arguments = EngineArgs(
        model=model,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, running),
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    config = arguments.create_engine_config()
    num_blocks = running * ((context + 4 * num_steps) // PAGE + 2) + 10
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=3, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    scheduler = Scheduler(
        **accepted(
            Scheduler.__init__,
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=False,
            block_size=PAGE,
            hash_block_size=PAGE,
        )
    )
    for i in range(running):
        sampling = SamplingParams(max_tokens=10_000, ignore_eos=True)
        request = accepted(
            Request.__init__,
            request_id=str(i),
            prompt_token_ids=list(range(1, context + 1)),
            sampling_params=sampling,
            pooling_params=None,
            eos_token_id=0,
        )
        scheduler.add_request(Request(**request))
    times: list[float] = []
    while len(times) < num_steps:
        start = time.perf_counter()
        decision = scheduler.schedule()
        scheduled = time.perf_counter()
        ids = list(decision.num_scheduled_tokens)
        done = [scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_prompt_tokens for i in ids]
        output = accepted(
            ModelRunnerOutput,
            req_ids=ids,
            req_id_to_index={name: place for place, name in enumerate(ids)},
            sampled_token_ids=[[5] if sampled else [] for sampled in done],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        built = time.perf_counter()
        scheduler.update_from_output(decision, ModelRunnerOutput(**output))
        if len(ids) == running and set(decision.num_scheduled_tokens.values()) == {1}:
            times.append((scheduled - start) + (time.perf_counter() - built))
    return median(times) * 1e6


if __name__ == "__main__":
    for running, context in ((1, 128), (64, 128), (256, 128), (256, 1024), (1024, 128)):
        print(
            f"vllm {running:5d} running, {context:5d} tokens: {decode_step_us(sys.argv[1], running, context):8.0f} us"
        )
