"""Cut: what a pass of the shrinker offers.

In: nothing. Out: the type of a cut, a function that gives the smaller script; and that of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradparity.generate.script import Script

Cut = Callable[[], Script]
Pass = Callable[[Script], Iterable[Cut]]
