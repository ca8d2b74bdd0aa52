"""Where there is no C++ compiler.

In: an exception while Inductor compiles. Out: if it comes from having no C++ compiler, one that says so.
"""

from __future__ import annotations

from retrograd.backends.inductor.damage import chain_of
from retrograd.errors import NoCompilerError


def refuse_without_compiler(error: BaseException) -> None:
    """If `error` comes from having no C++ compiler, raise what says so.

    Raises:
        NoCompilerError: there is none.
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
