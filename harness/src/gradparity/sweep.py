"""sweep: one script under several versions of torch, each in an environment of its own.

In: a script, versions, a folder for environments. Out: what the script says under each version. An
environment is made once, with venv and pip, and used again: versions other than the one that is pinned may
bring several GB.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from gradparity.errors import SweepError

LIMIT = 300.0
"""Seconds for one script under one version."""

INSTALL_LIMIT = 3600.0
VERSIONS = ("2.9.1", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")

DIFFERS, AGREES = "differs", "agrees"
SAYS = {0: AGREES, 1: DIFFERS}
"""By exit status of the script."""


def default_folder() -> Path:
    """Where environments are kept: with the user's other caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gradparity" / "torch"


def at_hand(folder: Path) -> list[str]:
    """The versions whose environment is there."""
    return [version for version in VERSIONS if (folder / version / "complete").is_file()]


def sweep(
    script: Path, versions: list[str], folder: Path, tell: Callable[[str], None]
) -> Iterator[tuple[str, str]]:
    """Each version with what the script says there. `tell` hears what takes long."""
    for version in versions:
        try:
            python = environment(version, folder, tell)
        except SweepError as error:
            yield version, f"not tried: {str(error).splitlines()[0]}"
            continue
        yield version, said(python, script)


def environment(version: str, folder: Path, tell: Callable[[str], None]) -> Path:
    """The Python of the environment with this torch, made now if it is not there. Raises SweepError."""
    home = folder / version
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    if (home / "complete").is_file():
        return python
    tell(f"making an environment with torch {version} at {home}: this may load several GB")
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(home)])
        _run([str(python), "-m", "pip", "install", "--quiet", f"torch=={version}", "numpy", "expecttest"])
    except (OSError, subprocess.SubprocessError) as error:
        last = getattr(error, "stderr", "") or str(error)
        lines = [line for line in str(last).strip().splitlines() if line.strip()]
        raise SweepError(
            f"cannot install torch {version}: {lines[-1] if lines else error}\n"
            f"  try    pip install torch=={version}"
        ) from error
    (home / "complete").write_text(version)
    return python


def said(python: Path, script: Path) -> str:
    """Runs `script check`: it differs, it agrees, or the last line of what went wrong."""
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [str(python), str(script), "check"],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**settings, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"longer than {LIMIT:g} s"
    lines = [line for line in (done.stdout or done.stderr).strip().splitlines() if line.strip()]
    if done.returncode not in SAYS or "Traceback" in done.stderr:
        last = done.stderr.strip().splitlines()
        return f"fails: {last[-1] if last else f'exit status {done.returncode}'}"[:200]
    detail = f": {lines[-1][:160]}" if done.returncode == 1 and lines else ""
    return SAYS[done.returncode] + detail


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT)
