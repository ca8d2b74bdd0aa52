"""places: what a user has in a module or a file: a backend's function, a class of a subject.

In: a place, as ``module:function`` or ``file.py:function``. Out: what is there, what else the module has, and
how a script imports it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORT = """\
    import importlib
    import sys
    from pathlib import Path

    sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ('.', {folder!r})]
"""
"""Finds a user's file, and what it imports, beside the script or in the folder where the file was."""


def backend_of(name: str) -> Any:
    """What a compiler is given for a backend: the function at its place, or its registered name."""
    return function_at(name) if ":" in name else name


def in_script(backend: str) -> tuple[str, str]:
    """The lines in a function of a script that import the backend, and the expression that names it."""
    if ":" not in backend:
        return "", repr(backend)
    module, _, function = backend.rpartition(":")
    file = file_of(backend)
    if file is None:
        return f"    import {module}\n\n", f"{module}.{function}"
    expression = f"importlib.import_module({file.stem!r}).{function}"
    return IMPORT.format(folder=str(file.parent)), expression


def file_of(place: str) -> Path | None:
    """The file of a place that names its file, or a module in the working folder."""
    module = place.rpartition(":")[0]
    path = Path(module if module.endswith(".py") else f"{module}.py")
    return path.resolve() if module and path.is_file() else None


def with_neighbours(file: Path) -> list[str]:
    """The name of the file, and those of the files in its folder that it imports, or that these import."""
    found = [file.name]
    for name in found:  # it grows
        nodes = list(ast.walk(ast.parse(file.with_name(name).read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        others = dict.fromkeys(f"{name.partition('.')[0]}.py" for name in names)
        found += [other for other in others if other not in found and file.with_name(other).is_file()]
    return found


def needed(file: Path | None) -> str:
    """A line for the head of a script that runs the file; "" without one."""
    if file is None:
        return ""
    files = ", ".join(with_neighbours(file))
    return f"Needs {files}: beside this script, or in {str(file.parent)!r} from here."


def portable(text: str, file: Path | None, folder: Path) -> str:
    """A script for this folder, in which the folder of the file is relative to the script's own."""
    if file is None:
        return text
    return text.replace(repr(str(file.parent)), repr(os.path.relpath(file.parent, folder.resolve())))


@functools.cache
def function_at(place: str) -> Callable[..., Any]:
    """The function at ``module:function`` or ``file.py:function``; modules also in the working folder.

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, function = place.rpartition(":")
    found: Any = getattr(loaded(module), function)
    if not callable(found):
        raise AttributeError(f"{function} of {module} is no function, but a {type(found).__name__}")
    made: Callable[..., Any] = found
    return made


def functions_of(module: str) -> list[str]:
    """The callables that a module, or a Python file, defines or assigns at its top, in the file's order; no
    classes, and no names that begin with an underscore. None of a module that is not written in Python.

    Raises:
        ImportError, SyntaxError: there is no such module or file, or it is no Python.
    """
    found = loaded(module)
    file = Path(getattr(found, "__file__", None) or "")
    if file.suffix != ".py":
        return []
    names: list[str] = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names += [target.id for target in targets if isinstance(target, ast.Name)]
        names += [node.name] if isinstance(node, ast.FunctionDef) else []
    values = {name: getattr(found, name, None) for name in names if not name.startswith("_")}
    return [name for name, value in values.items() if callable(value) and not isinstance(value, type)]


def loaded(module: str) -> ModuleType:
    """The module of this name or in this file, imported."""
    path = Path(module).resolve()
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return _of_file(path) if path.suffix == ".py" else importlib.import_module(module)


@functools.cache
def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"there is no file {path.name} in {path.parent}")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, loaded)
    sys.path.insert(0, str(path.parent))  # its neighbours come first, as in a script
    try:
        spec.loader.exec_module(loaded)
    except BaseException:
        if sys.modules[path.stem] is loaded:
            del sys.modules[path.stem]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return loaded
