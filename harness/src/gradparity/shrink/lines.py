"""The last cuts, of the text itself: runs of lines and single lines of the rendered script.

In: a script. Out: edits that leave lines of its source out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from gradparity.generate.script import Script
from gradparity.shrink.cut import Cut
from gradparity.shrink.read import from_source

CHUNKS = (4, 2, 1)


def text_lines(script: Script) -> Iterator[Cut]:
    """Each run of four, two and one lines of the source, imports excepted."""
    lines = script.source.splitlines()
    first = next((place for place, line in enumerate(lines) if line.startswith(("def ", "class ", "@"))), 0)
    for size in CHUNKS:
        for start in range(first, len(lines) - size + 1):
            if any(line.strip() for line in lines[start : start + size]):
                text = "\n".join(lines[:start] + lines[start + size :])
                yield partial(from_source, text, script)
