"""Inductor's settings: their names, temporary values, and their transfer to another process.

In: the state of torch in this process. Out: settings and switches as data that another process can adopt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config, list_options

from retrograd.backends.inductor.compile import start_workers
from retrograd.backends.inductor.disk_cache import cache_folder, environment


def settings() -> list[str]:
    """The names of Inductor's settings."""
    return list_options()


def patched(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inside, Inductor's settings have these `values`."""
    return config.patch(dict(values)) if values else nullcontext()


#: settings and switches of one process, to send to another.
Portable = dict[str, Any]


def portable_settings() -> Portable:
    """What compiled code depends on besides its graph, and what `take_settings` needs.

    Raises:
        Exception: the errors of `environment` and `cache_folder`.
    """
    *known, kernels = environment()
    # torch registers vmap rules on first use; compiled graphs are already traced, so the rules do not matter
    kernels = [name for name in kernels if "/FuncTorch" not in name]
    return {
        "inductor": config.save_config_portable(ignore_private_configs=False),
        "functorch": functorch_config.save_config_portable(ignore_private_configs=False),
        "precision": torch.get_float32_matmul_precision(),
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "environment": repr([*known, kernels]),
        "folder": cache_folder(),
    }


def take_settings(portable: Portable) -> None:
    """Adopt the settings of another process, and prepare this one to compile."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = portable["folder"]
    start_workers()  # before this process has a device context, which they would inherit
    config.load_config(portable["inductor"])
    functorch_config.load_config(portable["functorch"])
    if torch.get_float32_matmul_precision() != portable["precision"]:
        torch.set_float32_matmul_precision(portable["precision"])
    if portable["device"] is not None:
        torch.cuda.set_device(portable["device"])
        torch.cuda.init()


def import_everything() -> None:
    """Import what compiling needs, and compute what all keys contain, without using a device."""
    from torch._inductor import compile_fx, lowering  # noqa: F401
    from torch._inductor.codecache import torch_key

    torch_key()


def compile_threads() -> int:
    """How many worker processes Inductor compiles kernels with; 1 means none."""
    return config.compile_threads or 1
