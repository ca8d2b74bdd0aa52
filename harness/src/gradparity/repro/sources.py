"""The source of a function with everything of our own that it needs.

In: a module-level function. Out: import lines, and the texts of the definitions it uses, from whatever
modules they come, in an order in which they can be executed. Names of torch and the standard library are
imported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from textwrap import dedent
from types import ModuleType
from typing import Any

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
    """Collects the sources. Raises ReproError for a function that has no text of its own, as one that was
    made inside another.
    """
    name = getattr(function, "__name__", repr(function))
    if getattr(function, "__closure__", None) or "<" in getattr(function, "__qualname__", "<"):
        raise ReproError(
            f"{name} was made inside another function, whose variables a script cannot know\n"
            "  try    define it at the top of its module"
        )
    found = Source()
    module = inspect.getmodule(function)
    if module is None:
        raise ReproError(f"{name} stands in no module\n  try    put it into a file")
    _collect(module, name, found)
    return found


def _collect(module: ModuleType, name: str, found: Source) -> None:
    if name in found.definitions:
        return
    tops = _tops(module)
    if name not in tops:
        raise ReproError(f"no definition of {name} at the top of {module.__name__}")
    node = tops[name]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        node.decorator_list = [item for item in node.decorator_list if not _is_ours(item)]
    found.definitions[name] = ""  # so that recursion ends
    for used in _names(node):
        _follow(module, used, found)
    text = _text(module, node)
    del found.definitions[name]
    found.definitions[name] = text


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
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(item.lineno for item in decorators)])
    return dedent("\n".join(lines[first - 1 : node.end_lineno]))


@cache
def _tops(module: ModuleType) -> dict[str, Any]:
    """Functions, classes and constants at the top of a module."""
    tops: dict[str, Any] = {}
    body = ast.parse(inspect.getsource(module)).body
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
    for node in ast.walk(ast.parse(inspect.getsource(module))):
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


def _names(node: ast.AST) -> list[str]:
    """All names that a definition reads, in order; those in annotations written as text too."""
    return list(dict.fromkeys(item.id for item in ast.walk(node) if isinstance(item, ast.Name)))


def _is_ours(decorator: ast.expr) -> bool:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(call, ast.Name) and call.id == "scenario"
