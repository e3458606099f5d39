"""How many requests a fixed pool holds at each context length, and what a larger batch costs a step.

For:        measured concurrency against pool over length, pages against live tokens, peak memory; step time and
            throughput over the batch.
Not for:    a mixed trace (benchmarks/serving.py), long contexts' kernels (benchmarks/decode_matrix.py).
May import: the standard library, maxtext_paged, benchmarks.

    DECOUPLE_GCLOUD=TRUE JAX_PLATFORMS=cpu python -m benchmarks.capacity .cache/models/smollm2-135m/config.yml \\
        --json out/capacity.json

One session serves every length: one more request than fits is submitted at once, and the most that decode in one step
are counted. Leaves with status 1 if fewer ran at once than pages say, pages were held beyond those that live tokens
need, peak memory grew from the shortest context to the longest by more than --growth, a page stayed held, or a program
was obtained after warm-up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.records import Failures, Figure, WrongPath
from benchmarks.traces import decode_rate

CONTEXTS, BATCHES = (256, 512, 1024, 2048, 4096, 8192), (2, 4, 8, 16)
POOL_TOKENS, NEW_TOKENS, BATCH_CONTEXT = 16384, 64, 256


@dataclass(frozen=True, slots=True)
class AtLength:
    """One context length.

    Attributes:
      fits: requests of this length that the pool's pages hold. decoding, running: most that did at once.
      occupancy: most of the pool that was held. extra_pages: most pages held beyond those the live tokens need.
      preemptions: what one request more than fits led to. peak_rss_mib: of the process, so far.
    """

    context: int
    submitted: int
    fits: int
    decoding: int
    running: int
    occupancy: float
    extra_pages: int
    preemptions: int
    peak_rss_mib: float


@dataclass(frozen=True, slots=True)
class AtBatch:
    """One batch size: seconds a decode step, and tokens a second."""

    batch: int
    step_seconds: Figure
    tokens_per_second: Figure


def prompt(length: int, salt: int, vocab_size: int) -> list[int]:
    """Ids that differ from request to request."""
    return [3 + (salt * 7919 + i * 31) % (vocab_size - 3) for i in range(length)]


def at_length(session: Any, context: int, new: int) -> AtLength:
    """Submit one request more than fits, and watch."""
    from benchmarks.paged_arm import run_requests

    layout, vocab = session.model.layout, session.model.vocab_size
    fits = min(layout.num_pages // layout.pages_for(context), session.max_num_seqs)
    count = min(fits + 1, session.max_num_seqs)
    size, seen = layout.tokens_per_page, {"decoding": 0, "running": 0, "held": 0, "extra": 0}

    def look(session: Any, requests: Sequence[Any]) -> None:
        live = [request for request in requests if request.handle is not None]
        held = layout.num_pages - session.control.num_free_pages
        needed = sum(-(-(request.num_tokens + 1) // size) for request in live)  # one may be under way, not read yet
        for name, value in (
            ("decoding", sum(request.num_generated > 0 for request in live)),
            ("running", len(live)),
            ("held", held),
            ("extra", held - needed),
        ):
            seen[name] = max(seen[name], value)

    # the last generated token is never written: a request of `context` written tokens has one more
    prompts = [prompt(context - new + 1, i, vocab) for i in range(count)]
    _, _, counts = run_requests(session, prompts, [new] * count, on_step=look)
    counts.check()
    return AtLength(
        context=context,
        submitted=count,
        fits=fits,
        decoding=seen["decoding"],
        running=seen["running"],
        occupancy=seen["held"] / layout.num_pages,
        extra_pages=seen["extra"],
        preemptions=counts.preemptions,
        peak_rss_mib=records.peak_memory_mib(),
    )


def at_batch(session: Any, batch: int, context: int, new: int, passes: int, agreement: float) -> AtBatch:
    """Decode ``batch`` requests of one context together."""
    from benchmarks.paged_arm import run_requests

    prompts = [prompt(context, i, session.model.vocab_size) for i in range(batch)]
    rates, foreign = [], []
    for number in range(passes + 1):
        with records.one_pass(quiet=number > 0) as watch:
            times, _, counts = run_requests(session, prompts, [new] * batch)
        if number:  # the first does not count
            counts.check()
            if counts.preemptions:
                raise WrongPath(f"batch {batch}: {counts.preemptions} preemptions: the pool is too small for it")
            rates.append(decode_rate(times))
            foreign.append(watch.foreign)
    return AtBatch(
        batch,
        records.figure([batch / rate for rate in rates], agreement=agreement, foreign=foreign),
        records.figure(rates, agreement=agreement, foreign=foreign),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="MaxText configuration, such as `maxtext-paged convert` writes")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--pool-tokens", type=int, default=POOL_TOKENS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--new", type=int, default=NEW_TOKENS, help="tokens generated by each request")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--batch-context", type=int, default=BATCH_CONTEXT)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--growth", type=float, default=1.10, help="most that peak memory may grow over the contexts")
    parser.add_argument("--agreement", type=float, default=records.AGREEMENT)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args(arguments)
    from maxtext_paged.cli.configuration import load_configuration
    from maxtext_paged.session import open_session

    failures = Failures("benchmarks.capacity")
    most = max(options.pool_tokens // min(options.contexts) + 1, *options.batches, 1)
    shape = [f"max_target_length={max(*options.contexts, options.batch_context + options.new) + 1}"]
    shape += [f"paged_max_num_seqs={most}", "paged_tokens_per_page=16", f"paged_num_pages={options.pool_tokens // 16}"]
    session = open_session(load_configuration(options.config, [*shape, *options.overrides]))
    session.runtime.warm_up()
    lengths, batches = [], []
    try:
        print("context  submitted  fits  decoding  occupancy  extra pages  preempted  peak MiB")
        for context in options.contexts:
            one = at_length(session, context, min(options.new, context // 2))
            lengths.append(one)
            print(
                f"{one.context:7}{one.submitted:11}{one.fits:6}{one.decoding:10}{one.occupancy:11.1%}"
                f"{one.extra_pages:13}{one.preemptions:11}{one.peak_rss_mib:10.0f}",
                flush=True,
            )
            if one.decoding < one.fits:
                failures.add(f"context {context}: {one.decoding} decoded at once, {one.fits} fit")
            if one.extra_pages > 0:
                failures.add(f"context {context}: {one.extra_pages} pages held beyond those that live tokens need")
        grown = lengths[-1].peak_rss_mib / lengths[0].peak_rss_mib
        if grown > options.growth:
            failures.add(
                f"peak memory grew {grown:.2f} times from context {lengths[0].context} to {lengths[-1].context}"
            )
        for batch in options.batches:
            step = at_batch(session, batch, options.batch_context, options.new, options.passes, options.agreement)
            batches.append(step)
            print(
                f"batch {batch:3}: {step.step_seconds.median * 1e3:8.2f} ms a step, "
                f"{step.tokens_per_second.median:8.1f} tokens/s  ({step.step_seconds.why})",
                flush=True,
            )
        if session.backend.name == "reference" and session.options.paged_backend != "reference":
            failures.add(f"attention ran on the jnp reference: {session.backend.reason}")
    except WrongPath as error:
        failures.add(str(error))
    records.write(
        options.json,
        {
            "pool": f"{session.model.layout.num_pages} pages ({session.pool.reason})",
            "backend": session.backend.name,
            "decodes": session.runtime.metrics().decodes_by_kind,
            "overrides": options.overrides,
            "lengths": lengths,
            "batches": batches,
            "environment": records.environment(),
        },
    )
    session.close()
    return failures.status()


if __name__ == "__main__":
    sys.exit(main())
