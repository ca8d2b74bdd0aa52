"""settings: what a project sets once, in `[tool.gradparity]` of its pyproject.toml.

In: a folder. Out: `Settings`, from the nearest pyproject.toml at or above it that has the table. Raises
SettingsError for a key or value that has no meaning. An option on the command line goes before a setting.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradparity.errors import SettingsError

TABLE = "gradparity"


class Settings(BaseModel):
    """All settings; None: the command's own default. Paths are relative to the file that names them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    subjects: list[str] | None = None
    corpora: list[str] | None = None
    device: Literal["auto", "cpu", "cuda"] | None = None
    processes: int | None = Field(default=None, ge=0)
    timeout: float | None = Field(default=None, gt=0)
    seed: int | None = Field(default=None, ge=0)
    checks: list[str] | None = None
    store: Path | None = None
    expected: Path | None = None
    executor: Literal["local", "ray"] | None = None
    address: str | None = None
    gpus_per_worker: float | None = Field(default=None, ge=0)
    memory_limit: float | None = Field(default=None, gt=0)


def load(folder: Path) -> Settings:
    """The settings that hold in this folder; none set if no file has the table."""
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        if path.is_file():
            table = _table(path)
            if table is not None:
                return _checked(table, path)
    return Settings()


def _table(path: Path) -> dict[str, Any] | None:
    try:
        tools = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
        found = tools.get(TABLE)
        if found is not None and not isinstance(found, dict):
            raise ValueError(f"tool.{TABLE} is no table")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from error
    return found


def _checked(table: dict[str, Any], path: Path) -> Settings:
    try:
        found = Settings(**table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = ", ".join(Settings.model_fields)
        raise SettingsError(
            f"{path}, [tool.{TABLE}]: {key}: {first['msg']}\n  found  {first['input']!r}\n  known  {known}"
        ) from error
    places = {
        name: path.parent / getattr(found, name) for name in ("store", "expected") if getattr(found, name)
    }
    return found.model_copy(update=places)
