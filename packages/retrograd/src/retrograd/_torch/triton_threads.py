"""Compile Triton kernels side by side in threads while Inductor's worker processes are not there yet.

In: Inductor's requests to compile a kernel, inside `in_threads`. Out: futures, for which Inductor waits as it
does for its worker processes. These take seconds to start, and until then Inductor compiles one kernel after
the other; Triton gives up Python's lock for most of that time, so that threads do it in a fraction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["in_threads"]


@contextmanager
def in_threads() -> Iterator[None]:
    """Inside, Triton kernels are compiled in threads, if Inductor may compile in parallel at all.

    One thread at a time may be inside.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    count = get_compile_threads()
    if count <= 1:
        yield
        return
    compile_now = AsyncCompile.triton

    @functools.wraps(compile_now)
    def compile_beside(self: AsyncCompile, *args: Any, **kwargs: Any) -> Any:
        if self.use_process_pool():
            return compile_now(self, *args, **kwargs)
        return _threads(count).submit(compile_now, self, *args, **kwargs)

    AsyncCompile.triton = compile_beside  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.triton = compile_now  # type: ignore[method-assign]


@functools.cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "retrograd-triton")
