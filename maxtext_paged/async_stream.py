"""A stream for ``async for``.

For:        event loops that must go on while steps run.
Not for:    running several steps at once: there is one engine.
May import: the standard library, maxtext_paged.generation and generation_stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from maxtext_paged.generation import Generation
from maxtext_paged.generation_stream import GenerationStream


async def drawn_in_threads(results: GenerationStream) -> AsyncGenerator[Generation, None]:
    """The results, each drawn in a thread of asyncio's pool. Closed early, or cancelled, it closes the stream."""
    drawing: asyncio.Future[Generation | None] | None = None
    try:
        while True:
            drawing = asyncio.ensure_future(asyncio.to_thread(next, results, None))
            # A thread cannot be cancelled: the task may be, and the thread ends at the stream's next look.
            result = await asyncio.shield(drawing)
            if result is None:
                return
            yield result
    finally:
        closing = asyncio.ensure_future(asyncio.to_thread(results.close))
        await asyncio.shield(closing)
        if drawing is not None and not drawing.done():
            await asyncio.wait([drawing])
