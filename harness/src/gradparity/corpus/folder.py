"""The corpora "folder:<path>": programs of your own.

In: a folder (or one file) with Python files that define scenarios, and JSON files with scripts of the
generator. Out: a corpus, one chunk per program. Raises CorpusError for a file that cannot be read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.generated import scripted
from gradparity.corpus.scenario import Scenario, collecting, program_of
from gradparity.errors import CaseError, CorpusError, UnknownNameError
from gradparity.generate.script import Script

PREFIX = "folder:"


class FolderCorpus:
    """All programs in the files of a folder, by name."""

    def __init__(self, path: str) -> None:
        self.name = PREFIX + path
        self._path = Path(path)

    @cached_property
    def _scenarios(self) -> dict[str, Scenario | Script]:
        if not self._path.exists():
            raise CorpusError(
                f"no folder of programs at {self._path}\n  try    folder:PATH with Python files in it"
            )
        files = [self._path]
        if self._path.is_dir():
            files = sorted(file for file in self._path.iterdir() if _is_program(file))
        found: dict[str, Scenario | Script] = {}
        for file in files:
            for name, item in _loaded(file).items():
                if name in found:
                    raise CorpusError(
                        f"two programs of {self._path} are called {name}: the second stands in {file}"
                    )
                found[name] = item
        return found

    def chunks(self) -> list[str]:
        """Names of all programs, by file."""
        return list(self._scenarios)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """The one program of this name."""
        if chunk not in self._scenarios:
            raise UnknownNameError("program", chunk, sorted(self._scenarios))
        item, case = self._scenarios[chunk], Case(self.name, chunk, None, seed)
        yield scripted(case, item) if isinstance(item, Script) else program_of(item, case)


def _is_program(file: Path) -> bool:
    """Scripts that `fuzz` wrote beside its finds are no programs of their own."""
    return file.suffix in (".py", ".json") and not file.name.startswith("repro_")


def _script(file: Path) -> Script:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        text = json.dumps(data.get("shrunk", data))
        return Script.from_text(text)
    except (OSError, ValueError, AttributeError, RecursionError, CaseError) as error:
        raise CorpusError(
            f"{file} is no script: {error}\n  try    the JSON form of a generated program"
        ) from error


def _loaded(file: Path) -> Mapping[str, Scenario | Script]:
    """The scenarios that a Python file registers, or the script of a JSON file; of a find, the shrunk one."""
    if file.suffix == ".json":
        return {file.stem: _script(file)}
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=4).hexdigest()
    name = f"gradparity_folder_{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise CorpusError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with collecting() as found:
            spec.loader.exec_module(module)
    except CaseError as error:
        raise CorpusError(f"{file}: {error}") from error
    except Exception as error:
        raise CorpusError(f"cannot import {file}: {type(error).__name__}: {error}") from error
    return found
