"""``python -m maxtext_paged`` and the script ``maxtext-paged``.

For:        the entry point.
Not for:    anything else (cli/).
May import: maxtext_paged.cli.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from maxtext_paged.cli import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (by default the process's own) and return its exit code."""
    return int(run(argv))


if __name__ == "__main__":
    sys.exit(main())
