"""A trace of requests that share a long prefix, cache on against cache off, in one run.

For:        prefill tokens avoided beside the arithmetic maximum, page hit rate and time to first token, staggered by a
            batch cap and admitted all at once.
Not for:    what a step costs (benchmarks/attention.py, control_plane.py).
May import: the standard library, numpy, kv_common, kv_control, kv_execution, maxtext_paged.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.prefix_cache .cache/models/smollm2-135m/config.yml \
        --json out/prefix_cache.json

Each pass starts with an empty cache; a pass before the first, not counted, obtains every program. Leaves with status 1
if the cached arm avoided nothing, the other arm avoided anything, a page leaked, or passes of one arm differ.
Completions that differ between the arms are counted: two programs may part at a tie (that they agree otherwise is
tested, teacher-forced).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

from kv_control.plan import RequestId
from kv_control.request import Request
from maxtext_paged.cli.configuration import load_configuration
from maxtext_paged.session import PagedSession, open_session

NUM_REQUESTS, PREFIX_TOKENS, NEW_TOKENS, SEED = 24, 512, 16, 0


@dataclass(frozen=True)
class Pass:
    """One pass of one arm. Times are seconds from the submission of all requests.

    Attributes:
      arm: ``staggered`` or ``at once``. cached: whether the prefix cache was on.
      prompt_tokens: of the trace. prefill_tokens: prompt tokens run. avoided_tokens: not run. maximum: that could
        have been avoided. recomputed_tokens: run again after a preemption.
      ttft_p50: to the first token, median over requests. seconds: of the whole pass.
    """

    arm: str
    cached: bool
    prompt_tokens: int
    prefill_tokens: int
    avoided_tokens: int
    maximum: int
    recomputed_tokens: int
    page_hit_rate: float
    evictions: int
    preemptions: int
    leaked_pages: int
    steps: int
    ttft_p50: float
    seconds: float
    programs: int


def trace(prefix: int, num_requests: int, vocab_size: int) -> list[np.ndarray]:
    """Prompts: ``prefix`` common tokens, then 16 to 48 of their own."""
    rng = np.random.default_rng(SEED)
    common = rng.integers(1, vocab_size, prefix)
    own = [rng.integers(1, vocab_size, rng.integers(16, 49)) for _ in range(num_requests)]
    return [np.concatenate([common, tokens]) for tokens in own]


def maximum_avoided(prompts: Sequence[np.ndarray], page: int) -> int:
    """Tokens that need not be run if every distinct page of the trace is computed once: counted over sets of pages."""
    seen: set[bytes] = set()
    total = 0
    for prompt in prompts:
        hits = 0
        for end in range(page, len(prompt) + 1, page):
            key = prompt[:end].tobytes()
            hits += key in seen
            seen.add(key)
        total += min(hits, (len(prompt) - 1) // page) * page
    return total


def run_pass(session: PagedSession, arm: str, prompts: Sequence[np.ndarray], new_tokens: int) -> tuple[Pass, list[Any]]:
    """One pass over the trace, from an empty cache."""
    session.runtime.reset_prefix_cache()
    before, driver = session.runtime.metrics(), session.driver
    requests = [
        Request(RequestId(i), prompt, max_tokens=new_tokens, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    first: dict[int, float] = {}
    start = time.perf_counter()

    def note(_: Any) -> None:
        now = time.perf_counter() - start
        for request in requests:
            if request.id not in first and request.num_generated:
                first[request.id] = now

    for request in requests:
        driver.submit(request)
    for _ in driver.run(on_step=note):
        pass
    note(None)
    seconds = time.perf_counter() - start
    after = session.runtime.metrics()
    new, old = after.control, before.control
    wanted = new.num_prefix_pages_wanted - old.num_prefix_pages_wanted
    hit = new.num_prefix_pages_hit - old.num_prefix_pages_hit
    done = Pass(
        arm=arm,
        cached=session.control.prefix_index is not None,
        prompt_tokens=sum(map(len, prompts)),
        prefill_tokens=new.num_prefill_tokens - old.num_prefill_tokens,
        avoided_tokens=new.num_cached_tokens - old.num_cached_tokens,
        maximum=maximum_avoided(prompts, session.control.layout.tokens_per_page),
        recomputed_tokens=new.num_recomputed_tokens - old.num_recomputed_tokens,
        page_hit_rate=hit / wanted if wanted else 0.0,
        evictions=new.num_evictions - old.num_evictions,
        preemptions=new.num_preemptions - old.num_preemptions,
        leaked_pages=new.num_leaked_pages,
        steps=after.num_steps - before.num_steps,
        ttft_p50=median(first.values()),
        seconds=seconds,
        programs=after.num_compile_events - before.num_compile_events,
    )
    return done, [request.tokens.tolist() for request in requests]


def main(argv: list[str] | None = None) -> int:
    """Run both arms with and without the cache, and print them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--prefix", type=int, default=PREFIX_TOKENS)
    parser.add_argument("--new", type=int, default=NEW_TOKENS)
    parser.add_argument("--staggered", type=int, default=4, help="requests that run at once in the staggered arm")
    arguments = parser.parse_args(argv)
    context = arguments.prefix + 48 + arguments.new
    done: list[Pass] = []
    failures: list[str] = []
    for arm, cap in (("staggered", arguments.staggered), ("at once", arguments.requests)):
        answers: dict[bool, list[Any]] = {}
        for cached in (False, True):
            overrides = [
                f"paged_max_num_seqs={cap}",
                f"max_target_length={context}",
                f"paged_enable_prefix_cache={str(cached).lower()}",
                *arguments.overrides,
            ]
            session = open_session(load_configuration(arguments.config, overrides))
            prompts = trace(arguments.prefix, arguments.requests, session.model.vocab_size)
            session.runtime.warm_up()
            run_pass(session, arm, prompts, arguments.new)
            for _ in range(arguments.passes):
                result, tokens = run_pass(session, arm, prompts, arguments.new)
                done.append(result)
                if answers.setdefault(cached, tokens) != tokens:
                    failures.append(f"{arm}, cache {'on' if cached else 'off'}: passes give different tokens")
            session.close()
        different = sum(one != other for one, other in zip(answers[False], answers[True], strict=True))
        print(f"{arm}: {different} of {arguments.requests} completions differ between cache on and off")
    print(
        "arm        cache  prefill  avoided  maximum   share  of max  hits   TTFT p50  seconds  steps  preempted  "
        "leaked  (passes)"
    )
    for arm in ("staggered", "at once"):
        for cached in (False, True):
            passes = [one for one in done if one.arm == arm and one.cached == cached]
            one, ttft, seconds = passes[0], [p.ttft_p50 for p in passes], [p.seconds for p in passes]
            share, of_maximum = one.avoided_tokens / one.prompt_tokens, one.avoided_tokens / max(1, one.maximum)
            print(
                f"{arm:10s} {'on' if cached else 'off':>5} {one.prefill_tokens:8d} {one.avoided_tokens:8d} "
                f"{one.maximum:8d} {share:7.1%} {of_maximum:7.1%} "
                f"{one.page_hit_rate:5.1%} {median(ttft):8.2f} s {median(seconds):7.1f} {one.steps:6d} "
                f"{one.preemptions:9d} {one.leaked_pages:7d}   ({max(seconds) / min(seconds):.2f})"
            )
            failures += [f"{arm}: {p.leaked_pages} pages leaked" for p in passes if p.leaked_pages]
            failures += [f"{arm}: {p.programs} programs were obtained in a counted pass" for p in passes if p.programs]
            if len({(p.prefill_tokens, p.avoided_tokens, p.steps) for p in passes}) > 1:
                failures.append(f"{arm}: passes count different tokens")
            if cached != bool(one.avoided_tokens):
                which = "cached" if cached else "uncached"
                failures.append(f"{arm}: the {which} arm avoided {one.avoided_tokens} tokens")
    if arguments.json:
        record = {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "seed": SEED,
            "requests": arguments.requests,
            "prefix_tokens": arguments.prefix,
            "new_tokens": arguments.new,
            "overrides": arguments.overrides,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record | {"passes": [asdict(one) for one in done]}, indent=1) + "\n")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
