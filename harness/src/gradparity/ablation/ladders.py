"""Ladders: by subject, the subjects that do more and more of what it does.

In: a subject's name. Out: rungs, the least first, the subject itself last. The first rung that diverges
names the stage that breaks the case.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """One subject of a ladder, and what it does that the rung before does not."""

    stage: str
    subject: str


COMPILE = (
    Rung("dynamo", "compile:eager"),
    Rung("aot_eager", "compile:aot_eager"),
    Rung("aot_eager_decomp_partition", "compile:aot_eager_decomp_partition"),
    Rung("inductor", "compile:inductor"),
)
COMPILED_AUTOGRAD = (
    Rung("capture", "stock-ca:eager"),
    Rung("aot_eager", "stock-ca:aot_eager"),
    Rung("aot_eager_decomp_partition", "stock-ca:aot_eager_decomp_partition"),
    Rung("inductor", "stock-ca:inductor"),
)
LIVE = (
    Rung("capture and order", "retrograd-live:eager"),
    Rung("lowering", "retrograd-live:aten"),
    Rung("backend", "retrograd-live:inductor"),
)
STEP = (Rung("aot_eager", "stock-step:aot_eager"), Rung("inductor", "stock-step:inductor"))
PRECOMPILE = (Rung("precompile", "stock-precompile:eager"), Rung("inductor", "stock-precompile:inductor"))
AHEAD = (Rung("capture", "retrograd-aot:eager"), Rung("backend", "retrograd-aot:inductor"))
BACKEND = (
    Rung("dynamo", "compile:eager"),
    Rung("capture", "retrograd-compile:eager"),
    Rung("backend", "retrograd-compile:inductor"),
)
FLAGS = {"regions": "regions", "cudagraphs": "CUDA graphs"}


def ladder(subject: str) -> tuple[Rung, ...]:
    """The rungs of a subject; of one that nothing is known about, only itself."""
    form, _, rest = subject.partition(":")
    plain, *flags = rest.split("+")
    if form in ("compile", "stock-compile", "stock-strict"):
        return _up_to(COMPILE, plain, subject)
    if form == "stock-ca":
        return _up_to(COMPILED_AUTOGRAD, plain, subject)
    if form in ("stock-step", "stock-precompile"):
        return _up_to(STEP if form == "stock-step" else PRECOMPILE, plain, subject)
    if form in ("retrograd-live", "retrograd-aot"):
        below = _up_to(LIVE if form == "retrograd-live" else AHEAD, plain, f"{form}:{plain}")
        return below + _flagged(f"{form}:{plain}", flags)
    if form.startswith("retrograd-live+") and form != "retrograd-live+retrograd-aot":
        forward = form.partition("+")[2]
        return (*_up_to(COMPILE, forward, f"compile:{forward}"), Rung("backward", subject))
    if form.startswith("retrograd-compile"):
        return _up_to(BACKEND, plain, f"retrograd-compile:{plain}") + _own(form, subject)
    return (Rung("subject", subject),)


def _up_to(rungs: tuple[Rung, ...], backend: str, subject: str) -> tuple[Rung, ...]:
    """The rungs up to this backend; all but the last before a backend that is not among them."""
    backends = [rung.subject.partition(":")[2] for rung in rungs]
    if backend in backends:
        below = rungs[: len(backends) - 1 - backends[::-1].index(backend)]
        return (*below, Rung(rungs[len(below)].stage, subject))
    return (*rungs[:-1], Rung(backend, subject))


def _flagged(subject: str, flags: list[str]) -> tuple[Rung, ...]:
    made: list[Rung] = []
    for flag in flags:
        subject = f"{subject}+{flag}"
        made.append(Rung(FLAGS.get(flag, flag), subject))
    return tuple(made)


def _own(form: str, subject: str) -> tuple[Rung, ...]:
    return () if form == "retrograd-compile" else (Rung(form.partition("+")[2], subject),)
