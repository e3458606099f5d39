"""Prints the requirements from which `scripts/lowest` resolves: ranges with a lower end as they are, others as locked.

.venv/bin/python scripts/lowest_requirements.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"[A-Za-z0-9._-]+")
LEFT_OUT = ("ray",)
"""What development does without."""
TOOLS = ("docs",)
"""Groups that are not the package's: their versions are the lock's."""


def locked() -> dict[str, str]:
    """Each package of requirements/cpu.txt and its version."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.M)
    return {canonical(name): version for name, version in found}


def canonical(name: str) -> str:
    """A package's name as packaging compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> list[str]:
    """Every requirement of pyproject.toml that development installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    groups = project["dependency-groups"]
    return [
        *project["project"]["dependencies"],
        *(each for name, extra in extras.items() if name not in LEFT_OUT for each in extra),
        *(each for name, group in groups.items() if name not in TOOLS for each in group),
    ]


def main() -> None:
    versions = locked()
    for requirement in sorted(set(declared())):
        match = NAME.match(requirement)
        assert match, requirement
        has_lower_end = ">=" in requirement or "==" in requirement
        print(requirement if has_lower_end else f"{match[0]}=={versions[canonical(match[0])]}")


if __name__ == "__main__":
    main()
