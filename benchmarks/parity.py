"""Greedy parity and step times: the same prompts through native kernels and through the jnp reference, one process.

For:        showing, token for token on a real model, that fused decoding changes nothing, and what a step costs.
Not for:    kernels alone (benchmarks/attention.py).
May import: the standard library, numpy, jax, maxtext, kv_common, kv_control, kv_execution, maxtext_paged.

    python -m benchmarks.parity MODEL/config.yml --json out/parity.json

The arms are two sessions that differ in ``paged_backend`` alone, chosen by argument: an environment variable is read
once and would give both the same. Leaves with status 1 if tokens differ, if the fused arm did not launch fused at
every decode step and layer, or if the gather arm launched any native kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from maxtext.configs import pyconfig

from kv_control.plan import RequestId
from kv_control.request import Request
from kv_execution.native.library import LaunchCounts, native_library
from maxtext_paged.config import PagedMaxTextConfig
from maxtext_paged.session import PagedSession, open_session


@dataclass(frozen=True)
class Arm:
    """What one session did.

    Attributes:
      tokens: each request's generated tokens. decodes: launches by kind, as the runtime counted them.
      launches: what the native library counted. expected_launches: steps with decode rows, times layers.
      decode_step_seconds: median and spread ((p90 - p10) / median) of steps of decodes alone. seconds: all in all.
    """

    backend: str
    tokens: list[list[int]]
    decodes: dict[str, int]
    launches: LaunchCounts
    expected_launches: int
    decode_step_seconds: float
    decode_step_spread: float
    seconds: float


class ParityError(Exception):
    """The arms differ, or one did not run what it is named after."""


def mixed_prompts(total_tokens: int, batch: int, vocab_size: int, seed: int = 0) -> list[np.ndarray]:
    """``batch`` prompts of different lengths that have ``total_tokens`` tokens together."""
    shares = np.arange(batch, 2 * batch)
    lengths = np.maximum(1, total_tokens * shares // shares.sum())
    lengths[-1] += total_tokens - lengths.sum()
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length).astype(np.int64) for length in lengths]


def run_arm(session: PagedSession, prompts: Sequence[np.ndarray], num_steps: int) -> Arm:
    """Generate ``num_steps`` greedy tokens for each prompt, all prompts at once."""
    requests = [Request(RequestId(i), prompt, max_tokens=num_steps) for i, prompt in enumerate(prompts)]
    for request in requests:
        session.driver.submit(request)
    before, decoded = native_library().counts(), dict(session.decode.counts)
    times, started = [], time.perf_counter()
    while session.driver.scheduler.has_work:
        decodes_alone = all(request.num_generated for request in requests)
        start = time.perf_counter()
        session.driver.step()
        if decodes_alone:
            times.append(time.perf_counter() - start)
    failed = [request.error for request in requests if request.error]
    if failed:
        raise ParityError(f"{session.backend.name}: {failed[0]}")
    decodes = {kind: count - decoded.get(kind, 0) for kind, count in session.decode.counts.items()}
    model, low_high = session.model, np.percentile(times, [10, 90])
    steps = sum(decodes.values()) // len(session.decode.windows)
    return Arm(
        backend=session.backend.name,
        tokens=[request.tokens[len(prompt) :].tolist() for request, prompt in zip(requests, prompts, strict=True)],
        decodes=decodes,
        launches=native_library().counts().since(before),
        expected_launches=steps * model.num_layers * model.layout.num_devices,
        decode_step_seconds=median(times),
        decode_step_spread=float((low_high[1] - low_high[0]) / median(times)),
        seconds=time.perf_counter() - started,
    )


def check_parity(fused: Arm, gather: Arm) -> None:
    """Raises:
    ParityError: the arms differ in a token, or one of them did not run what it is named after.
    """
    if (gather.launches.fused, gather.launches.whole, gather.launches.tiles) != (0, 0, 0):
        raise ParityError(f"the gather arm ran native kernels: {gather.launches}")
    if set(fused.decodes) != {"fused"} or (fused.launches.fused, fused.launches.whole) != (fused.expected_launches, 0):
        raise ParityError(
            f"the fused arm launched {fused.launches} for {fused.decodes} decodes, {fused.expected_launches} expected"
        )
    for i, (one, other) in enumerate(zip(fused.tokens, gather.tokens, strict=True)):
        if one != other:
            first = next(j for j, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            raise ParityError(f"request {i} differs from generated token {first}: {one[first]} and {other[first]}")


def compare(
    make_config: Callable[[Mapping[str, Any]], Any],
    prompts: Sequence[np.ndarray],
    num_steps: int,
    *,
    params: Any = None,
) -> tuple[Arm, Arm]:
    """Run both arms over the same prompts and check them.

    Args:
      make_config: a MaxText configuration with the given ``paged_*`` options on top.
      params: weights for both; by default the configuration's checkpoint.

    Returns:
      ``(fused, gather)``.

    Raises:
      ParityError: as ``check_parity``.
    """
    arms = []
    for options in ({"paged_backend": "native", "paged_attention_native": "1"}, {"paged_backend": "reference"}):
        session = open_session(make_config(options), params=params)
        arms.append(run_arm(session, prompts, num_steps))
        session.close()
    check_parity(*arms)
    return arms[0], arms[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the arms on a model; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a model's MaxText configuration")
    parser.add_argument("--tokens", type=int, default=8192, help="prompt tokens of all requests together")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    longest = max(map(len, mixed_prompts(options.tokens, options.batch, 100)))
    shape = {"max_target_length": longest + options.steps, "paged_max_num_seqs": options.batch}

    def make_config(extra: Mapping[str, Any]) -> Any:
        words = [f"{key}={value}" for key, value in {**shape, **extra}.items()]
        fixed = ["run_name=parity", "hardware=cpu", "log_config=false", "base_output_directory=unused"]
        return pyconfig.initialize(["parity", options.config, *fixed, *words], config_class=PagedMaxTextConfig)

    vocab_size = int(make_config({}).vocab_size)
    try:
        fused, gather = compare(make_config, mixed_prompts(options.tokens, options.batch, vocab_size), options.steps)
    except ParityError as error:
        print(f"benchmarks.parity: {error}", file=sys.stderr)
        return 1
    for name, arm in (("fused", fused), ("gather", gather)):
        print(
            f"{name:7} {arm.backend:10} decode step {arm.decode_step_seconds * 1e3:.1f} ms (spread "
            f"{arm.decode_step_spread:.2f}), {arm.seconds:.1f} s in all, {arm.decodes}, {arm.launches}"
        )
    print(f"{options.batch} x {options.steps} greedy tokens are the same")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"jax": jax.__version__, "instruction_set": native_library().best, "arguments": vars(options)}
        record |= {"fused": asdict(fused), "gather": asdict(gather)}
        options.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
