"""completion: the values that a shell offers for an option.

In: what is typed so far. Out: names that begin so, of subjects, corpora, policies and checks.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradparity.checks.registry import CHECKS
from gradparity.corpus import registry as corpora
from gradparity.generate.policies import POLICIES
from gradparity.subjects import registry as subjects

COMPILERS = ("compile:aot_eager", "compile:inductor", "compile:eager")
"""Subjects with a backend in their name that most people mean."""


def subject(incomplete: str) -> list[str]:
    """Subjects with a name of their own, and torch.compile with its usual backends."""
    return _beginning((*COMPILERS, *subjects.NAMED), incomplete)


def corpus(incomplete: str) -> list[str]:
    """Corpora of this package, and those that other packages provide."""
    return _beginning((*corpora.NAMED, *corpora.provided()), incomplete)


def policy(incomplete: str) -> list[str]:
    """Policies of generation."""
    return _beginning(POLICIES, incomplete)


def check(incomplete: str) -> list[str]:
    """Checks, and "all"."""
    return _beginning((*CHECKS, "all"), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
