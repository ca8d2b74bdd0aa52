"""Files that gradparity reads, damaged in all ways: one clear line that names the file, never a traceback.

A case is a file of one kind with one thing changed: cut off, a byte that is no text, a value of another type,
a field that is missing, nesting without end. Which changes there are depends on the file only.
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradparity import expected, settings
from gradparity.cli import app
from gradparity.errors import GradparityError
from gradparity.fuzzing.find import Find, Folder
from gradparity.generate.script import Script, Step
from gradparity.signature import signature_of
from gradparity.store.lines import line, read_lines
from gradparity.store.store import HEADER, CaseDone, Store
from gradparity.verdict import Row, Verdict

ROW = Row(
    "demo::a",
    0,
    "demo",
    "eager",
    Verdict.DIVERGE,
    "value",
    "differs",
    ("note",),
    place="grad",
    signature="ab",
)
SCRIPT = Script(steps=(Step(title="a", lines=("x = 1",)),))
FIND = Find("eager", "generated::views::1", 1, SCRIPT, SCRIPT, signature_of(ROW), ROW)
RUN = {"id": "a", "campaign": "c", "plan": {"shard": "1/2"}, "versions": {"torch": "2"}, "started": 1.0}
STORE: tuple[Any, ...] = (
    json.loads(HEADER),
    {"kind": "run"} | RUN,
    {"kind": "case", "of": "a"} | CaseDone("u", 0, ROW, {"verdict": "AGREE", "lost": ["x"]}).to_json(),
    {"kind": "unit", "of": "a", "unit": "u", "error": "why"},
)
EXPECTED = """
[[expected]]
subject = "eager"
case = "demo::*"
verdict = "DIVERGE"
reason = "r"
link = "l"
date = "d"
torch = "2.11.."
[[fallback]]
subject = "eager"
cases = ["demo::*"]
code = "c"
reason = "r"
date = "d"
"""
SETTINGS = '[tool.gradparity]\nsubjects = ["eager"]\nprocesses = 2\nstore = "s.db"\n'
WORDS: list[Any] = [None, 3, -1.5, True, "x", "\ud800", [], [3], {}, {"a": 3}]
DEEP = "[" * 100_000


def cut(data: bytes) -> Iterator[bytes]:
    """The file cut off, with a byte that is no text, with other things in its place."""
    yield from (data[: len(data) * i // 7] for i in range(7))
    yield from (data[:i] + b"\xff" + data[i:] for i in (0, len(data) // 2, len(data)))
    yield from (b"\x00" * 20, b"\n\n", b"[]", b"3\n", b"null\n", b'"x"\n', DEEP.encode(), b"1" * 5000 + b"\n")


def changed(data: Any) -> Iterator[Any]:
    """Plain data with one value replaced or one key lost, at any depth."""
    yield from WORDS
    keys: Any = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        for value in changed(data[key]):
            made = copy.copy(data)
            made[key] = value
            yield made
        if isinstance(data, dict):
            yield {other: value for other, value in data.items() if other != key}


def lines(*rows: Any) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def stores() -> Iterator[bytes]:
    yield from cut(lines(*STORE))
    for i, one in enumerate(STORE):
        yield from (lines(*STORE[:i], other, *STORE[i + 1 :]) for other in changed(one))


def opened(path: Path) -> None:
    """Reads a store, as a command that may write it does."""
    with Store(path) as store:
        store.rows()


def tables(text: str) -> Iterator[bytes]:
    yield from cut(text.encode())
    for i, row in enumerate(rows := text.splitlines()):
        name = row.partition(" = ")[0]
        others = [f"{name} = {value}" for value in ("3", "true", "[]", "[3]", "{a = 3}", '"[\\u0000"', DEEP)]
        yield from (
            "\n".join([*rows[:i], *other, *rows[i + 1 :]]).encode() for other in ([], *([x] for x in others))
        )


def report_of(path: Path) -> None:
    """What the command says of a file of rows; its one error, raised."""
    out = path.with_suffix(".html")
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(out), "--junit", str(out)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 4), done.output
    if done.exit_code:
        raise GradparityError(done.stderr)


KINDS: dict[str, tuple[str, Callable[[Path], object], Callable[[], Iterator[bytes]]]] = {
    "rows": ("rows.jsonl", read_lines, lambda: (lines(other) for other in changed(ROW.to_json()))),
    "rows, cut": ("rows.jsonl", report_of, lambda: cut(line(ROW).encode())),
    "store": ("s.db", opened, stores),
    "find": ("f.json", lambda path: Folder(path.parent).finds(), lambda: map(lines, changed(FIND.to_json()))),
    "find, cut": ("f.json", lambda path: Folder(path.parent).finds(), lambda: cut(lines(FIND.to_json()))),
    "expected": ("expected.toml", expected.load, lambda: tables(EXPECTED)),
    "settings": ("pyproject.toml", lambda path: settings.load(path.parent), lambda: tables(SETTINGS)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_gives_one_error_that_names_it(kind: str, tmp_path: Path) -> None:
    name, read, files = KINDS[kind]
    path, told, count = tmp_path / name, list[str](), 0
    for data in files():
        path.write_bytes(data)
        count += 1
        try:
            read(path)
        except GradparityError as error:
            told.append(str(error))
    assert len(told) > count // 5 > 2
    assert [text for text in told if name not in text or "\ud800" in text] == []


@pytest.mark.parametrize(
    "exhibit", [{"errors": 3}, {"errors": [3]}, {"ablation": 3}, {"eager": 3}, {"subject": ["\ud800"]}]
)
def test_an_exhibit_of_another_form_is_one_error(exhibit: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROW.to_json() | {"exhibit": exhibit}))
    try:
        report_of(path)
    except GradparityError as error:
        assert "rows.jsonl" in str(error)  # noqa: PT017 - not all of it is shown


@pytest.mark.parametrize("line", range(1, len(STORE)))
@pytest.mark.parametrize("value", ["", 3, [], {}, {"shard": "x"}, None])
def test_a_damaged_store_is_one_error(line: int, value: object, tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    for key in STORE[line]:
        path.write_bytes(lines(*STORE[:line], STORE[line] | {key: value}, *STORE[line + 1 :]))
        for words in (["report", str(path)], ["merge", str(path), "--out", str(tmp_path / "all.db")]):
            done = CliRunner().invoke(app, words)
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
            assert done.exit_code in (0, 4)
            assert done.exit_code == 0 or "s.db" in done.stderr


FOREIGN = (
    "import:made_elsewhere:Subject",
    "compile:made_elsewhere:compile",
    "compile:made/elsewhere.py:compile",
)


@pytest.mark.parametrize("command", ["replay", "show", "shrink", "issue"])
@pytest.mark.parametrize("subject", [*FOREIGN, "eager"])
def test_what_a_store_names_is_imported_only_with_trust(command: str, subject: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    case = "folder:made_elsewhere::a" if subject == "eager" else "demo::gradient_of_an_unused_output"
    path.write_bytes(lines(ROW.to_json() | {"subject": subject, "case": case}))
    words = [command, str(path)] if command == "replay" else [command, "ab", "--store", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 4, done.output
    named = case if subject == "eager" else subject
    place = "made/elsewhere.py" if ".py" in subject else "made_elsewhere"
    assert f"code that is not gradparity's: {place} (of the " in done.stderr
    assert named in done.stderr
    assert "--trust" in done.stderr


def test_with_trust_it_is_tried(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROW.to_json() | {"subject": FOREIGN[0]}))
    done = CliRunner().invoke(app, ["replay", str(path), "--trust"])
    assert "No module named 'made_elsewhere'" in done.output
