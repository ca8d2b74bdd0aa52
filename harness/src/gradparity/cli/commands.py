"""All commands, in the order in which help lists them.

In: nothing. Out: the application with its commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradparity.cli.app import app
from gradparity.cli.conform import conform
from gradparity.cli.demo import demo
from gradparity.cli.doctor import doctor
from gradparity.cli.fuzz import fuzz
from gradparity.cli.issue import issue, sweep
from gradparity.cli.listing import corpora, list_, subjects
from gradparity.cli.run import run
from gradparity.cli.show import show
from gradparity.cli.shrink import shrink
from gradparity.cli.stores import merge, replay, report

COMMANDS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "run": run,
    "conform": conform,
    "fuzz": fuzz,
    "show": show,
    "replay": replay,
    "shrink": shrink,
    "report": report,
    "issue": issue,
    "sweep": sweep,
    "merge": merge,
    "list": list_,
    "subjects": subjects,
    "corpora": corpora,
    "doctor": doctor,
}

for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
