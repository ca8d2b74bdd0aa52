"""The version of this package, for ``retrograd.__version__`` and the files that we write."""

from __future__ import annotations

VERSION = "0.1.0"
