"""parity: a function or module of yours, eager against subjects, without a corpus and without pytest.

In: a function or module, its inputs, which hooks to watch. Out: rows; or, from `assert_parity`, an
AssertionError that says what differs.

    gradparity.assert_parity(model, (torch.randn(4, 8),), subject="compile:inductor")
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.corpus.cotangents import backward_from
from gradparity.corpus.fresh import differentiable, fresh
from gradparity.differential import Comparison
from gradparity.errors import CaseError
from gradparity.exhibit import timelines
from gradparity.probe import Body, Probe
from gradparity.report import STOCKS_OWN
from gradparity.subjects.registry import resolve
from gradparity.verdict import Row, Verdict
from gradparity.work import compared, quiet

DEFAULT_SUBJECT = "compile:inductor"

Hook = Callable[[torch.Tensor], torch.Tensor | None]
Hooks = bool | Iterable[str] | Mapping[str, Hook | None]


class ParityError(AssertionError):
    """A subject does otherwise than eager; the text says what."""


@dataclass(frozen=True)
class Target:
    """What is checked. `inputs`: a tuple of arguments, a dictionary of keyword arguments, or one argument.
    `hooks`: the leaves on which a hook is watched, "input 0" or "m.weight"; True: all; a dictionary also says
    what a hook returns. `name` and `seed` are the case's.
    """

    fn: Any
    inputs: Any = ()
    hooks: Hooks = False
    name: str = ""
    seed: int = 0
    checks: tuple[str, ...] = field(default=())

    @property
    def case(self) -> Case:
        """The case that rows name."""
        return Case(
            "check", self.name or getattr(self.fn, "__name__", type(self.fn).__name__), None, self.seed
        )


def check(
    fn: Any, inputs: Any = (), *, subjects: Iterable[str] = (DEFAULT_SUBJECT,), **more: Any
) -> list[Row]:
    """Runs the function or module under each subject and returns a row for each.

    Arguments: as `Target` says; `device` besides. A module is copied for each run.
    """
    device = torch.device(more.pop("device", "cpu"))
    target = Target(fn, inputs, **more)
    return [_compared(target, name, device)[0] for name in subjects]


def assert_parity(fn: Any, inputs: Any = (), *, subject: str = DEFAULT_SUBJECT, **more: Any) -> Row:
    """The same for one subject. Raises ParityError if it diverges, or the case cannot be judged."""
    device = torch.device(more.pop("device", "cpu"))
    row, found = _compared(Target(fn, inputs, **more), subject, device)
    if row.verdict is not Verdict.AGREE:
        raise ParityError(explained(row, found))
    return row


def explained(row: Row, found: Comparison | None) -> str:
    """A row in several lines, with both timelines where the hooks differ."""
    lines = [f"{row.verdict}: {row.subject} and eager differ in {row.case}: {row.symptom}", f"  {row.reason}"]
    lines += [f"  {STOCKS_OWN}: it is {row.where}"] if row.stocks_own else []
    lines += [f"  note: {note}" for note in row.notes]
    if row.verdict is Verdict.HOOK_ORDER and found is not None and found.evidence is not None:
        shown = timelines(found.evidence)
        for place in range(max(len(shown["eager"]), len(shown["subject"]))):
            one, two = (
                shown[side][place] if place < len(shown[side]) else "—" for side in ("eager", "subject")
            )
            lines.append(f"  {'>>' if place in shown['differ'] else '  '} {place:>3}  {one:<50}  {two}")
    return "\n".join(lines)


def _compared(target: Target, name: str, device: torch.device) -> tuple[Row, Comparison | None]:
    quiet()
    program = Program(target.case, _body(target))
    subject = resolve(name)
    found = compared(program, subject, device, target.checks)
    return found.row, found


def _body(target: Target) -> Body:
    def run(p: Probe) -> None:
        module = isinstance(target.fn, torch.nn.Module)
        fn = p.module(copy.deepcopy(target.fn)) if module else target.fn
        args, kwargs = fresh(_arguments(target.inputs), p)
        for place, leaf in enumerate(differentiable((args, kwargs))):
            p.leaf(f"input {place}", leaf)
        _hang(target, p)
        outputs = p.compile(fn)(*args, **kwargs)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(outputs)):
            raise CaseError(
                f"{target.case.address}: it returned no tensor\n  found  {type(outputs).__name__}"
            )
        if not dict(p.leaves()):
            raise CaseError(
                f"{target.case.address}: nothing requires grad, so no gradient would be compared\n"
                "  try    requires_grad=True for an input"
            )
        backward_from(outputs, p)

    return run


def _hang(target: Target, p: Probe) -> None:
    """Puts a recording hook on each leaf that is to be watched."""
    leaves = dict(p.leaves())
    wanted = leaves if target.hooks is True else (target.hooks or ())
    unknown = sorted(set(wanted) - set(leaves))
    if unknown:
        raise CaseError(
            f"{target.case.address}: no leaf {unknown[0]!r} to hook\n  known  {', '.join(leaves)}"
        )
    for name in wanted:
        does = target.hooks[name] if isinstance(target.hooks, Mapping) else None
        leaves[name].register_hook(p.hook(name, does))
        leaves[name].register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}
