"""The corpus "hop_db": torch's own samples of higher-order operators that can be differentiated.

In: nothing. Out: an OpInfoCorpus over `torch.testing._internal`'s hop_db: what has samples of float32 on this
machine's devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradparity.corpus.op_info import OpInfoCorpus


def _load() -> Iterable[Any]:
    from torch.testing._internal.hop_db import hop_db

    found: Iterable[Any] = hop_db
    return found


def hop_db() -> OpInfoCorpus:
    """The corpus."""
    return OpInfoCorpus("hop_db", _load)
