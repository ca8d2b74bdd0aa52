"""Exceptions: the same type as eager raises, or none where eager raises none.

In: Evidence. Out: a Finding: UNSUPPORTED for a subject that may refuse and says so, CRASH for internal
errors, else DIVERGE.
"""

from __future__ import annotations

import re

from gradparity.oracles.evidence import Evidence
from gradparity.outcome import Raised
from gradparity.verdict import Finding, Verdict

INTERNAL_TYPES = (
    "AssertionError",
    "SystemError",
    "InternalTorchDynamoError",
    "BackendCompilerFailed",
    "InductorError",
)
REFUSAL_TYPES = ("NotImplementedError", "Unsupported", "PrecompileError")
INTERNAL_TEXT = re.compile(r"INTERNAL ASSERT|please report a bug to PyTorch", re.IGNORECASE)
REFUSAL_TEXT = re.compile(
    r"not (?:currently |yet )?(?:be )?support|unsupported|not implemented|graph break",
    re.IGNORECASE,
)
VARYING = re.compile(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\[[^\[\]]*\]")
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


def exceptions(evidence: Evidence) -> Finding | None:
    """Compares what escaped the program."""
    eager, subject = evidence.eager.raised, evidence.subject.raised
    if subject is None:
        if eager is None:
            return None
        reason = f"eager raises {_line(eager)}; subject raises nothing"
        return Finding(Verdict.DIVERGE, "no-exception", reason, _place(eager))
    if eager is None:
        verdict = _unexpected(subject, evidence.may_refuse)
        reason = f"eager raises nothing; subject: {_line(subject)}"
        return Finding(verdict, f"raises {_short(subject)}", reason, _place(subject))
    if eager.type == subject.type:
        evidence.notes.append(f"eager raises {_short(eager)}")
        return None
    reason = f"eager raises {_line(eager)}; subject: {_line(subject)}"
    if _is_internal(subject):
        return Finding(Verdict.CRASH, f"raises {_short(subject)}", reason, _place(subject))
    return Finding(Verdict.DIVERGE, f"raises {_short(subject)} for {_short(eager)}", reason, _place(subject))


def _unexpected(raised: Raised, may_refuse: bool) -> Verdict:
    refuses = any(base.rpartition(".")[2] in REFUSAL_TYPES for base in raised.bases)
    internal = _is_internal(raised)
    if may_refuse and (refuses or (not internal and REFUSAL_TEXT.search(raised.message))):
        return Verdict.UNSUPPORTED
    return Verdict.CRASH if internal else Verdict.DIVERGE


def _is_internal(raised: Raised) -> bool:
    names = {base.rpartition(".")[2] for base in raised.bases}
    return bool(names.intersection(INTERNAL_TYPES)) or bool(INTERNAL_TEXT.search(raised.message))


def _short(raised: Raised) -> str:
    return raised.type.rpartition(".")[2]


def _line(raised: Raised) -> str:
    lines = raised.message.strip().splitlines()
    text = f"{_short(raised)}: {lines[0] if lines else ''}"[:240]
    cause = raised.cause.partition(": ")[2]
    return text if cause in raised.message.partition("\n")[0] else f"{text} {raised.cause}"[:400]


def _place(raised: Raised) -> str:
    """What raised, and its first words, without numbers, quoted names and lists: they differ from program to
    program.
    """
    words = NUMBER.sub("#", VARYING.sub("…", raised.cause))
    return f"{raised.where} {words[:100]}".strip()
