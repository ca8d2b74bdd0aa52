"""A table as Markdown: its head and rows in, text out; and where documents hold such a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: a table in a document, with the names of its maker and of the file that it is made from
MADE = re.compile(r"<!-- made:(?P<table>\w+) ?(?P<file>\S*) -->\n(?P<text>.*?)<!-- /made -->", re.DOTALL)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One line for the head, one for the rule, one for each row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
