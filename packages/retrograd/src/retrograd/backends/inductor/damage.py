"""Finds and removes damaged files of Inductor's cache, so that they are made again.

In: an exception while Inductor compiles, or loads code from its cache. Out: whether files that the exception
names were removed, so that repeating the call makes them again. If a process is killed while a linker writes,
or the disk is full, a truncated file remains under the name of a complete one.
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

#: Inductor names code files by a hash, in folders named by two of its letters.
_STEM = re.compile(r"\bc[a-z2-7]{51}\b")
#: in a 64-bit ELF file: the offset of the section table, the size of its entries, and their number.
_SECTIONS, _HEADER = struct.Struct("<40xQ10xHH2x"), 64


def removed(error: BaseException) -> bool:
    """Remove the code files that `error` names in its message or its traceback. Triton's errors name no file;
    if one is in the chain, we remove every kernel of Triton's that has a truncated file."""
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

        PyCodeCache.cache_clear()  # it holds modules that were loaded from such files
        counters["damaged_files"] += len(files)
    return bool(files)


def _cut_off_kernels() -> Iterator[Path]:
    """All files of each Triton kernel that has a truncated file. Skips folders that are being written."""
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
    """`error` and its causes."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        yield error
        seen.append(error)
        error = error.__cause__ or error.__context__


def sweep() -> None:
    """Remove truncated libraries, unless a process is writing them. Loading one may crash the process. Also,
    Inductor probes the processor with such libraries, and takes a failure to load as the answer."""
    from torch._inductor.codecache import get_lock_dir
    from torch.utils._filelock import FileLock

    for file in Path(folder_in_use()).glob("??/c*.so"):
        if is_cut_off(file):
            lock = os.path.join(get_lock_dir(), f"{file.name.partition('.')[0]}.lock")
            with suppress(OSError), FileLock(lock, timeout=0):  # its timeout is an OSError too
                file.unlink(missing_ok=True)
                counters["damaged_files"] += 1


def is_cut_off(file: Path) -> bool:
    """Whether a library is truncated: linkers write the section table at its end."""
    with file.open("rb") as data:
        header = data.read(_HEADER)
    if not header.startswith(b"\x7fELF\x02\x01") or len(header) < _HEADER:
        is_elf = header.startswith(b"\x7fELF") and len(header) == _HEADER  # for another machine
        return not header or (sys.platform == "linux" and not is_elf)
    start, size, count = _SECTIONS.unpack(header)
    return bool(file.stat().st_size < start + size * count)
