"""Find a backend by name or wrap a callable.

In: what the user gave as ``backend=``. Out: a `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrograd.backends.base import Backend
from retrograd.backends.custom import CustomBackend
from retrograd.backends.eager import AtenBackend, EagerBackend
from retrograd.backends.inductor import InductorBackend
from retrograd.errors import OptionError

#: the registered backends by name.
BACKENDS: dict[str, Callable[[], Backend]] = {
    backend.name: backend for backend in (AtenBackend, EagerBackend, InductorBackend)
}


def find_backend(backend: str | Backend | Callable[..., Any], option: str = "backend") -> Backend:
    """The backend named, given or wrapped; `option` is the name under which it was given.

    Raises:
        OptionError: a name that is not registered, or neither a name nor a callable.
    """
    if isinstance(backend, str) and backend in BACKENDS:
        return BACKENDS[backend]()
    if isinstance(backend, (AtenBackend, EagerBackend, InductorBackend)):
        return backend
    if isinstance(backend, str) or not callable(backend):
        expected = f"one of {', '.join(sorted(BACKENDS))}, or a callable (gm, example_inputs) -> callable"
        raise OptionError(option, f"got {backend!r}", expected)
    return CustomBackend(backend)
