"""`gradparity doctor`: what works on this machine.

In: nothing. Out: a line for each thing that a campaign may need, and 0 if all that is necessary is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import typer

from gradparity.case import Case
from gradparity.cli import options
from gradparity.corpus.base import Program
from gradparity.differential import compare
from gradparity.probe import Probe
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict
from gradparity.versions import versions


@dataclass(frozen=True)
class Examined:
    """One thing: whether it works, whether it must, what there is to say."""

    name: str
    works: bool
    needed: bool
    detail: str


def doctor() -> None:
    """Checks this installation: eager against itself, Dynamo, Inductor and its compiler, extras.

    \b
    Example:
      gradparity doctor
    """
    console = options.console()
    for name, value in versions().items():
        console.print(f"{name:<12} {value}", markup=False)
    worst = 0
    for examine in EXAMINATIONS:
        item = examine()
        mark = "ok" if item.works else ("FAILS" if item.needed else "absent")
        console.print(f"{mark:<7} {item.name:<28} {item.detail}", markup=False, soft_wrap=True)
        worst = max(worst, int(item.needed and not item.works))
    raise typer.Exit(worst)


def small(p: Probe) -> None:
    """A matrix product, a hook, a backward."""
    x = p.leaf("x", p.randn(3, 3, requires_grad=True))
    x.register_hook(p.hook("x"))
    y = p.compile(lambda x: (x @ x).tanh())(x)
    with p.backward():
        y.sum().backward()


def _subject(name: str, needed: bool) -> Callable[[], Examined]:
    def examine() -> Examined:
        row = compare(Program(Case("doctor", "small"), small), resolve(name), torch.device("cpu")).row
        return Examined(
            f"subject {name}", row.verdict is Verdict.AGREE, needed, row.reason or str(row.verdict)
        )

    return examine


def _package(name: str, way_out: str) -> Callable[[], Examined]:
    def examine() -> Examined:
        there = find_spec(name) is not None
        return Examined(f"package {name}", there, False, "" if there else way_out)

    return examine


def _compiler() -> Examined:
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")
    return Examined("C++ compiler", bool(found), False, found or "Inductor on CPU needs one")


def _gpu() -> Examined:
    there = torch.cuda.is_available()
    return Examined(
        "GPU", there, False, torch.cuda.get_device_name(0) if there else "programs run on the CPU"
    )


EXAMINATIONS: tuple[Callable[[], Examined], ...] = (
    _subject("eager", needed=True),
    _subject("compile:aot_eager", needed=True),
    _compiler,
    _subject("compile:inductor", needed=False),
    _gpu,
    _package("plotly", "pip install gradparity brings it; the HTML report needs it"),
    _package("pytest", "pip install pytest, for the fixture"),
    _package("transformers", "pip install 'gradparity[models]', for the corpus models"),
    _package("ray", "pip install 'gradparity[ray]', for several machines"),
)
