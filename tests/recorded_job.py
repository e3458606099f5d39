"""A recorder that was told of a whole job, and texts that users put where pages and labels show them.

For:        tests of what is made of a recorder.
Not for:    tests of the recorder itself.
May import: numpy, maxtext_paged without MaxText.
"""

from __future__ import annotations

import numpy as np

from maxtext_paged.formats import InputRow, RowError
from maxtext_paged.report.counts import JobCounts
from maxtext_paged.report.recorder import Recorder, StepView
from maxtext_paged.rows import Usage

HOSTILE = [
    "</script><img src=x onerror=\"document.title='pwned'\">",
    '"><svg onload="document.title=\'pwned\'">',
    "{{ 7 * 7 }}{% raw %}",
    "<!-- -->&lt;b&gt;&amp;",
    "a\x00b\x1b[31m",
    "\u202egnp.exe",
    "half \ud800 pair",
    "</td></tr></table><h1>x",
    "javascript:alert(1)",
]


def busy_recorder() -> Recorder:
    """A job with something of everything, 400 steps long; its clock is its own."""
    now = [50.0]
    counts = JobCounts(total=150, earlier=20, earlier_failed=1, num_pages=96, peak_pages=90, steps=400, preemptions=3)
    recorder = Recorder(counts, clock=lambda: now[0], wall=lambda: 1.7e9)
    recorder.start()
    random = np.random.default_rng(2)
    for step in range(400):
        if step < 101:
            recorder.submitted(step, [step])
        recorder.step_begins()
        now[0] += float(random.lognormal(-3, 0.4))
        recorder.step_ended(
            StepView(
                request_ids=np.arange(max(step - 8, 0), min(step, 101)),
                num_generated=np.full(max(min(step, 101) - max(step - 8, 0), 0), 2) + step % 3,
                waiting=max(20 - step // 20, 0),
                pages_held=min(step, 90),
                pages_needed=min(step // 2, 60),
                sampled_tokens=5 * step,
                prompt_tokens=min(step, 101) * 40,
                steps=step + 1,
                preemptions=step // 150,
            )
        )
        if 8 <= step < 109:
            index = step - 8
            recorder.ended(index, 6, ran=True)
            failed = RowError("the model's logits are <not> finite", "generation_failed") if index % 10 == 3 else None
            row_id = HOSTILE[index % len(HOSTILE)] if index % 2 else f"row {index}"
            recorder.row_written(InputRow(index, index + 1, row_id), Usage(40, 6, 1, 8), failed, finish_reason="stop")
    counts.seconds = recorder.seconds
    counts.sampled_tokens, counts.hit_rate, counts.shares = 2000, 0.25, True
    counts.backends = {"native": 400}
    counts.decodes = {"fused": 300, "gather": 90}
    counts.decode_causes = {("fused", "fused"): 300, ("gather", "below paged_split_kv_min_tokens"): 90}
    counts.programs = {"paged_step": 3}
    return recorder
