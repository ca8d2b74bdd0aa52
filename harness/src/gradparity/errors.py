"""Every failure that gradparity itself reports, one class each.

In: what was found and what would help. Out: an exception whose text says what, where, and the way out.
"""

from difflib import get_close_matches


class GradparityError(Exception):
    """Base of all errors raised by the harness itself, never by a program under test."""


class CaseError(GradparityError):
    """A program misuses the Probe: the case is broken, whatever the subject does."""


MOST_NAMES = 20


class UnknownNameError(GradparityError):
    """A subject, corpus or case name that does not exist. It proposes the names that are most like it: of a
    long list it shows no others.

    Arguments: what kind of thing was looked up, the name, the names there are, why it was not found, and how
    such a thing is named that is none of them.
    """

    def __init__(self, what: str, name: str, known: list[str], why: str = "", way_out: str = "") -> None:
        known = list(dict.fromkeys(known))
        self.what, self.name, self.known = what, name, known
        told = [f"unknown {what} {name!r}" + (f": {why}" if why else "")]
        within = [one for one in known if one.startswith(f"{name}:")]  # the functions of a file
        if alike := within or get_close_matches(name, known, n=3):
            told.append(f"  did you mean  {' or '.join(alike)}?")
        if len(known) > MOST_NAMES:
            nearest = get_close_matches(name, known, n=MOST_NAMES // 2, cutoff=0.0)
            told.append(f"  nearest of {len(known)}  {', '.join(nearest)}")
        elif known or not way_out:
            told.append(f"  known  {', '.join(known) or 'none'}")
        if way_out:
            told.append(f"  try    {way_out}")
        super().__init__("\n".join(told))


class UnavailableError(GradparityError):
    """A subject or corpus needs a package that is not installed."""

    def __init__(self, what: str, why: str, way_out: str) -> None:
        super().__init__(f"{what} is not available: {why}\n  try    {way_out}")


class ExpectedFileError(GradparityError):
    """The file of expected divergences cannot be read or lacks a field."""


class CorpusError(GradparityError):
    """A corpus of the user's own that cannot be read."""


class StoreError(GradparityError):
    """A file of results that cannot be used: damaged, of another version, or none at all."""


class StoreFullError(StoreError):
    """Results cannot be written. What was found so far is still in memory."""


class SweepError(GradparityError):
    """An environment with another torch that cannot be made."""


class ReproError(GradparityError):
    """A program or a subject that cannot be written as a script in plain torch."""


class SettingsError(GradparityError):
    """A setting in pyproject.toml, or an option, that has no meaning."""


class CaseTimeout(BaseException):
    """Raised by the alarm inside a program that ran past its time limit; it says how busy the machine was."""
