"""Completes some prompts from Python: a list at once, then a stream.

Usage: library.py MODEL/config.yml, such as `maxtext-paged convert` (or `make demo`) makes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from maxtext_paged import OfflineEngine, SamplingParams


def chats() -> Iterator[dict[str, object]]:
    """As many as anyone likes: they are drawn as there is room."""
    for city in ("Paris", "Oslo", "Lima"):
        yield {"id": city, "messages": [{"role": "user", "content": f"In which country is {city}?"}]}


def main(config: str) -> int:
    """Print completions; 1 if any prompt failed."""
    failed = 0
    with OfflineEngine(config) as engine:
        for result in engine.generate(["Once upon a time", "The sea is"], SamplingParams(max_tokens=16)):
            print(result.index, repr(result.text), f"{result.logprobs.mean():.2f} a token")
            failed += not result.ok
        with engine.stream(chats(), SamplingParams(max_tokens=16, temperature=0.8, seed=1)) as results:
            for result in results:
                print(result.id, repr(result.text) if result.error is None else result.error.message)
                failed += not result.ok
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
