"""For which backend does Dynamo trace, and does that backend want eager kept where Dynamo loses it?

In: Dynamo's translator. Out: the answer of the backend itself, behind everything that torch wraps it in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import unimplemented


def keeps_eager(tx: Any) -> bool:
    """Whether the backend has a method ``keeps_eager`` that says so of the user's options."""
    compiler: Any = tx.output.compiler_fn
    options: Mapping[str, Any] = {}
    while True:
        if isinstance(compiler, functools.partial):
            options = compiler.keywords.get("options") or options
            compiler = compiler.func
        elif hasattr(compiler, "_torchdynamo_orig_backend"):
            compiler = compiler._torchdynamo_orig_backend
        elif isinstance(compiler, torch._TorchCompileWrapper):
            options = compiler.kwargs.get("options") or options
            compiler = compiler.compiler_fn
        else:
            asked = getattr(compiler, "keeps_eager", None)
            return asked is not None and bool(asked(options))


def break_graph(what: str, where: str, why: str) -> NoReturn:
    """End the graph before this point, where Python goes on.

    Args:
        what: a heading without details.
        where: the call.
        why: a sentence.

    Raises:
        Unsupported: Dynamo's request for a break; with ``fullgraph`` the user's error.
    """
    hints = ["options={'stock_dynamo': True} leaves it to Dynamo, which differs from eager there."]
    unimplemented(gb_type=what, context=where, explanation=why, hints=hints)
