"""Evidence: what every oracle looks at, and the pairing of eager's observations with the subject's.

In: outcomes. Out: `Pair`s of corresponding leaves, with a label that a reader can follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from gradparity.outcome import HookEvent, Outcome, Payload


@dataclass(frozen=True)
class Reference:
    """The float64 run, or why there is none."""

    outcome: Outcome | None
    why_not: str = ""


@dataclass(frozen=True)
class Pair:
    """Two corresponding leaves of observations (no tuples unless their lengths differ). `role`: grad,
    value, state or event.
    """

    label: str
    role: str
    eager: Payload
    subject: Payload

    @property
    def place(self) -> str:
        """The label without what differs from program to program: names, digits and positions."""
        kind = self.label.split()[2] if self.role == "event" else ""
        return f"{self.role} {kind}".strip()


@dataclass
class Evidence:
    """One case under one subject.

    `reference` is called at most once, and only when bits differ. `own_random`: the subject draws random
    numbers of its own, so that only what holds for any numbers is compared. `rounds_to`: a dtype of lower
    precision that is used inside; without a reference, tensors may differ as those of this dtype may. `notes`
    collects remarks that are no findings.
    """

    eager: Outcome
    subject: Outcome
    bitwise: bool
    may_refuse: bool = False
    own_random: bool = False
    rounds_to: torch.dtype | None = None
    reference: Callable[[], Reference] = lambda: Reference(None, "not run")
    notes: list[str] = field(default_factory=list)

    @property
    def other_numbers(self) -> bool:
        """Whether values may differ because the program drew random numbers and the subject draws its own."""
        return self.own_random and (self.eager.drew or self.subject.drew)

    @cached_property
    def same_events(self) -> bool:
        """Whether both saw the same sites and kinds in the same order."""
        return sequence(self.eager.events) == sequence(self.subject.events)

    @cached_property
    def pairs(self) -> list[Pair]:
        """All corresponding leaves; events only if their sequences are equal."""
        return list(_pairs(self.eager, self.subject, self.same_events))

    @cached_property
    def reference_leaves(self) -> dict[str, Payload]:
        """The float64 run's leaves by label; empty if there is no such run."""
        outcome = self._reference.outcome
        if outcome is None:
            return {}
        return {pair.label: pair.eager for pair in _pairs(outcome, outcome, True)}

    @property
    def why_no_reference(self) -> str:
        """Why there is no float64 run; empty if there is one."""
        return self._reference.why_not

    @cached_property
    def _reference(self) -> Reference:
        found = self.reference()
        raised = found.outcome.raised if found.outcome is not None else None
        if raised is not None and self.eager.raised is None:
            return Reference(None, f"float64 raises {raised.type}")
        return found


def sequence(events: tuple[HookEvent, ...]) -> list[tuple[str, str]]:
    """Sites and kinds, in order."""
    return [(event.site, event.kind) for event in events]


def _pairs(eager: Outcome, subject: Outcome, with_events: bool) -> Iterator[Pair]:
    theirs = {grad.name: grad.value for grad in subject.grads}
    for grad in eager.grads:
        yield from _leaves(f"grad {grad.name}", "grad", grad.value, theirs.get(grad.name))
    for place, (ours, other) in enumerate(zip(eager.values, subject.values, strict=False)):
        yield from _leaves(f"value {ours.name} ({place})", "value", ours.value, other.value)
    states = {item.name: item.value for item in subject.state}
    for item in eager.state:
        if item.name in states:
            yield from _leaves(f"state {item.name}", "state", item.value, states[item.name])
    if with_events:
        for place, (one, two) in enumerate(zip(eager.events, subject.events, strict=True)):
            yield from _leaves(f"event {place} {one.kind} {one.site}", "event", one.payload, two.payload)


def _leaves(label: str, role: str, eager: Payload, subject: Payload) -> Iterator[Pair]:
    if isinstance(eager, tuple) and isinstance(subject, tuple) and len(eager) == len(subject):
        for place, (one, two) in enumerate(zip(eager, subject, strict=True)):
            yield from _leaves(f"{label}[{place}]" if len(eager) > 1 else label, role, one, two)
    else:
        yield Pair(label, role, eager, subject)
