"""tidy: drops what libraries keep of the programs that ran, so that a worker does not grow.

In: nothing. Out: nothing; memory goes back to the system. Only what is loaded is touched.

Each of these is kept for as long as the process lives, and a campaign runs thousands of programs: the results
of operators on fake tensors, the text of every graph that `torch.fx` made a function of, and the instructions
of every function that Dynamo read. Nothing depends on them; they are made again.
"""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
from typing import Any

EVERY = 20
"""A worker is tidied after so many cases."""
MADE_BY_FX = "<eval_with_key>"


def tidy_now_and_then(step: int) -> None:
    """To be called after each step of a worker."""
    if step % EVERY == EVERY - 1:
        tidy()


def tidy() -> None:
    """Drops what was kept, collects cycles, and gives free memory back."""
    if fake := sys.modules.get("torch._subclasses.fake_tensor"):
        fake.FakeTensorMode.cache_clear()
    if fx := sys.modules.get("torch.fx.graph_module"):
        fx._loader.eval_cache.clear()
    if dynamo := sys.modules.get("torch._dynamo.bytecode_transformation"):
        _forget_results(dynamo, "_cached_cleaned_instructions")
    for file in [name for name in linecache.cache if name.startswith(MADE_BY_FX)]:
        del linecache.cache[file]
    gc.collect()
    _trim()


def _forget_results(module: Any, name: str) -> None:
    """Empties the cache of a function, if this release of torch has it."""
    clear = getattr(getattr(module, name, None), "cache_clear", None)
    if clear is not None:
        clear()


def _trim() -> None:
    """Asks the C library to return what it does not use; other libraries than glibc do so by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
