"""Caches on disk what Inductor answered an earlier process about a graph.

In: a graph's cache key on disk, which determines it and its inputs, and what else an answer depends on. Out:
a short text, or None if no process has stored it. The text may be Inductor's key of the graph. We then load
the code without computing that key, for which Inductor prints the graph three times.

Each note is a file in the folder of Inductor's cache. Its name is a hash of the graph's key, of what else the
answer depends on, and of the `environment`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch._inductor import config

from retrograd.backends.inductor.disk_cache import cache_folder, environment, replacing


class Note:
    """What an earlier process stored about the graph `name`; `depends` is what else the answer depends on.

    Nothing is read or written if there is no name, if the cache is off, or if a mode or a hook of the user is
    on.
    """

    def __init__(self, name: str | None, *depends: object) -> None:
        self._file: Path | None = None
        with suppress(Exception):  # including a `Refusal`
            if name is not None:
                answer = repr([name, *depends, environment()])
                stem = hashlib.sha256(answer.encode()).hexdigest()
                self._file = Path(cache_folder(), "retrograd", stem[:2], f"{stem}.note")

    def read(self) -> str | None:
        """The text that was stored; None if there is none."""
        with suppress(OSError, ValueError):
            if self._file is not None and (text := self._file.read_text("ascii")).isalnum():
                return text
        return None

    def write(self, text: str | None) -> None:
        """Store `text`, which consists of letters and digits. None is not stored."""
        if text is None or self._file is None:
            return
        with suppress(OSError), replacing(self._file) as to:
            to.write(text.encode("ascii"))


def code_of(key: str | None, example_inputs: Sequence[Any], is_backward: bool) -> Any:
    """The code that Inductor's cache has under `key`, loaded as stock AOTAutograd loads it; None if there is
    none."""
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool
    from torch.utils._python_dispatch import _disable_current_modes

    if key is None or config.triton.cudagraphs:
        return None
    constants = CompiledFxGraphConstants()
    options: Any = {"cudagraphs": BoxedBool(False), "is_backward": is_backward}
    with suppress(Exception), _disable_current_modes():
        found, _ = FxGraphCache.load_with_key(
            key, [], example_inputs, True, None, is_backward=is_backward, constants=constants
        )
        if found is not None:
            found.post_compile(example_inputs, constants, options)
        return found
    return None
