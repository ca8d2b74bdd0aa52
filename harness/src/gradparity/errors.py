"""Every failure that gradparity itself reports, one class each.

In: what was found and what would help. Out: an exception whose text says what, where, and the way out.
"""

from difflib import get_close_matches


class GradparityError(Exception):
    """Base of all errors raised by the harness itself, never by a program under test."""


class CaseError(GradparityError):
    """A program misuses the Probe: the case is broken, whatever the subject does."""


class UnknownNameError(GradparityError):
    """A subject, corpus or case name that does not exist. It proposes the names that are most like it.

    Arguments: what kind of thing was looked up, the name, the names there are, and why it was not found.
    """

    def __init__(self, what: str, name: str, known: list[str], why: str = "") -> None:
        self.what, self.name, self.known = what, name, known
        shown = ", ".join(known[:20]) + (f", … ({len(known)} in all)" if len(known) > 20 else "")
        told = [f"unknown {what} {name!r}" + (f": {why}" if why else "")]
        if alike := get_close_matches(name, known, n=3):
            told.append(f"  did you mean  {' or '.join(alike)}?")
        super().__init__("\n".join([*told, f"  known  {shown or 'none'}"]))


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
