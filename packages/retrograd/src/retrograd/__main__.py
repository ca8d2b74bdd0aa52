"""`retrograd cache`: shows the disk cache of compiled code, and transfers it to another machine.

In: a command line. Out: text, or an archive of the cache's folder. The exit status is 0, 1 after an error
(with one line that describes it), or 2 for wrong usage.

Inductor and retrograd store their files in one folder. A file's name encodes everything that its contents
depend on: code, releases, settings, hardware. So an archive can be unpacked into an existing cache, and files
for another torch or device are never looked up. The cache contains pickles, and reading a pickle can run
arbitrary code: unpack only what you trust.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import platform
import sys
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import torch

from retrograd.backends.inductor import UNFINISHED, cache_folder, replacing
from retrograd.errors import Refusal
from retrograd.version import VERSION

#: The first file of an archive: the releases and hardware for which its code was made.
MANIFEST = "retrograd-cache.json"
#: The limit on an archive's unpacked size, as a multiple of its own: a small file must not fill the disk.
MOST_UNPACKED = 200
#: The contents of the cache's folders; all other folders contain generated code.
_KINDS = {
    "fxgraph": "compiled graphs",
    "aotautograd": "graphs of stock AOTAutograd",
    "triton": "Triton kernels",
    "retrograd": "partitions and notes",
}


def made_of() -> dict[str, str]:
    """The releases and hardware for which this process compiles."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "retrograd": VERSION,
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpu": device,
    }


def info(folder: Path) -> str:
    """A summary of the folder: files and bytes of each kind."""
    files, sizes = Counter[str](), Counter[str]()
    for path in _finished(folder):
        kind = _KINDS.get(path.relative_to(folder).parts[0], "generated code")
        files[kind] += 1
        sizes[kind] += path.stat().st_size
    rows = [f"  {kind:28} {files[kind]:6} files {sizes[kind] / 2**20:9.1f} MiB" for kind in sorted(files)]
    return "\n".join([str(folder), *(rows or ["  empty"])])


def pack(folder: Path, archive: Path) -> int:
    """Write the files of the folder to `archive`, a gzipped tar file. Returns the number of files.

    Raises:
        OSError: something cannot be read or written. Then `archive` is unchanged.
    """
    if archive.is_dir() or not archive.absolute().parent.is_dir():
        raise OSError(f"{archive} is a folder, or in none: name a file that can be written")
    paths = list(_finished(folder))
    with replacing(archive) as to, tarfile.open(fileobj=to, mode="w:gz") as tar:
        message = json.dumps(made_of()).encode()
        entry = tarfile.TarInfo(MANIFEST)
        entry.size = len(message)
        tar.addfile(entry, io.BytesIO(message))
        for path in paths:
            tar.add(path, str(path.relative_to(folder)), recursive=False)
    return len(paths)


def unpack(archive: Path, folder: Path) -> tuple[int, dict[str, str]]:
    """Add the files of `archive` to the folder; existing files are not replaced. We examine the whole
    archive, and verify gzip's checksum, before we add anything.

    Returns:
        The number of new files, and the `made_of` of the archive.

    Raises:
        OSError: something cannot be read or written.
        tarfile.TarError: the archive is damaged, is not an archive of a cache, or contains an entry that is
            not a file inside it.
    """
    most = archive.stat().st_size * MOST_UNPACKED
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        with tempfile.TemporaryFile(dir=staging) as plain:
            _decompress(archive, plain, most)
            with tarfile.open(fileobj=plain, mode="r:") as tar:
                origin = _manifest(tar)
                _extract(tar, staging, most)
        new = [path for path in _finished(Path(staging)) if not (folder / path.relative_to(staging)).exists()]
        for path in new:
            target = folder / path.relative_to(staging)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    return len(new), origin


def _decompress(archive: Path, to: BinaryIO, most: int) -> None:
    with gzip.open(archive) as packed:
        while chunk := packed.read(2**20):
            to.write(chunk)
            if to.tell() > most:
                raise tarfile.TarError(f"{archive} holds more than {MOST_UNPACKED} times its size")
    to.seek(0)


def _manifest(tar: tarfile.TarFile) -> dict[str, str]:
    first = tar.next()
    if first is None or first.name != MANIFEST or (message := tar.extractfile(first)) is None:
        raise tarfile.TarError(f"its first file is not {MANIFEST}, so `retrograd cache pack` did not make it")
    origin: Any = json.loads(message.read())
    if not isinstance(origin, dict) or not all(isinstance(value, str) for value in origin.values()):
        raise tarfile.TarError(f"{MANIFEST} in it does not say what the code was made of")
    return origin


def _extract(tar: tarfile.TarFile, folder: str, most: int) -> None:
    members = tar.getmembers()[1:]
    if sum(member.size for member in members) > most:
        raise tarfile.TarError(f"its files have more than {MOST_UNPACKED} times its size")
    for member in members:
        if not member.isfile() or Path(member.name).is_absolute():
            raise tarfile.TarError(f"{member.name!r} is no plain file in its folder")
        tar.extract(member, folder, filter="data")


def _finished(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (UNFINISHED, ".lock") and path.is_file() and not path.is_symlink():
            yield path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="retrograd", description="A compiler of PyTorch's backward.")
    commands = parser.add_subparsers(required=True).add_parser(
        "cache", help="compiled code on disk (TORCHINDUCTOR_CACHE_DIR)"
    ).add_subparsers(dest="command", required=True)  # fmt: skip
    commands.add_parser("info", help="what there is, by kind")
    for name, text in (
        ("pack", "write the cache to an archive, for machines with the same releases and hardware"),
        ("unpack", "add an archive to the cache; it holds pickles: use only what you trust"),
    ):
        commands.add_parser(name, help=text).add_argument("archive", type=Path)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (by default that of the process). Returns the exit status."""
    asked = _parser().parse_args(arguments)
    try:
        folder = Path(cache_folder())
        if asked.command == "info":
            print(info(folder))
        elif asked.command == "pack":
            print(f"{pack(folder, asked.archive)} files of {folder} are in {asked.archive}")
        else:
            new, origin = unpack(asked.archive, folder)
            print(f"{new} files of {asked.archive} are new in {folder}")
            for name, here in made_of().items():
                if origin.get(name) != here:
                    print(f"made with {name} {origin.get(name)}, here is {here}: code may not be found")
    except (OSError, EOFError, zlib.error, Refusal, tarfile.TarError, ValueError) as error:
        place = "" if asked.command == "info" or str(asked.archive) in str(error) else f"{asked.archive}: "
        print(f"retrograd cache {asked.command}: {place}{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
