"""Backwards that belong to a compiled callable, wherever and whenever they run.

In: the outputs of a call, and the session of the callable that made it. Out: later, for the roots of a
backward, that session. A mark is left on the autograd nodes of the outputs, where it lives as long as they
do; a backward belongs to the callable whose mark is met first below its roots.

This is how ``retrograd.compile`` compiles a backward that runs long after the call, in any thread, without
a setting for the whole process: backwards that meet no mark run as if nothing were there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from retrograd._torch import pytree
from retrograd._torch.autograd import EngineRequest, edge_of
from retrograd.live.session import Session

_MARK = "retrograd.session"

#: sessions whose callables are alive; without any, no graph is searched.
_living: set[Session] = set()


def begin_claims(session: Session) -> None:
    """From here on, backwards that meet the mark of `session` belong to it."""
    _living.add(session)


def end_claims(session: Session) -> None:
    """Its callable is gone: graphs that it left run as if it had not been."""
    _living.discard(session)


def has_claims() -> bool:
    """Whether a callable is alive whose backwards are compiled."""
    return bool(_living)


def claim(outputs: Any, session: Session) -> None:
    """Leave the mark of `session` on the nodes of all tensors in `outputs`, unless they have one."""
    for output in pytree.tree_leaves(outputs):
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            node: Any = output.grad_fn
            node.metadata.setdefault(_MARK, session)


def claimant(request: EngineRequest) -> Session | None:
    """The session to which a backward belongs; None if it meets no mark of a living callable."""
    if not _living:
        return None
    for node in _nodes(request.tensors):
        session = node.metadata.get(_MARK)
        if session is not None and session in _living:
            found: Session = session
            return found
    return None


def _nodes(roots: Iterable[Any]) -> Iterable[Any]:
    """The nodes below the roots, nearest first."""
    seen = dict.fromkeys(edge_of(root)[0] for root in roots)
    nodes = list(seen)
    for node in nodes:  # grows while it is read
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen[below] = None
                nodes.append(below)
