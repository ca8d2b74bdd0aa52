"""The reference: plain eager PyTorch.

In: nothing. Out: the subject "eager", which promises equality with itself.
"""

from __future__ import annotations

from gradparity.subjects.base import Subject


class Eager(Subject):
    """Eager itself."""

    bitwise = True
    script = ""
