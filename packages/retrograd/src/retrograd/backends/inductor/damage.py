"""Files of Inductor's cache that are damaged: found when they are loaded, removed, and made again.

In: an exception while Inductor compiles, or loads what it compiled before. Out: whether files that it tells
of were removed, so that the same call makes them again. A process that is killed while a linker writes, or a
full disk, leaves files that are cut off: their names say that they are whole.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from retrograd.events import AOT_LOGS, counters
from retrograd.runtime.cache_folder import folder_in_use

_log = AOT_LOGS["cache"]

#: how Inductor names files of code: a hash, in folders by two letters of it.
_STEM = re.compile(r"\bc[a-z2-7]{51}\b")
#: of an ELF file of 64 bits: where the table of sections begins, the size of its rows, and their number.
_SECTIONS, _HEADER = struct.Struct("<40xQ10xHH2x"), 64


def removed(error: BaseException) -> bool:
    """Remove the files of code that `error` tells of, in its texts and in the lines it comes from. Triton's
    errors name no file: if one of them comes from a file that is cut off, all of Triton's such files go."""
    texts = list(_texts(error))
    stems = {stem for text in texts for stem in _STEM.findall(text)}
    files = [file for stem in stems for file in Path(folder_in_use(), stem[1:3]).glob(f"{stem}*")]
    if any("triton" in text for text in texts):
        files += _cut_off_kernels()
    for file in files:
        if file.is_file():
            file.unlink(missing_ok=True)
            _log.info("%s is removed, because it cannot be used: %s", file, error)
    if files:
        from torch._inductor.codecache import PyCodeCache

        PyCodeCache.cache_clear()  # it holds what such a file gave
        counters["damaged_files"] += len(files)
    return bool(files)


def _cut_off_kernels() -> Iterator[Path]:
    """All files of each kernel of Triton's of which a file is cut off, except where others write now."""
    for file in Path(os.environ.get("TRITON_CACHE_DIR") or Path(folder_in_use(), "triton")).rglob("*.*"):
        if file.is_file() and not file.parent.name.startswith("tmp.") and _is_cut_off_of_kernel(file):
            yield from file.parent.iterdir()


def _is_cut_off_of_kernel(file: Path) -> bool:
    if file.suffix != ".json":
        return file.suffix in (".so", ".cubin", ".hsaco") and is_cut_off(file)
    try:
        return json.loads(file.read_bytes()) is None
    except ValueError:
        return True


def _texts(error: BaseException) -> Iterator[str]:
    for found in chain_of(error):
        yield f"{found} {getattr(found, 'path', '')} {getattr(found, 'filename', '')}"
        yield from (frame.filename for frame in traceback.extract_tb(found.__traceback__))


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what caused it."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def sweep() -> None:
    """Remove libraries that are cut off, unless a process writes them now. One may end the process that loads
    it. By others Inductor tries what the processor can do: that they do not load is an answer."""
    from torch._inductor.codecache import get_lock_dir
    from torch.utils._filelock import FileLock

    for file in Path(folder_in_use()).glob("??/c*.so"):
        if is_cut_off(file):
            lock = os.path.join(get_lock_dir(), f"{file.name.partition('.')[0]}.lock")
            with suppress(OSError), FileLock(lock, timeout=0):  # its timeout is an OSError too
                file.unlink(missing_ok=True)
                counters["damaged_files"] += 1


def is_cut_off(file: Path) -> bool:
    """Whether the end is missing from a library, where linkers write the table of its sections."""
    with file.open("rb") as data:
        header = data.read(_HEADER)
    if not header.startswith(b"\x7fELF\x02\x01") or len(header) < _HEADER:
        is_elf = header.startswith(b"\x7fELF") and len(header) == _HEADER  # of another machine
        return not header or (sys.platform == "linux" and not is_elf)
    start, size, count = _SECTIONS.unpack(header)
    return bool(file.stat().st_size < start + size * count)
