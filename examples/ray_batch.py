"""Completes a folder of Parquet prompts with Ray Data, on as many engines as there is room for; run it again to resume.

Usage: ray_batch.py MODEL/config.yml PROMPTS ANSWERS [ENGINES]

PROMPTS is a folder of Parquet or a file of JSON lines, whose rows have an `id`, and a `prompt`, `messages` or `tokens`;
it needs `pip install "maxtext-paged[ray]"`.
"""

from __future__ import annotations

import sys

import ray

from maxtext_paged.ray import Generate, grouped, unfinished, write

BATCH = 256
"""Rows that an engine runs at once, and that one file of answers has."""


def main(config: str, prompts: str, answers: str, engines: str = "1") -> int:
    """Write the answers that are missing; 1 if any row failed."""
    ray.init()
    # What reads, sorts and writes needs a core that no engine holds, or the job waits for ever.
    cores = ray.cluster_resources()["CPU"]
    share = min(1.0, max(cores - 1, 0) / int(engines))
    read = ray.data.read_json if prompts.endswith((".json", ".jsonl")) else ray.data.read_parquet
    rows = grouped(unfinished(read(prompts), answers), BATCH)
    rows = rows.map_batches(
        Generate,
        fn_constructor_args=[config],
        fn_constructor_kwargs={"params": {"max_tokens": 32}},
        batch_format="pyarrow",
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=int(engines)),
        num_cpus=share,
    )
    counts = write(rows, answers)
    print(f"{counts['rows']} rows, {counts['failed']} failed")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
