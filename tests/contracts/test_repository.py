"""What is committed reads the same on every machine, and the documents name commands that exist."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE_BYTES = 2_000_000
MACHINE_PATH = re.compile(r"(?<![\w.~})\]*-])/(?:root|work|home|Users)/[\w.]")
# Spelled in pieces, so that this file does not name them either.
PACKAGE_HOSTS = re.compile("|".join(("pypi" + r"\.org", "python" + "hosted", "npmjs" + r"\.", "debian" + r"\.org")))
PACKAGES = ("kv_common", "kv_control", "kv_execution", "maxtext_paged")


def repository_files() -> list[Path]:
    """Files git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout: there is no list of its files")
    names = listing.stdout.decode().split("\0")
    return [path for name in names if name and (path := ROOT / name).is_file()]


def texts() -> dict[str, str]:
    """Each repository file that is text, by its path in the repository."""
    found = {}
    for path in repository_files():
        data = path.read_bytes()
        if b"\0" not in data:
            found[str(path.relative_to(ROOT))] = data.decode("utf-8")
    return found


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts().items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_no_file_is_larger_than_two_megabytes():
    assert {str(path): size for path in repository_files() if (size := path.stat().st_size) > MAX_FILE_BYTES} == {}


def test_no_file_names_a_path_of_one_machine():
    assert lines_matching(MACHINE_PATH) == []


def test_no_file_names_a_package_host():
    assert lines_matching(PACKAGE_HOSTS) == []


@pytest.mark.parametrize("path", ["/root" + "/.pyenv", "cd /work" + "/main", "file:///home" + "/me/x"])
def test_a_path_of_one_machine_would_be_seen(path: str):
    assert MACHINE_PATH.search(path)


def test_the_readme_opens_with_the_two_commands_and_the_makefile_has_them():
    readme = (ROOT / "README.md").read_text()
    first_block = readme.split("```sh\n")[1].split("```")[0]
    assert re.findall(r"^make ([a-z-]+)", first_block, re.MULTILINE) == ["demo", "test"]
    assert {"demo", "test"} <= make_targets()


def test_every_make_target_named_in_a_document_exists():
    named = {
        (name, target)
        for name, text in texts().items()
        if name.endswith((".md", ".yaml", ".yml")) or name in (".ci/run", "Makefile")
        for target in re.findall(r"(?:`|^|\t)make ([a-z][a-z-]*)", text, re.MULTILINE)
    }
    assert ("README.md", "test") in named
    assert {(name, target) for name, target in named if target not in make_targets()} == set()


def test_ci_runs_the_test_command_of_the_readme():
    assert re.search(r"^make test\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_is_for_and_what_it_may_import(package: str):
    silent = []
    for path in sorted((ROOT / package).rglob("*.py")):
        source = path.read_text()
        docstring = ast.get_docstring(ast.parse(source)) or ""
        if source.strip() and not all(word in docstring for word in ("For: ", "Not for: ", "May import: ")):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []
