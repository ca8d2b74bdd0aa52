"""Inductor's settings: their names, their values for a while, and all of them for another process.

In: the state of torch in this process. Out: settings and switches as data, which another process can take.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import types
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config, list_options

from retrograd._torch.inductor.compile import start_workers
from retrograd._torch.inductor.disk_cache import cache_folder, environment


def settings() -> list[str]:
    """The names of Inductor's settings."""
    return list_options()


def patched(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inside, Inductor's settings have these `values`."""
    return config.patch(dict(values)) if values else nullcontext()


#: settings and switches of one process, for another one.
Portable = dict[str, Any]


def portable_settings() -> Portable:
    """What compiled code depends on besides its graph, and what `take_settings` needs.

    Raises:
        Exception: as `environment` and `cache_folder`.
    """
    *known, kernels = environment()
    # torch registers rules of vmap when they are first needed; what is compiled is traced already
    kernels = [name for name in kernels if "/FuncTorch" not in name]
    return {
        "inductor": config.save_config_portable(ignore_private_configs=False),
        "functorch": functorch_config.save_config_portable(ignore_private_configs=False),
        "precision": torch.get_float32_matmul_precision(),
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "environment": repr([*known, kernels]),
        "formats_in": _formats_in(),
        "folder": cache_folder(),
    }


def _formats_in() -> str:
    """Inductor's keys are made by pickling, and pickle names a memory format by the first module that has an
    attribute ``torch``: it depends on what was imported first."""
    found: str = pickle.whichmodule(torch.contiguous_format, "torch.contiguous_format")  # type: ignore[attr-defined]
    return found


def _have_formats_in(name: str) -> None:
    """Have `_formats_in` return `name`, a module of another process, which need not exist here."""
    if _formats_in() == name:
        return
    first = sys.modules.get(name) or types.ModuleType(name)
    vars(first).setdefault("torch", torch)
    others = {**sys.modules}
    for package in itertools.accumulate(name.split("."), "{}.{}".format):
        others.setdefault(package, types.ModuleType(package))
    del others[name]
    sys.modules.clear()
    sys.modules.update({name: first, **others})


def take_settings(portable: Portable) -> None:
    """Have the settings of the process from which they came, and what this one needs to compile."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = portable["folder"]
    start_workers()  # before there is a context on a device, which they would inherit
    config.load_config(portable["inductor"])
    functorch_config.load_config(portable["functorch"])
    if torch.get_float32_matmul_precision() != portable["precision"]:
        torch.set_float32_matmul_precision(portable["precision"])
    _have_formats_in(portable["formats_in"])
    if portable["device"] is not None:
        torch.cuda.set_device(portable["device"])
        torch.cuda.init()


def import_everything() -> None:
    """Import what compiling needs, and compute what all keys contain, without the use of a device."""
    from torch._inductor import compile_fx, lowering  # noqa: F401
    from torch._inductor.codecache import torch_key

    torch_key()


def compile_threads() -> int:
    """How many processes of its own Inductor compiles kernels with; 1: none."""
    return config.compile_threads or 1
