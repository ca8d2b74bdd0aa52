"""`docs/limits.md` beside the code: it explains every code that a report or an error of ours may show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / "packages/retrograd/src/retrograd"
LIMITS = Path(__file__).resolve().parents[2] / "docs/limits.md"

#: what makes a reason, with its code as the first argument.
MAKERS = frozenset({"Refusal", "Reason", "because", "refusal", "_refuse", "_not_recordable"})

#: codes by which parts of the compiler tell each other something; no report and no error shows them. They say
#: that something is not kept on disk, not given to another process, or not taken from memory.
_OF_CACHES = "cache-off cache-untrusted choices function modes node number state unnotable unwritable"
_OF_PARTS = "elsewhere measuring not-recordable not-traceable recording"
INTERNAL = frozenset(f"{_OF_CACHES} {_OF_PARTS}".split())
#: errors of the compiler's own checks, and of files: their text says all that there is to say.
OF_CHECKS = re.compile(r"joint-|load-|pass-|partition-|layout$|no-signature$|unknown-")


def codes() -> Iterator[tuple[str, str]]:
    """Every code that stands in the sources as a literal, with its place."""
    for path in sorted(HOME.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            code = node.args[0]
            if ast.unparse(node.func).split(".")[-1] in MAKERS and isinstance(code, ast.Constant):
                yield str(code.value), f"{path.relative_to(HOME)}:{node.lineno}"


def test_every_code_is_explained() -> None:
    text = LIMITS.read_text()
    missing = {
        code: place
        for code, place in codes()
        if code not in INTERNAL and not OF_CHECKS.match(code) and f"`{code}`" not in text
    }
    assert missing == {}


def test_every_internal_code_is_one_that_there_is() -> None:
    assert {code for code, _ in codes()} >= INTERNAL


def test_every_code_of_the_tables_is_one_that_there_is() -> None:
    rows = re.findall(r"^\| (`[a-z`, -]+`) \|", LIMITS.read_text(), re.MULTILINE)
    listed = {code for row in rows for code in re.findall(r"`([a-z-]+)`", row)}
    sources = "".join(path.read_text() for path in HOME.rglob("*.py"))
    assert len(listed) > 50
    assert {code for code in listed if f'"{code}"' not in sources} == set()
