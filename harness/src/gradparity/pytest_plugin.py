"""The pytest plugin: a fixture `gradparity`, a marker, options, a header, rows as lines of JSON.

In: pytest's own objects. Out: for each subject, a test of its own. torch is imported when the first check
runs.

    def test_my_module(gradparity):
        gradparity.check(MyModule(), (torch.randn(4, 8),))
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

DEFAULT_SUBJECTS = ("compile:inductor",)
OPTIONS = {
    "subjects": "subjects to check against eager, separated by commas or blanks",
    "device": "where programs run: cpu or cuda",
    "seed": "decides all random numbers",
    "json": "write the rows of all checks, one line of JSON each",
}
"""Each is an option --gradparity-NAME, and a setting gradparity_NAME in pytest's own file."""

TRACE_LOG = "torch.__trace"
"""Torch's log for tlparse, which is always at its lowest level: pytest captures all of it otherwise."""

MARKER = "gradparity(subjects=None, device=None, seed=None): how this test's checks are made"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options and their twins."""
    group = parser.getgroup("gradparity", "eager against compiled backwards")
    for name, text in OPTIONS.items():
        group.addoption(f"--gradparity-{name}", dest=f"gradparity_{name}", default=None, help=text)
        parser.addini(f"gradparity_{name}", text, default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, and removes the parts that a killed run left."""
    config.addinivalue_line("markers", MARKER)
    path = _json(config)
    if path is not None and not hasattr(config, "workerinput"):
        for part in _parts(path):
            part.unlink()


def pytest_report_header(config: pytest.Config) -> str:
    """Says which torch, which subjects, which device and seed."""
    subjects = ", ".join(_subjects(config))
    told = f"torch {version('torch')}, subjects {subjects}, device {_device(config)}, seed {_seed(config)}"
    return f"gradparity {version('gradparity')}: {told}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test of each subject."""
    if "gradparity" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("gradparity")
        given = marker.kwargs.get("subjects") if marker else None
        subjects = _split(given) if given else _subjects(metafunc.config)
        metafunc.parametrize("gradparity", subjects, indirect=True, ids=list(subjects))


@dataclass(frozen=True)
class Checker:
    """What the fixture hands to a test."""

    subject: str
    device: str
    seed: int
    item: pytest.Item
    json: Path | None

    def check(self, fn: Any, inputs: Any = (), hooks: Any = False, checks: Sequence[str] = ()) -> None:
        """Runs the function or module in eager and under the subject; fails the test if they differ.

        Arguments: as `gradparity.parity.Target` says; further checks by name ("reuse", "leaks", …).
        """
        module = importlib.import_module("gradparity.parity")
        log = logging.getLogger(TRACE_LOG)
        log.handlers = [one for one in log.handlers if not type(one).__module__.startswith("_pytest.")]
        name = f"{self.item.name}".replace("::", ".")
        settings = {"name": name, "seed": self.seed, "checks": tuple(checks), "device": self.device}
        (row,) = module.check(fn, inputs, subjects=(self.subject,), hooks=hooks, **settings)
        self.item.user_properties.append(("gradparity", f"{row.subject} {row.verdict} {row.symptom}".strip()))
        if self.json is not None:
            _append(self.json, importlib.import_module("gradparity.store.lines").line(row))
        if row.verdict == "UNSUPPORTED" or row.set_aside:
            pytest.skip(f"{row.verdict}: {row.reason}")
        if row.verdict != "AGREE":
            pytest.fail(module.explained(row, None), pytrace=False)


@pytest.fixture
def gradparity(request: pytest.FixtureRequest) -> Checker:
    """Checks functions and modules of yours against eager; one test for each subject."""
    marker = request.node.get_closest_marker("gradparity")
    given = marker.kwargs if marker else {}
    config = request.config
    path = _json(config)
    worker = getattr(config, "workerinput", {}).get("workerid", "main")
    part = path.with_name(f"{path.name}.{worker}.part") if path is not None else None
    device, seed = given.get("device") or _device(config), given.get("seed")
    return Checker(request.param, device, _seed(config) if seed is None else seed, request.node, part)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The controller joins what its workers wrote."""
    path = _json(session.config)
    if path is None or hasattr(session.config, "workerinput"):
        return
    lines = [line for part in _parts(path) for line in part.read_text(encoding="utf-8").splitlines()]
    path.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
    for part in _parts(path):
        part.unlink()


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as out:
        out.write(line)


def _parts(path: Path) -> Iterable[Path]:
    return sorted(path.parent.glob(f"{path.name}.*.part"))


def _setting(config: pytest.Config, name: str) -> str | None:
    value = config.getoption(f"gradparity_{name}")
    return str(value) if value is not None else (config.getini(f"gradparity_{name}") or None)


def _subjects(config: pytest.Config) -> tuple[str, ...]:
    return _split(_setting(config, "subjects") or ",".join(DEFAULT_SUBJECTS))


def _split(names: str | Iterable[str]) -> tuple[str, ...]:
    words = names.replace(",", " ").split() if isinstance(names, str) else names
    return tuple(dict.fromkeys(words))


def _device(config: pytest.Config) -> str:
    return _setting(config, "device") or "cpu"


def _seed(config: pytest.Config) -> int:
    text = _setting(config, "seed") or "0"
    if not text.isdecimal():
        raise pytest.UsageError(f"--gradparity-seed must be a number, got {text!r}")
    return int(text)


def _json(config: pytest.Config) -> Path | None:
    text = _setting(config, "json")
    return Path(text) if text else None
