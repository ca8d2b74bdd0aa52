"""What rows show in the tests of the report, and the browser that reads it.

Out: `BROWSER`, None where there is none; a table's line, `LEAF`; a pair of `TIMELINES`.
"""

from __future__ import annotations

import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
WITHOUT = f"none of {', '.join(NAMES)} is installed"
LEAF = {
    "what": "grad x", "dtype": "float32", "size": 2.0, "off": 0.5, "eager": 1e-7,
    "subject": 0.5, "allowed": 1e-5, "judged": "DIVERGE",
}  # fmt: skip
TIMELINES = {
    "eager": ["tensor b (1)", "tensor a (2)"],
    "subject": ["tensor a (2)", "tensor b (1)"],
    "differ": [0, 1],
}
