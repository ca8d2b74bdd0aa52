"""The house rules that no linter has: sizes, one door to private torch, imports at the top."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrograd.probe import required_names

LONGEST_FILE = 450
LONGEST_FUNCTION = 70
NAMELESS = {"utils", "helpers", "common", "misc"}
OURS = ("retrograd", "gradparity")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def private_torch(tree: ast.AST) -> list[str]:
    """Every private part of torch that the code names, by import or by attribute."""
    names = [name for node in ast.walk(tree) for name in [*imported_modules(node), dotted(node)]]
    return sorted(
        {name for name in names if name.startswith("torch.") and "._" in name and ".__" not in name}
    )


def own_imports_inside(function: ast.AST) -> list[str]:
    found = [name for node in ast.walk(function) for name in imported_modules(node)]
    return sorted({name for name in found if name.split(".")[0] in OURS})


def test_files_are_short(sources: list[Path], root: Path) -> None:
    lengths = {str(path.relative_to(root)): len(path.read_text().splitlines()) for path in sources}
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_functions_are_short(sources: list[Path], root: Path) -> None:
    long = {
        f"{path.relative_to(root)}:{function.lineno} {function.name}": length
        for path in sources
        for function in functions(ast.parse(path.read_text()))
        if (length := (function.end_lineno or 0) - function.lineno + 1) > LONGEST_FUNCTION
    }
    assert long == {}


def test_no_file_has_a_name_that_says_nothing(sources: list[Path], root: Path) -> None:
    assert [str(path.relative_to(root)) for path in sources if path.stem in NAMELESS] == []


def private(root: Path) -> list[Path]:
    """The files that may name private torch, as ruff's settings list them."""
    home = root / "packages/retrograd/src/retrograd"
    folders = ("engine", "trace", "dynamo", "runtime", "facts", "backends/inductor")
    behind = [path for folder in folders for path in (home / folder).rglob("*.py")]
    return [
        *behind,
        home / "graph/fx.py",
        home / "graph/operator_effects.py",
        home / "graph/aliases.py",
        home / "probe.py",
    ]


def test_private_torch_is_named_only_where_it_is_the_subject(sources: list[Path], root: Path) -> None:
    home, allowed = root / "packages/retrograd/src/retrograd", private(root)
    outside = [path for path in sources if home in path.parents and path not in allowed]
    found = {str(path.relative_to(root)): private_torch(ast.parse(path.read_text())) for path in outside}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_probe_asks_for_all_private_torch_that_is_named(root: Path) -> None:
    """What differs between releases may be absent, and so may CUDA."""
    trees = [
        ast.parse(path.read_text()) for path in private(root) if path.name not in ("releases.py", "cuda.py")
    ]
    chains = {dotted(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used = {name for name in chains if re.match(r"torch\.(_C\.(_\w+\.)*\w+|_[a-z]\w*)", name)}
    asked = {name.replace(":", ".") + "." for name in required_names()}
    is_asked = {
        name: any(f"{name}.".startswith(one) or one.startswith(f"{name}.") for one in asked) for name in used
    }
    assert [name for name, asked in is_asked.items() if not asked] == []


def test_own_code_is_imported_at_the_top(sources: list[Path], root: Path) -> None:
    adapters = root / "harness/src/gradparity/subjects"
    inside = {
        f"{path.relative_to(root)}:{function.lineno}": names
        for path in sources
        if adapters not in path.parents
        for function in functions(ast.parse(path.read_text()))
        if (names := own_imports_inside(function))
    }
    assert inside == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import torch\ntorch.add", []),
        ("from torch._dynamo import config", ["torch._dynamo", "torch._dynamo.config"]),
        ("import torch._C", ["torch._C"]),
        ("torch._C._autograd.x", ["torch._C", "torch._C._autograd", "torch._C._autograd.x"]),
        ("torch.__version__", []),
        (
            "from torch.autograd.graph import _engine_run_backward",
            ["torch.autograd.graph._engine_run_backward"],
        ),
    ],
)
def test_the_search_for_private_torch_finds_it(code: str, found: list[str]) -> None:
    assert private_torch(ast.parse(code)) == found


def test_the_search_for_inner_imports_finds_them() -> None:
    code = "import retrograd\ndef f():\n    from gradparity.case import Case\n    import torch"
    (function,) = functions(ast.parse(code))
    assert own_imports_inside(function) == ["gradparity.case", "gradparity.case.Case"]
