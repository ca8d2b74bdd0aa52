"""Inductor's cache on disk: whether we may read it, and what its code depends on.

In: the state of torch in this process. Out: the cache's folder, and a key. Two processes have the same key
exactly if Inductor would use one's code in the other. A `Refusal` if the cache is off. The cache holds
pickles, and loading a pickle executes code: whoever can write to the folder can run code in this process.
"""

from __future__ import annotations

import copyreg
import functools
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from retrograd.errors import FallbackWarning, Refusal
from retrograd.runtime.cache_folder import folder_in_use


def is_cache_trusted() -> bool:
    """Whether Inductor's folder is safe to read. If not, we warn once."""
    folder = folder_in_use()
    why = why_not_trusted(folder)
    if why is not None:
        _say_untrusted(folder, why)
    return why is None


@functools.cache
def _say_untrusted(folder: str, why: str) -> None:
    warnings.warn(
        f"compiled graphs are not read from {folder}: {why}\n"
        "  try    TORCHINDUCTOR_CACHE_DIR, with a folder that only you can write to",
        FallbackWarning,
        stacklevel=2,
    )


def why_not_trusted(folder: str) -> str | None:
    """Why no pickle should be read from `folder`; None if it belongs to this user (or root) alone."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        found = os.stat(folder)
    except OSError as error:
        return f"it cannot be examined: {error.strerror}"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, not to this one ({os.geteuid()})"
    if found.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    return None


#: switches that a trace depends on, and that Inductor's key does not include.
_SWITCHES: tuple[Any, ...] = (
    torch.is_inference_mode_enabled,
    torch.is_anomaly_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    lambda: torch.backends.cudnn.enabled,
    lambda: torch.backends.mkldnn.enabled,
    lambda: (torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy),
)


def cache_folder() -> str:
    """The folder of Inductor's cache.

    Raises:
        Refusal: the cache is off, or others may write to the folder.
    """
    if config.force_disable_caches or not config.fx_graph_cache:
        raise Refusal("cache-off", "Inductor keeps nothing on disk")
    folder = folder_in_use()
    if why := why_not_trusted(folder):
        raise Refusal("cache-untrusted", why)
    return folder


# Inductor makes its keys by pickling. By default, pickle names a memory format by the first module that has
# an attribute ``torch``. That name depends on what the process has imported.
copyreg.pickle(torch.memory_format, lambda memory_format: str(memory_format).removeprefix("torch."))

#: the suffix of a file that is being written.
UNFINISHED = ".tmp"


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A new file that replaces `file` at the end. If the block raises, `file` is unchanged."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=UNFINISHED)
    try:
        with os.fdopen(handle, "w+b") as to:
            yield to
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def environment() -> list[Any]:
    """All that code depends on besides its graph: versions, hardware, settings of Inductor and of torch's
    partitioners, switches of torch, and the names of operators with a Python implementation.

    Raises:
        Refusal: a dispatch mode or a hook of the user is on, which we cannot put into a key.
        Exception: Inductor refuses to make a key.
    """
    from torch._inductor.codecache import FxGraphCachePickler, FxGraphHashDetails

    if _get_current_dispatch_mode_stack() or torch._C._autograd._top_saved_tensors_default_hooks(True):
        raise Refusal("modes", "a dispatch mode or hooks for saved tensors are on")
    nothing: Any = fx.Graph()
    nothing.output(())
    gm, options = fx.GraphModule({}, nothing), dict[str, Any]()
    # Like `compiled_fx_graph_hash`, but without its log lines, which take most of the time.
    key = FxGraphCachePickler(gm).get_hash(FxGraphHashDetails(gm, [], options, []))
    settings = functorch_config.save_config_portable(ignore_private_configs=False)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    cards = [torch.cuda.get_device_name(device) for device in devices]
    python_kernels = sorted(name for name in torch.library._impls if name.startswith(("aten/", "prims/")))
    return [key, settings, [repr(is_on()) for is_on in _SWITCHES], cards, python_kernels]
