"""`gradparity list`, `subjects` and `corpora`: what there is.

In: names. Out: lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from gradparity.case import EVERY, Case, Match
from gradparity.cli import options
from gradparity.corpus import coverage
from gradparity.corpus import registry as corpora_registry
from gradparity.corpus.scenario import registered
from gradparity.subjects import registry as subjects_registry

Samples = Annotated[bool, typer.Option(help="list every sample of sampled corpora, not only the names")]
Areas = Annotated[
    bool, typer.Option("--areas", help="count the scenarios that show each part of a live backward")
]


def list_(
    corpus: options.Corpora = None,
    subjects_only: Annotated[bool, typer.Option("--subjects", help="list subjects instead of cases")] = False,
    samples: Samples = False,
    areas: Areas = False,
    match: options.MatchOption = None,
) -> None:
    """Lists cases, one address per line (for sampled corpora the part before the index), or subjects.

    \b
    Examples:
      gradparity list -c scenarios --match '*dropout*'
      gradparity list -c op_db --samples --match 'op_db::add' --match 'op_db::mul'
    """
    with options.errors(options.console()):
        if areas:
            for area, names in coverage.by_area(registered()).items():
                typer.echo(f"{len(names):>5}  {area}")
        elif subjects_only:
            subjects()
        else:
            names = corpus or list(corpora_registry.NAMED)
            options.tell_unmatched(match, names)
            for name in names:
                for address in _addresses(name, Match(tuple(match or EVERY)), samples):
                    typer.echo(address)


def subjects() -> None:
    """Lists the subjects: names, and forms that take a name of yours. Of some it says which torch has them.

    \b
    Example:
      gradparity subjects
    """
    forms = (f"{form:<24} {text}" for form, text in subjects_registry.FORMS.items())
    for line in [*subjects_registry.listed(), *forms]:
        typer.echo(line)


def corpora() -> None:
    """Lists the corpora, what other packages provide (entry points "gradparity.corpora"), and forms.

    \b
    Example:
      gradparity corpora
    """
    forms = (f"{form:<24} {text}" for form, text in corpora_registry.FORMS.items())
    for line in [*corpora_registry.NAMED, *corpora_registry.provided(), *forms]:
        typer.echo(line)


def _addresses(name: str, match: Match, samples: bool) -> Iterator[str]:
    found = corpora_registry.corpus(name)
    for chunk in found.chunks():
        if not match.takes_chunk(name, chunk):
            continue
        if not samples:
            yield Case(name, chunk).address
            continue
        for program in found.programs(chunk, torch.device("cpu"), 0):
            if match.takes(program.case):
                yield program.case.address
