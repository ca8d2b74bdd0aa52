"""Which operator first gives another value: hashes of what every ATen call returns, in eager and under a
subject whose graphs are interpreted call by call.

In: a program and a subject. Out: the first call of eager whose result the subject never has, with the
phase, and the first call of the subject that makes of eager's values what eager never has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gradparity.corpus.base import Program
from gradparity.observe import observe
from gradparity.outcome import fingerprint, snapshot
from gradparity.subjects.base import Subject
from gradparity.subjects.eager import Eager

UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.detach", "aten.lift_fresh", "prim")
"""Calls whose results nobody wrote yet, or that are no computation."""


@dataclass(frozen=True)
class Call:
    """One ATen call: its name, whether a backward made it, hashes of the tensors it took and gave."""

    name: str
    phase: str
    taken: tuple[str, ...]
    given: tuple[str, ...]

    def describe(self) -> str:
        """ "aten.mul.Tensor in the backward"."""
        return f"{self.name} in the {self.phase}"


@dataclass
class Recorder(TorchDispatchMode):
    """Records every call on real tensors. Compilers are not disturbed: they compile as without it."""

    supports_higher_order_operators = True
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = object.__hash__

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """So that Dynamo does not skip what it finds under this mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the call and notes it."""
        taken = _hashes((args, kwargs))
        out = func(*args, **(kwargs or {}))
        given = _hashes(out)
        if taken is not None and given and not _is_bookkeeping(func):
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            self.calls.append(Call(str(func), phase, taken, given))
        return out


@dataclass(frozen=True)
class Parting:
    """Where two runs part: eager's call whose result is missing, the subject's call that made another.
    `is_seen`: whether a call of the subject computes from the same values; a kernel that is no ATen call
    leaves only eager's call.
    """

    eager: Call | None
    subject: Call | None
    is_seen: bool = True

    @property
    def operator(self) -> str:
        """The name to file the case under."""
        call = self.eager or self.subject
        return f"{call.name} ({call.phase})" if call is not None else ""


def parting(program: Program, subject: Subject, device: torch.device) -> Parting:
    """Runs both under a recorder and compares. Both calls are None if no value differs."""
    eager = recorded(program, Eager("eager"), device)
    subject.reset(cold=True)
    return compare_calls(eager, recorded(program, subject, device))


def recorded(program: Program, subject: Subject, device: torch.device) -> list[Call]:
    """The calls of one run."""
    with Recorder() as recorder:
        observe(program.case, program.body, subject, torch.float32, device)
    return recorder.calls


def compare_calls(eager: list[Call], subject: list[Call]) -> Parting:
    """The first call of either side whose result the other never has; rather one of which it has all that the
    call took.
    """
    made_by_eager = {value for call in eager for value in (*call.taken, *call.given)}
    made_by_subject = {value for call in subject for value in (*call.taken, *call.given)}
    lacked, made = _first_missing(eager, made_by_subject), _first_missing(subject, made_by_eager)
    if lacked is None:
        return Parting(None, made, made is not None and made_by_eager.issuperset(made.taken))
    beside = [call for call in subject if (call.taken, call.phase) == (lacked.taken, lacked.phase)]
    return Parting(lacked, made, any(not set(call.given).issubset(call.taken) for call in beside))


def _first_missing(calls: list[Call], others: set[str]) -> Call | None:
    missing = [call for call in calls if not others.issuperset(call.given)]
    return next((call for call in missing if others.issuperset(call.taken)), next(iter(missing), None))


def _hashes(tree: Any) -> tuple[str, ...] | None:
    """A hash of each tensor; None if one is no real tensor, as while a compiler traces."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    if any(isinstance(t, FakeTensor) or torch._is_functional_tensor(t) or t.is_meta for t in tensors):
        return None
    with torch._C._DisableTorchDispatch():
        return tuple(fingerprint(snapshot(tensor)) for tensor in tensors)


def _is_bookkeeping(func: Any) -> bool:
    """Whether the call computes nothing: a view, or memory that is still to be written."""
    if str(func).startswith(UNWRITTEN):
        return True
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    return any(item.alias_info is not None and not item.alias_info.is_write for item in returns)
