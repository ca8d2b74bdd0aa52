"""Subject: one way of running a program's backward.

In: a function to compile, or a backward to wrap. Out: contexts and wrappers; counters and notes about what it
did. What a subclass may override stands in `probe.Way` and `observe.Observed`, and here.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from gradparity.errors import ReproError
from gradparity.observe import Observed
from gradparity.subjects.places import file_of


class Blame(StrEnum):
    """For which divergences a subject answers, if there is a stage of stock torch to compare it with."""

    own = "own"
    """For what that stage does not show as well, observation by observation."""
    only_stock_free = "only-stock-free"
    """For cases in which that stage shows no divergence at all."""
    strict = "strict"
    """For all."""


class Subject(Observed):
    """Runs everything as eager does; the base of all others.

    `bitwise`: promises gradients equal to eager's to the bit. `accountable`: its unexpected divergences
    fail a run; all subjects are accountable but eager and the stages of stock torch that others are compared
    with. `may_refuse`: an error that says "not supported" counts as UNSUPPORTED rather than DIVERGE.
    `own_random`: it draws other random numbers than eager. `stock`: the subject with the same forward and
    torch's own backward, where that forward is not eager's; of a backend, the stage of stock torch before it.
    `stage`: what this subject does that `stock` does not. `answers_for_silent`: it answers for what
    `stock` does wrong, too, if nothing raises: values, layouts, side effects. `rounds_as`: stock torch with
    the same code generator: where a value is as near to float64 as stock's, or both are near to eager's,
    the difference is the generator's. `as_shipped`: the same without a setting that gradparity makes so that
    Inductor draws eager's numbers: a backend without Inductor's code may need none, and it also keeps random
    calls that nothing uses. What agrees without it is no divergence. `place`: where the user's own backend
    is, or a backend's name.
    """

    bitwise: bool = False
    accountable: bool = False
    may_refuse: bool = False
    own_random: bool = False
    stock: Subject | None = None
    answers_for_silent: bool = False
    rounds_as: Subject | None = None
    as_shipped: Subject | None = None
    stage: str = ""
    place: str = ""
    blame: Blame = Blame.own

    def __init__(self, name: str) -> None:
        self.name = name

    def answers_for(self, blame: Blame) -> None:
        """Sets another policy than the subject's own."""
        self.blame = blame
        if blame is Blame.strict:
            self.accountable, self.stock = True, None

    @property
    def file(self) -> Path | None:
        """The user's own file that `script` runs, if there is one."""
        return file_of(self.place)

    @property
    def script(self) -> str:
        """How a user would call it, as Python text: any of the functions `by_subject(target)`,
        `around_backward()` and `around_program()`. Raises ReproError if there is no such way.
        """
        raise ReproError(
            f"subject {self.name} has no form in plain torch\n  try    define Subject.script for it"
        )

    def reset(self, cold: bool) -> None:
        """Forgets what must not leak from one case into the next; everything, if the case is cold."""
