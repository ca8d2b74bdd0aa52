"""The version of this package: what ``retrograd.__version__`` and files say."""

from __future__ import annotations

VERSION = "0.1.0"
