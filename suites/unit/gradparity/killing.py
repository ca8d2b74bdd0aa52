"""A command that is killed at a moment that a test chooses.

In: the command's words, and after how many judged cases. Out: nothing; the process has ended by SIGKILL.
"""

from __future__ import annotations

import signal
import subprocess
import sys

SCRIPT = """
import os, signal, sys
from gradparity.cli import app
from gradparity.store.store import CaseDone, Store

left, add = int(sys.argv[1]), Store.add

def killed(self, run, entry):
    global left
    add(self, run, entry)
    left -= isinstance(entry, CaseDone)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

Store.add = killed
app(sys.argv[2:])
"""


def killed_after(cases: int, *words: str) -> None:
    """Runs the command until it has written so many cases."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cases), *words], capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
