"""Explains errors that come from a missing C++ compiler.

In: an exception while Inductor compiles. Out: if it comes from a missing C++ compiler, an error that says so.
"""

from __future__ import annotations

from retrograd.backends.inductor.damage import chain_of
from retrograd.errors import NoCompilerError


def refuse_without_compiler(error: BaseException) -> None:
    """If `error` comes from a missing C++ compiler, raise an error that says so.

    Raises:
        NoCompilerError: there is no C++ compiler.
    """
    from torch._inductor.exc import InvalidCxxCompiler

    if found := next((one for one in chain_of(error) if isinstance(one, InvalidCxxCompiler)), None):
        raise NoCompilerError.because(
            "no-compiler",
            str(found),
            "backends.inductor",
            way_out="install a C++ compiler such as g++, or name yours in the environment variable CXX; "
            'backend="eager" needs none',
        ) from error
