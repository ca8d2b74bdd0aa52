"""Errors that a program may raise in eager on purpose: they are part of the specification, and compared.

In: an exception's record, and the names that a script intends. Out: whether the exception is one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradparity.outcome import Raised

INTENDED = {
    "version": "modified by an inplace operation|a leaf Variable that requires grad"
    "|view .*being modified inplace|is a view and .* modified inplace"
    "|unsupported operation: (?:some elements|the input tensor)",
    "freed": "backward through the graph a second time|graph has already been freed",
    "count": "returned an incorrect number of gradients",
    "shape": "returned an invalid gradient|expected .* but got|Function .* returned",
    "unused": "not have been used in the graph|does not require grad",
    "leaf": "A leaf node was passed to _will_engine_execute_node",
    "raised": "on purpose",
    "double": "once_differentiable|not differentiable|derivative .* is not implemented|not implemented"
    "|does not require grad",
    "views": "returns multiple views|is the output of a function that returns|view \\+ inplace",
}
"""By name, what the text of such an error contains."""


def is_intended(raised: Raised, names: Iterable[str]) -> bool:
    """Whether one of the named errors is this one."""
    return any(re.search(INTENDED[name], raised.message) for name in names)
