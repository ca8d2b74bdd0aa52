"""Lints the English of the documents: proselint's checks, and the rules of `prose.toml` and the glossary.

In: Markdown files, by default all documents. Out: one line per complaint, as `FILE:LINE:COLUMN: RULE: TEXT`.
The exit status is 1 if there is one. Code, links, comments and tables of figures are not prose. `nox -s lint`
installs proselint and runs this file.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")
READMES = ("packages/retrograd/README.md", "harness/README.md")
#: what is replaced, and by which letter: a blank ends a sentence's part, and an x stands for a noun.
NOT_PROSE = (
    (re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^:::.*?(?=^\S|\Z)", re.DOTALL | re.MULTILINE), " "),
    (re.compile(r"`[^`\n]+`"), "x"),
    (re.compile(r"(?<=\])\([^)\s]+\)"), " "),
    (re.compile(r"[*_]{1,2}(?=\S)|(?<=\S)[*_]{1,2}"), " "),
)
LEFT_OUT = {"findings", "glossary.md"}
LONGEST = 45
#: checks of proselint that do not fit: documents are typed in ASCII; a text may begin as its heading does.
OFF = ("typography", "lexical_illusions")


def documents(root: Path) -> list[Path]:
    """All documents, without the findings (drafts of issues for others) and the glossary (wrong words)."""
    pages = [page for page in (root / "docs").rglob("*.md") if not LEFT_OUT & {*page.parts}]
    return [*(root / name for name in (*TOPS, *READMES)), *sorted(pages)]


def prose(text: str) -> str:
    """`text` with everything else blanked, each letter in its place."""
    for pattern, letter in NOT_PROSE:
        text = pattern.sub(lambda found, by=letter: re.sub(r"[^\n]", by, found[0]), text)
    return text


def rules() -> list[dict[str, Any]]:
    """The rules of `prose.toml`, and one for each word that the glossary rules out.

    Raises:
        ValueError: a rule does not find its own `wrong` examples, or finds one of the `right` ones.
    """
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["rule"]
    for row in (ROOT / "docs/glossary.md").read_text().splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) > 4 and cells[1] != "word":
            for word in re.findall(r"\w+", cells[3]):
                say = f"the glossary's word is '{cells[1]}'"
                found.append({"name": "glossary", "pattern": rf"\b{word}s?\b", "say": say})
    for rule in found:
        pattern = rule["pattern"] = re.compile(rule["pattern"], re.MULTILINE)
        missed = [text for text in rule.get("wrong", ()) if not pattern.search(text)]
        blamed = [text for text in rule.get("right", ()) if pattern.search(text)]
        if missed or blamed:
            raise ValueError(f"rule {rule['name']} of prose.toml: not found {missed}, wrongly found {blamed}")
    return found


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Each sentence with its position. List items, table cells and clauses behind a colon are their own."""
    begin = 0
    for end in re.finditer(r"[.!?:;](?=\s)|\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |#))|\|", text):
        yield begin, text[begin : end.end()]
        begin = end.end()
    yield begin, text[begin:]


def complaints(text: str) -> Iterator[tuple[int, str, str]]:
    """Position, rule and text of what our own rules find in a document."""
    plain = prose(text)
    for rule in rules():
        for found in rule["pattern"].finditer(plain):
            yield found.start(), rule["name"], f"{' '.join(found[0].split())[:60]!r}: {rule['say']}"
    for at, sentence in sentences(plain):
        if (count := len(sentence.split())) > LONGEST:
            yield at, "long-sentence", f"{count} words; at most {LONGEST}: one thought a sentence"


def of_proselint(text: str) -> Iterator[tuple[int, str, str]]:
    """The same for what proselint finds."""
    registry = CheckRegistry()
    if not registry.checks:
        registry.register_many(__register__)
    config: Any = {**DEFAULT, "checks": {**DEFAULT["checks"], **dict.fromkeys(OFF, False)}}
    for found in LintFile("document", prose(text)).lint(config):
        yield found.check_result.span[0] - 1, found.check_result.check_path, found.check_result.message


def lint(pages: Iterable[Path]) -> list[str]:
    """All complaints, in the order of pages and lines."""
    lines = []
    for page in pages:
        text = page.read_text()
        for at, rule, what in sorted({*complaints(text), *of_proselint(text)}):
            line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
            lines.append(f"{page.relative_to(ROOT)}:{line}:{column}: {rule}: {what}")
    return lines


if __name__ == "__main__":
    found = lint([Path(name).resolve() for name in sys.argv[1:]] or documents(ROOT))
    print("\n".join(found) if found else "no complaint")
    sys.exit(bool(found))
