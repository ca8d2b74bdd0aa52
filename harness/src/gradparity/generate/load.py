"""load: from a source text to a function that runs.

In: a text with `def run(p)`. Out: that function, from a module of its own. Tracebacks, `inspect` and Dynamo
find the text under the module's name for as long as it is among the last few.
"""

from __future__ import annotations

import hashlib
import linecache
from collections import OrderedDict
from typing import Any

from gradparity.errors import CaseError
from gradparity.generate.script import Script
from gradparity.observe import Body
from gradparity.probe import Probe

KEEP = 32
"""How many sources stay known by name."""

_KNOWN: OrderedDict[str, None] = OrderedDict()


def namespace(source: str) -> dict[str, Any]:
    """Executes the text as a module and returns its names. Raises CaseError if it is no Python."""
    name = f"<gradparity {hashlib.blake2b(source.encode(), digest_size=6).hexdigest()}>"
    try:
        code = compile(source, name, "exec")
    except SyntaxError as error:
        raise CaseError(f"the source is no Python: {error}") from error
    _remember(name, source)
    made: dict[str, Any] = {"__name__": "gradparity_program"}
    exec(code, made)
    return made


def body_of(script: Script) -> Body:
    """The function that runs a script; in the float64 reference run the dtypes that it names are widened."""
    made: dict[bool, Body] = {}

    def body(p: Probe) -> None:
        wide = p.is_reference
        if wide not in made:
            made[wide] = namespace(script.wide_source if wide else script.source)["run"]
        made[wide](p)

    return body


def _remember(name: str, source: str) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    _KNOWN[name] = None
    _KNOWN.move_to_end(name)
    while len(_KNOWN) > KEEP:
        linecache.cache.pop(_KNOWN.popitem(last=False)[0], None)
