"""Measure the code of retrograd: `nox -s house` prints the table.

In: the sources of the package. Out: one row a measure, with what is wanted where somebody has said so. The
last rows run one backward, and count the modules that it passes through.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "packages/retrograd/src/retrograd"
PATCHES = HOME / "facts/patches.toml"
BUDGET = Path(__file__).with_name("budget.toml")

#: what a line may hold besides code.
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)

#: calls that make a name for a type, a logger, or another name for something.
_NO_STATE = ("TypeVar", "entry_of", "getLogger", "getattr")


@dataclass(frozen=True)
class Module:
    """One file: its name relative to the package, its lines, its tree, and how many lines hold code."""

    name: str
    lines: int
    tree: ast.Module
    code: int = 0

    @property
    def folder(self) -> str:
        """The folder right below the package; "top" for a file of the package itself."""
        return self.name.split("/")[0] if "/" in self.name else "top"


@dataclass(frozen=True)
class Row:
    """One measure.

    Attributes:
        what: is measured. found: in words or a number. wanted: empty if nobody has said.
        details: what was counted, for `--details`.
    """

    what: str
    found: object
    wanted: str = ""
    details: list[str] = field(default_factory=list)


def modules(home: Path = HOME) -> list[Module]:
    """All files of the package."""
    texts = {path.relative_to(home).as_posix(): path.read_text() for path in sorted(home.rglob("*.py"))}
    return [
        Module(name, len(text.splitlines()), ast.parse(text), code_lines(text))
        for name, text in texts.items()
    ]


def code_lines(text: str) -> int:
    """How many lines hold code: no blanks, comments, docstrings and imports."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                left_out.update(_span(first))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(_span(node))
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - left_out)


def _span(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


def folders(found: list[Module]) -> dict[str, int]:
    """Code lines by folder."""
    counts: Counter[str] = Counter()
    for module in found:
        counts[module.folder] += module.code
    return dict(counts)


def budget(found: list[Module]) -> Iterator[Row]:
    """Code lines, by folder, beside what `budget.toml` allows."""
    now, allowed = folders(found), tomllib.loads(BUDGET.read_text())["folders"]
    yield Row("code lines of retrograd", sum(now.values()), f"{sum(allowed.values())}; aim 14,500")
    for folder in sorted(now.keys() | allowed.keys(), key=lambda name: -now.get(name, 0)):
        size, limit = now.get(folder, 0), allowed.get(folder, 0)
        yield Row(f"code lines of {folder}", f"{size} ({size - limit:+})", str(limit))


def _nodes(found: list[Module], kind: Any) -> Iterator[tuple[Module, Any]]:
    return ((module, node) for module in found for node in ast.walk(module.tree) if isinstance(node, kind))


def _length(node: Any) -> int:
    return node.end_lineno - node.lineno + 1


def sizes(found: list[Module]) -> Iterator[Row]:
    """How much there is, and the largest of each kind."""
    yield Row("lines of retrograd", sum(module.lines for module in found))
    yield Row(
        "files, median length", f"{len(found)}, {statistics.median(module.lines for module in found):.0f}"
    )
    longest = max(found, key=lambda module: module.lines)
    yield Row("longest file", f"{longest.lines}, {longest.name}", "450")
    functions = list(_nodes(found, ast.FunctionDef | ast.AsyncFunctionDef))
    median = statistics.median(_length(node) for _, node in functions)
    yield Row("functions, median length", f"{len(functions)}, {median:.0f}")
    module, function = max(functions, key=lambda pair: _length(pair[1]))
    yield Row("longest function", f"{_length(function)}, {function.name} in {module.name}", "70")
    counts = {
        f"{node.name} in {module.name}": sum(isinstance(child, ast.FunctionDef) for child in node.body)
        for module, node in _nodes(found, ast.ClassDef)
    }
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    yield Row(
        "biggest class, methods",
        f"{counts[ranked[0]]}, {ranked[0]}",
        "10",
        [f"{counts[name]} {name}" for name in ranked if counts[name] > 10],
    )


def _is_state(name: str, value: ast.expr) -> bool:
    """Whether a module keeps something that may change under this name. A name in capitals is a constant."""
    if name.startswith("__") or name.lstrip("_").isupper():
        return False
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] not in _NO_STATE
    return isinstance(value, ast.Dict | ast.Set | ast.List | ast.ListComp | ast.DictComp | ast.SetComp)


def state(found: list[Module]) -> Iterator[Row]:
    """What modules keep for the process, and who forgets it."""
    kept: list[str] = []
    for module in found:
        for statement in module.tree.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
            value = getattr(statement, "value", None)
            names = [ast.unparse(target) for target in targets]
            kept += [
                f"{module.name}: {name}" for name in names if value is not None and _is_state(name, value)
            ]
        kept += [f"{module.name}: global {name}" for name in sorted(_globals(module))]
    yield Row("module-level state", len(kept), "", kept)
    caches = [
        f"{module.name}: {node.name}"
        for module, node in _nodes(found, ast.FunctionDef)
        if any(
            ast.unparse(one).startswith(("functools.cache", "functools.lru_cache"))
            for one in node.decorator_list
        )
        and "cached_property" not in ast.unparse(node.decorator_list[0])
    ]
    yield Row("cached functions", len(caches), "", caches)
    yield Row("registrations with reset", _calls(found, "forgotten_by_reset"))
    yield Row("locks that a fork renews", _calls(found, "ForkSafeLock"))
    plain = [
        f"{module.name}:{node.lineno}"
        for module, node in _nodes(found, ast.Call)
        if ast.unparse(node.func) in ("threading.Lock", "threading.RLock") and module.name != "process.py"
    ]
    yield Row("locks that it does not", len(plain), "0", plain)


def _globals(module: Module) -> set[str]:
    return {name for node in ast.walk(module.tree) if isinstance(node, ast.Global) for name in node.names}


def _calls(found: list[Module], name: str) -> int:
    used = sum(ast.unparse(node.func) == name for _, node in _nodes(found, ast.Call))
    decorators = (one for _, node in _nodes(found, ast.FunctionDef) for one in node.decorator_list)
    return used + sum(ast.unparse(one) == name for one in decorators)


def patches(found: list[Module]) -> Iterator[Row]:
    """Attributes of torch that are replaced: in the table, and outside of it."""
    entries = [*tomllib.loads(PATCHES.read_text())["patches"]]
    yield Row("patches of torch in the one table", len(entries), "", entries)
    outside = [
        f"{module.name}:{node.lineno} {ast.unparse(target)}"
        for module, node in _nodes(found, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target).startswith("torch.")
    ]
    yield Row("attributes of torch set elsewhere", len(outside), "0", outside)


def exceptions(found: list[Module]) -> Iterator[Row]:
    """Classes of exceptions that are not in errors.py."""
    outside = [
        f"{module.name}: {node.name}"
        for module, node in _nodes(found, ast.ClassDef)
        if module.name != "errors.py"
        and any(
            ast.unparse(base).split(".")[-1].endswith(("Error", "Exception", "Refusal"))
            for base in node.bases
        )
    ]
    yield Row("exception classes outside errors.py", len(outside), "", outside)


def walk() -> Iterator[Row]:
    """The modules that a backward of known structure passes through, in the order in which it enters them."""
    import torch

    import retrograd

    x = torch.ones(4, requires_grad=True)
    with retrograd.compiled_autograd(backend="eager"):
        for _ in range(4):
            (x.sin() * 2).sum().backward()
        entered = entered_during((x.sin() * 2).sum().backward)
    again = len(entered) - len(set(entered))
    yield Row("modules of a live backward that is known", len(set(entered)), "at most 12", entered)
    yield Row("entered again", again, "0")


def entered_during(call: Callable[[], object]) -> list[str]:
    """The modules of ours that are called from another module while `call` runs."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_back is None:
            return
        name, caller = (str(one.f_globals.get("__name__")) for one in (frame, frame.f_back))
        if name.startswith("retrograd.") and name != caller:
            room = name.removeprefix("retrograd.")
            if entered[-1:] != [room]:
                entered.append(room)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def table(home: Path = HOME) -> list[Row]:
    """All measures of the sources."""
    found = modules(home)
    return [row for measure in (sizes, budget, state, patches, exceptions) for row in measure(found)]


def main(arguments: list[str]) -> None:
    """Print the table as Markdown; with `--details`, also what was counted."""
    rows = [*table(), *walk()]
    print("| measure | now | wanted |\n|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.found} | {row.wanted} |")
    for row in rows if "--details" in arguments else []:
        if row.details:
            print(f"\n{row.what}:", *row.details, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
