"""The program itself: its group of commands, their defaults from the project's settings, usage errors.

In: arguments. Out: a typer application without commands; `commands.py` adds them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from gradparity import settings
from gradparity.errors import SettingsError

USAGE_ERROR, NOTHING_RAN = 4, 5
OPTIONS = {
    "subjects": "subject",
    "corpora": "corpus",
    "checks": "check",
    "expected": "expected_file",
}
"""Settings whose option has another name."""


class Group(TyperGroup):
    """Commands whose usage errors exit with pytest's code for them, not with click's 2 (which means
    interrupted here), and whose defaults are the project's settings.
    """

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the program's own arguments."""
        with _usage_code():
            context = super().make_context(*args, **kwargs)
        context.default_map = _defaults(self.commands)
        return context

    def invoke(self, ctx: Any) -> Any:
        """Parses and runs a command."""
        with _usage_code():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main() -> None:
    """Tests the backward of PyTorch against eager: gradients, metadata, hook order, exceptions."""


def _defaults(commands: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By command, the settings as defaults of its options."""
    try:
        found = settings.load(Path.cwd())
    except SettingsError as error:
        sys.stderr.write(f"error: {error}\n")
        raise typer.Exit(USAGE_ERROR) from error
    set_ones = {key: value for key, value in found.model_dump().items() if value is not None}
    named = {OPTIONS.get(key, key): value for key, value in set_ones.items()}
    return {name: _fitting(command, named) for name, command in commands.items()}


def _fitting(command: Any, named: dict[str, Any]) -> dict[str, Any]:
    """The settings as this command takes them: an option that takes one value gets the only one of a list,
    and none if there are several.
    """
    single = {option.name for option in command.params if not getattr(option, "multiple", False)}
    lists = {key: value for key, value in named.items() if key in single and isinstance(value, list)}
    kept = {key: value for key, value in named.items() if key not in lists}
    return kept | {key: value[0] for key, value in lists.items() if len(value) == 1}


@contextmanager
def _usage_code() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if any(base.__name__ in ("UsageError", "NoArgsIsHelpError") for base in type(error).__mro__):
            error.exit_code = USAGE_ERROR  # type: ignore[attr-defined]
        raise
