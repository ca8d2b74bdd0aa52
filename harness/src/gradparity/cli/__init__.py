"""The command line: one file a command.

In: arguments. Out: tables and lines on stdout, files, an exit code as pytest's: 0 fine, 1 unexpected
divergence, unlisted fallback or stale entry, 2 interrupted, 3 results could not be written, 4 wrong usage,
5 nothing ran.
"""

from gradparity.cli.app import app
from gradparity.cli.commands import COMMANDS

__all__ = ["COMMANDS", "app"]
