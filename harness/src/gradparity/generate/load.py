"""load: from a source text to a function that runs.

In: a text with `def run(p)`. Out: that function, from a module of its own. Tracebacks, `inspect` and Dynamo
find the text under the module's name for as long as it is among the last few.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

from gradparity.errors import CaseError
from gradparity.generate.script import Script
from gradparity.probe import Body, Probe

KEEP = 32
"""How many modules stay known by name."""

_KNOWN: OrderedDict[str, str] = OrderedDict()


def namespace(source: str) -> dict[str, Any]:
    """Executes the text as a module and returns its names. Raises CaseError if it is no Python."""
    name = f"gradparity_program_{hashlib.blake2b(source.encode(), digest_size=6).hexdigest()}"
    file = f"<{name}>"
    try:
        code = compile(source, file, "exec")
    except SyntaxError as error:
        raise CaseError(f"the source is no Python: {error}") from error
    module = ModuleType(name)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    sys.modules[name] = module  # Dynamo imports the module of every function that it inlines
    _remember(name, file)
    exec(code, vars(module))
    return vars(module)


def body_of(script: Script) -> Body:
    """The function that runs a script; in the float64 reference run the dtypes that it names are widened."""
    return body_of_sources(script.source, script.wide_source)


def body_of_sources(source: str, wide_source: str) -> Body:
    """The function that runs one text, and in the float64 reference run the other; loaded when first run."""
    made: dict[bool, Body] = {}

    def body(p: Probe) -> None:
        wide = p.is_reference
        if wide not in made:
            made[wide] = namespace(wide_source if wide else source)["run"]
        made[wide](p)

    return body


def _remember(name: str, file: str) -> None:
    _KNOWN[name] = file
    _KNOWN.move_to_end(name)
    while len(_KNOWN) > KEEP:
        old, gone = _KNOWN.popitem(last=False)
        sys.modules.pop(old, None)
        linecache.cache.pop(gone, None)
