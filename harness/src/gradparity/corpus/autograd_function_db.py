"""The corpus "autograd_function_db": torch's own set of custom autograd Functions, with samples.

In: nothing. Out: an OpInfoCorpus over `torch.testing._internal`'s autograd_function_db.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradparity.corpus.op_info import OpInfoCorpus


def _load() -> Iterable[Any]:
    from torch.testing._internal.autograd_function_db import autograd_function_db

    found: Iterable[Any] = autograd_function_db
    return found


def autograd_function_db() -> OpInfoCorpus:
    """The corpus."""
    return OpInfoCorpus("autograd_function_db", _load)
