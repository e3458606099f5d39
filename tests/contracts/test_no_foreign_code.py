"""Nothing that is loaded brings code along: no pickle, no eval, no trusted remote code.

Here the source is searched; tests/maxtext/test_cli_job.py watches a whole run for what libraries do on our behalf.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kv_common", "kv_control", "kv_execution", "maxtext_paged")
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "torch",
    "runpy",
    "code",
}
CALLS = {"eval", "exec", "compile", "__import__", "from_pretrained", "unsafe_load", "full_load", "load_module"}
KEYWORDS = {"trust_remote_code"}


def found(tree: ast.AST) -> Iterator[str]:
    """What in a module could run what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {name.name}" for name in node.names if name.name.partition(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield f"from {node.module} import"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in KEYWORDS:
            yield node.value
        elif isinstance(node, ast.Call):
            yield from of_call(node)


def of_call(node: ast.Call) -> Iterator[str]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if (name in CALLS and not (name == "compile" and owner)) or (name == "import_module" and not named(node)):
        yield f"{owner}.{name}()"
    if KEYWORDS & set(given):
        yield "trust_remote_code="
    if name in ("load", "memmap", "fromfile") and owner in ("np", "numpy", "jnp", "jax.numpy"):
        allow = given.get("allow_pickle")
        if name == "load" and not (isinstance(allow, ast.Constant) and allow.value is False):
            yield f"{owner}.load() without allow_pickle=False"
    if name in ("load", "load_all") and owner == "yaml":
        yield "yaml.load(): yaml.safe_load"
    shell = given.get("shell")
    if (name in ("system", "popen") and owner != "platform") or (
        shell is not None and not (isinstance(shell, ast.Constant) and not shell.value)
    ):
        yield f"{owner}.{name}() through a shell"


def named(node: ast.Call) -> bool:
    """Whether an import is of a name that this package chose: a literal, or its own table of names."""
    wanted = ast.unparse(node.args[0])
    return isinstance(node.args[0], ast.Constant) or wanted in OWN_NAMES


OWN_NAMES = {"_HOME[name]", "f'maxtext_paged.cli.{arguments.command}'"}
"""Keys of tables and subcommands that argparse has checked."""


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_of_ours_can_run_what_it_reads(package: str) -> None:
    guilty = {
        f"{path.relative_to(ROOT)}: {what}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for what in found(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert not guilty


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from torch import load",
        "eval(x)",
        "exec(open(p).read())",
        "np.load(p)",
        "np.load(p, allow_pickle=True)",
        "yaml.load(f)",
        "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
        "importlib.import_module(row['x'])",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
    ],
)
def test_the_search_finds_what_it_is_for(source: str) -> None:
    assert list(found(ast.parse(source)))


@pytest.mark.parametrize("source", ["np.load(p, allow_pickle=False)", "re.compile(x)", "yaml.safe_load(f)", "load(x)"])
def test_the_search_lets_what_is_harmless_pass(source: str) -> None:
    assert not list(found(ast.parse(source)))
