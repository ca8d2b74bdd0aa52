"""The source of a function with everything of our own that it needs.

In: a function. Out: import lines, and the texts of the definitions it uses, from whatever modules they come,
in an order in which they can be executed. Names of torch and the standard library are imported. For a
function that was made inside another, the variables of the outer one become constants.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from textwrap import dedent
from types import FunctionType, ModuleType
from typing import Any, TypeGuard

import torch

from gradparity.errors import ReproError

PROVIDED = {"Probe": "Recorder", "scenario": ""}
"""Names of the harness for which a script has something else: the recorder, or nothing."""


@dataclass
class Source:
    """What a script needs."""

    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The definitions; import lines go to the top of a script."""
        return "\n\n\n".join(self.definitions.values())


def source_of(function: Callable[..., Any]) -> Source:
    """Collects the sources; the function's own definition comes last. Raises ReproError for a function whose
    text or variables cannot be written down.
    """
    found = Source()
    module = inspect.getmodule(function)
    if module is None or not isinstance(function, FunctionType):
        raise ReproError(f"{function!r} stands in no module\n  try    put it into a file")
    if _is_top(function):
        _collect(module, function.__name__, found)
    else:
        _collect_inner(module, function, found)
    return found


def source_of_call(call: partial[Any]) -> Source:
    """The source of `program(p)`, which calls the function of a partial with its arguments. Raises
    ReproError.
    """
    found, module = source_of(call.func), inspect.getmodule(call.func)
    name = list(found.definitions)[-1]
    assert module is not None
    words = ["p", *(_expression(module, item, found) for item in call.args)]
    words += [f"{key}={_expression(module, item, found)}" for key, item in call.keywords.items()]
    found.definitions["program"] = f"def program(p):\n    {name}({', '.join(words)})"
    return found


def _is_top(value: Any) -> bool:
    """Whether a function or class stands at the top of its module."""
    return "<" not in value.__qualname__ and "." not in value.__qualname__


def _collect(module: ModuleType, name: str, found: Source) -> None:
    if name in found.definitions:
        return
    tops = _tops(module)
    if name not in tops:
        raise ReproError(f"no definition of {name} at the top of {module.__name__}")
    node = tops[name]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        node.decorator_list = [item for item in node.decorator_list if not _is_registering(item)]
    found.definitions[name] = ""  # so that recursion ends
    for used in _names(node):
        _follow(module, used, found)
    text = _text(module, node)
    del found.definitions[name]
    found.definitions[name] = text
    for number, more in enumerate(_additions(module, name)):
        for used in _names(more):
            _follow(module, used, found)
        found.definitions[f"{name} {number}"] = _text(module, more)


def _collect_inner(module: ModuleType, function: FunctionType, found: Source) -> str:
    """Collects a function that was made inside another, or a lambda, with its free variables as constants.
    Returns the expression that stands for it.
    """
    node = _node_of(module, function)
    free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for name in _names(node):
        if name not in free:
            _follow(module, name, found)
    for name, cell in free.items():
        _bind(name, _expression(module, cell.cell_contents, found), found)
    if isinstance(node, ast.Lambda):
        return f"({ast.unparse(node)})"
    found.definitions[node.name] = _text(module, node)
    return node.name


def _bind(name: str, text: str, found: Source) -> None:
    """Adds `name = text`, unless the name is already defined by that text."""
    line = f"{name} = {text}"
    if name != text and found.definitions.setdefault(name, line) != line:
        raise ReproError(f"{name} means two things in this program\n  try    other names in its source")


def _node_of(module: ModuleType, function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """The definition whose code this function has. Raises ReproError if it is not in the module's text."""
    code = function.__code__
    places = {place for place in code.co_positions() if None not in place}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.FunctionDef) and (node.name, _first_line(node)) == (
            code.co_name,
            code.co_firstlineno,
        ):
            return node
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            body = node.body
            if (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset) in places:
                return node
    raise ReproError(f"no text of {function.__qualname__} in {module.__name__}")


def _expression(module: ModuleType, value: Any, found: Source) -> str:
    """A value as Python text. Raises ReproError if it has none."""
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
        found.imports["torch"] = "import torch"
        return repr(value)
    if type(value) in (list, tuple):
        inner = ", ".join(_expression(module, item, found) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if value else "()"
    if type(value) is dict:
        items = [[_expression(module, part, found) for part in pair] for pair in value.items()]
        return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
    if isinstance(value, FunctionType) and not _is_top(value):
        return _collect_inner(inspect.getmodule(value) or module, value, found)
    own = getattr(value, "__name__", "")
    if getattr(builtins, own, None) is value:
        return str(own)
    for home in filter(_is_ours, (inspect.getmodule(value), module)):
        for name, held in vars(home).items():
            if held is value and (name in _tops(home) or name in _imports(home)):
                _follow(home, name, found)
                return name
    raise ReproError(
        f"a script cannot know the variable {value!r:.60} of {module.__name__}\n"
        "  try    define it at the top of its module"
    )


def _is_ours(module: ModuleType | None) -> TypeGuard[ModuleType]:
    """Whether a module has a text, and no script could import it."""
    return module is not None and hasattr(module, "__file__") and not module.__name__.startswith("torch")


def _follow(module: ModuleType, name: str, found: Source) -> None:
    if name in PROVIDED:
        return
    if name in _tops(module):
        _collect(module, name, found)
    elif name in _imports(module):
        source, line = _imports(module)[name]
        if not source.startswith("gradparity"):
            found.imports[name] = line
        elif not line.startswith("from"):
            raise ReproError(f"{module.__name__} uses {name} as a module of the harness")
        else:
            _collect(importlib.import_module(source), name, found)


def _text(module: ModuleType, node: ast.stmt) -> str:
    """The definition as it was written, without our decorators."""
    lines = inspect.getsource(module).splitlines()
    return dedent("\n".join(lines[_first_line(node) - 1 : node.end_lineno]))


def _first_line(node: ast.stmt) -> int:
    """Where a definition begins, decorators included."""
    return min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])


@cache
def _tree(module: ModuleType) -> ast.Module:
    return ast.parse(inspect.getsource(module))


@cache
def _tops(module: ModuleType) -> dict[str, Any]:
    """Functions, classes and constants at the top of a module."""
    tops: dict[str, Any] = {}
    body = _tree(module).body
    inner = [node for block in body if isinstance(block, ast.With) for node in block.body]
    for node in [*body, *inner]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            tops[node.name] = node
        elif isinstance(node, ast.Assign):
            tops |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            tops[node.target.id] = node
    return tops


@cache
def _imports(module: ModuleType) -> dict[str, tuple[str, str]]:
    """By name: the module that it comes from, and the line that imports it."""
    lines: dict[str, tuple[str, str]] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.Import):
            for item in node.names:
                bound = item.asname or item.name.partition(".")[0]
                lines[bound] = (
                    item.name,
                    f"import {item.name}" + (f" as {item.asname}" if item.asname else ""),
                )
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
            for item in node.names:
                renamed = f" as {item.asname}" if item.asname else ""
                lines[item.asname or item.name] = (
                    node.module,
                    f"from {node.module} import {item.name}{renamed}",
                )
    return lines


def _additions(module: ModuleType, name: str) -> list[ast.stmt]:
    """Statements at the top of a module that add to what a name stands for: `name |= …`,
    `name[…] = …`, `name.update(…)`."""
    found: list[ast.stmt] = []
    for node in _tree(module).body:
        base: ast.AST | None = node.target if isinstance(node, ast.AugAssign) else None
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            base = node.targets[0].value
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            base = node.value.func
            while isinstance(base, ast.Attribute):
                base = base.value
        if isinstance(base, ast.Name) and base.id == name != "scenario":
            found.append(node)
    return found


def _names(node: ast.AST) -> list[str]:
    """All names that a definition reads, in order; those in annotations written as text too."""
    return list(dict.fromkeys(item.id for item in ast.walk(node) if isinstance(item, ast.Name)))


def _is_registering(decorator: ast.expr) -> bool:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(call, ast.Name) and call.id == "scenario"
