"""What commands share: options, the console, and how an error reaches the user.

In: values from the command line. Out: annotated types for parameters; contexts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from gradparity.checks.registry import MEANINGS
from gradparity.cli import completion
from gradparity.cli.app import USAGE_ERROR
from gradparity.corpus import registry as corpora
from gradparity.errors import GradparityError, StoreFullError, UnknownNameError
from gradparity.subjects.base import Blame
from gradparity.subjects.registry import full_name

PIPE_WIDTH = 140
WRITE_ERROR = 3


class Device(StrEnum):
    """Where programs run; auto is a GPU if there is one."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def _full_names(given: list[str] | str | None) -> list[str] | str | None:
    try:
        return [full_name(name) for name in given] if isinstance(given, list) else given and full_name(given)
    except UnknownNameError as error:
        raise typer.BadParameter(str(error)) from error


NAMES = "a subject's name, or a backend's: registered, MODULE:FUNCTION or FILE.py:FUNCTION"
Subjects = Annotated[
    list[str],
    typer.Option(
        "--subject",
        "-s",
        help=f"{NAMES}; repeatable",
        autocompletion=completion.subject,
        callback=_full_names,
    ),
]
_SUBJECT = typer.Option(
    "--subject", "-s", help=NAMES, autocompletion=completion.subject, callback=_full_names
)
Subject = Annotated[str, _SUBJECT]
OneSubject = Annotated[str | None, _SUBJECT]
Corpora = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus",
        "-c",
        help="a corpus's name; repeatable; default: all float32",
        autocompletion=completion.corpus,
    ),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="where programs run")]
Timeout = Annotated[float, typer.Option(min=0.1, help="seconds for one case")]
Seed = Annotated[int, typer.Option(min=0, help="decides all inputs")]
Shuffle = Annotated[int | None, typer.Option(min=0, help="decides the order of the cases")]
Processes = Annotated[int, typer.Option("-n", "--processes", min=0, help="worker processes; 0: none")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write one JSON line per case")]
HtmlFile = Annotated[Path | None, typer.Option("--report", help="write a self-contained HTML report")]
JunitFile = Annotated[Path | None, typer.Option("--junit", help="write JUnit XML")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="at most so many cases, spread evenly over the corpus")
]
MatchOption = Annotated[
    list[str] | None,
    typer.Option(help="only cases that match: NAME, CORPUS::NAME or CORPUS::NAME::INDEX; repeatable"),
]
ExpectedFile = Annotated[
    Path | None, typer.Option("--expected", help="TOML file of known divergences and fallbacks")
]
StoreFile = Annotated[
    Path | None, typer.Option("--store", help="keep results in this file; an unfinished run goes on there")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="run rows of the store that import modules, files or folders by name")
]
ShardOption = Annotated[str | None, typer.Option("--shard", help="only the i-th of n parts: i/n")]
Fresh = Annotated[bool, typer.Option("--fresh", help="a new process for every case")]
MemoryLimit = Annotated[
    float | None, typer.Option("--memory-limit", min=0.1, help="GiB that a worker may hold")
]
Checks = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        help=f"check more of cases that agree; repeatable. {'; '.join(map(': '.join, MEANINGS.items()))}",
        autocompletion=completion.check,
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="every divergence fails, stock's own as well")]
OnlyStockFree = Annotated[
    bool,
    typer.Option("--only-stock-free", help="fail only for cases in which stock agrees with eager"),
]
Ablate = Annotated[bool, typer.Option("--ablate", help="say which stage breaks a case that diverges")]
ExecutorOption = Annotated[str, typer.Option("--executor", help="where workers run: local or ray")]
Address = Annotated[str | None, typer.Option("--address", help="address of the Ray cluster")]
GpusPerWorker = Annotated[
    float, typer.Option("--gpus-per-worker", min=0.0, help="share of a GPU for each Ray worker")
]


def blame(strict: bool, only_stock_free: bool) -> Blame:
    """The policy that is meant; the stricter one, if it is both."""
    if strict:
        return Blame.strict
    return Blame.only_stock_free if only_stock_free else Blame.own


def console() -> Console:
    """As wide as the terminal; wide enough for the tables where output goes to a file or pipe."""
    made = Console()
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made


def device_name(device: Device) -> str:
    """The device that is meant. Raises UnknownNameError for a GPU that is not there."""
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise UnknownNameError("device", "cuda", ["cpu"])
    return device.value


def tell_unmatched(match: Iterable[str] | None, names: Iterable[str]) -> None:
    """Says which globs match no case of these corpora, and what they may have meant."""
    for error in corpora.unmatched(match or (), names):
        typer.echo(f"nothing matches: {error}", err=True)


def standard_error(shown: Console) -> Console:
    """Where errors go, as wide as what is shown."""
    return Console(stderr=True, width=shown.width)


@contextmanager
def errors(shown: Console) -> Iterator[None]:
    """Errors of the harness become one line (and the way out) and an exit code."""
    try:
        yield
    except GradparityError as error:
        standard_error(shown).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        code = WRITE_ERROR if isinstance(error, StoreFullError) else USAGE_ERROR
        raise typer.Exit(code) from error
