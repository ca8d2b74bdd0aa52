"""The corpora "op_db", "op_db:float64", "op_db_cotangents", …: every differentiable operator that torch
tests, with torch's own samples.

In: a dtype. Out: an OpInfoCorpus over `torch.testing._internal`'s op_db.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradparity.corpus.op_info import OpInfoCorpus


def _load() -> Iterable[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    found: Iterable[Any] = op_db
    return found


def op_db(dtype: torch.dtype = torch.float32, layouts: bool = False) -> OpInfoCorpus:
    """The corpus of this dtype; with `layouts`, that of several layouts of cotangents."""
    return OpInfoCorpus("op_db", _load, dtype, layouts)
