"""Smaller programs that still diverge alike.

In: a script, the subject, and the comparison that found the divergence. Out: a `Shrunk`.

    question = still_diverges(found, case, subject, device, timeout=30)
    Shrinker(question, seconds=60).shrink(script).script.source

This runs candidates in the calling process, and one that never ends is ended by an alarm only. To run them in
a worker, which may crash or hang, use `gradparity.finds.smaller`, as `gradparity shrink` does.

`shrinker.py` has the passes in their order; each pass only offers cuts. `read.from_source` turns any text
with a `run(p)` into a script that can be shrunk.
"""

from gradparity.shrink.question import still_diverges
from gradparity.shrink.read import from_source
from gradparity.shrink.shrinker import Shrinker, Shrunk

__all__ = ["Shrinker", "Shrunk", "from_source", "still_diverges"]
