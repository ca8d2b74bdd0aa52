"""The user's options, as one frozen value for all three interfaces.

In: the keyword arguments of ``compiled_autograd``, ``compile``, ``compile_step``, ``aot.function`` and
``aot.module``, and the ``options`` of ``torch.compile(backend="retrograd")``. Out: a checked `Config`. An
option has one name and one meaning wherever it is accepted. Where an interface does not accept an option, the
option has its default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from retrograd.errors import OptionError
from retrograd.policy import CALLS_IN_PARTS, FEWEST_COPIES, SMALLEST_REPEAT

if TYPE_CHECKING:
    import torch

    CompileFn = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]

#: The partitioners that have a name.
PARTITIONERS = ("min_cut", "recompute_all", "save_all")

#: A name, or a partitioner in torch's form: ``(gm, inputs, *, num_fwd_outputs) -> (forward, backward)``.
Policy = str | Callable[..., Any]


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_compiler(value: Any) -> bool:
    if hasattr(value, "named_parameters"):  # a model, by mistake for one of its backends
        return False
    return isinstance(value, str) or callable(value) or callable(getattr(value, "compile", None))


#: A test for the values of an option or argument (a predicate or a type), and the allowed values in words.
Rule = tuple[Callable[[Any], bool] | type, str]

SWITCH: Rule = (_is_switch, "True or False")

ALLOWED: Mapping[str, Rule] = {
    "backend": (_is_compiler, "'aten', 'eager', 'inductor', or a callable (gm, example_inputs) -> callable"),
    "backward": (
        lambda value: value is None or _is_compiler(value),
        "None, 'aten', 'eager', 'inductor', or a callable (gm, example_inputs) -> callable",
    ),
    "partitioner": (
        lambda value: value in PARTITIONERS if isinstance(value, str) else callable(value),
        f"one of {', '.join(map(repr, PARTITIONERS))}, or a callable "
        "(gm, inputs, *, num_fwd_outputs) -> (forward, backward)",
    ),
    "passes": (
        lambda value: (
            isinstance(value, tuple) and all(isinstance(one, str) or callable(one) for one in value)
        ),
        "a sequence of pass names and callables (gm, example_inputs) -> gm",
    ),
    "dynamic": (lambda value: value is None or _is_switch(value), "None, True or False"),
    "recompile_limit": (_is_count, "a whole number, at least 1"),
    "cache_size": (_is_count, "a whole number, at least 1"),
    "opaque": (
        lambda value: isinstance(value, frozenset) and all(isinstance(name, str) for name in value),
        "a collection of autograd node names such as 'MulBackward0'",
    ),
    "regions": (
        lambda value: isinstance(value, int) and value >= 0,
        "True, False, or the smallest number of autograd nodes",
    ),
    **dict.fromkeys(("strict", "single_region", "background", "cudagraphs", "stock_dynamo"), SWITCH),
    "whole_after": (
        lambda value: value is None or (_is_count(value) and value > 1),
        "None, or a number of calls, at least 2",
    ),
    "compile_timeout": (
        lambda value: value is None or (type(value) in (int, float) and value >= 0),
        "None, or a number of seconds, at least 0",
    ),
}


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise `OptionError` if the option or argument `name` may not have this value."""
    allows, expected = rule
    if not (isinstance(value, allows) if isinstance(allows, type) else allows(value)):
        is_plain = isinstance(value, (str, int, float, list, tuple, dict, type(None)))
        shown = repr(value) if is_plain else type(value).__name__
        raise OptionError(name, f"got {shown:.200}", expected)


P = ParamSpec("P")
T = TypeVar("T")


def checked(**rules: Rule) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that makes a function raise `OptionError` for an unknown keyword, and for an argument that
    its rule forbids."""

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(fn).parameters
        known = [name for name, one in parameters.items() if one.kind is not one.POSITIONAL_ONLY]

        @functools.wraps(fn)
        def run(*args: P.args, **given: P.kwargs) -> T:
            for name in given:
                if name not in known:
                    raise OptionError.unknown(name, known)
            for name, value in (*zip(parameters, args, strict=False), *given.items()):
                if name in rules:
                    check(name, value, rules[name])
            return fn(*args, **given)

        return run

    return decorate


@dataclass(frozen=True)
class Config:
    """Settings of one compiled callable or context.

    Attributes:
        backend, strict, dynamic, recompile_limit, opaque, regions, background, cudagraphs, compile_timeout:
            as in `compiled_autograd`, for every interface.
        backward, partitioner, passes: as in ``aot.function``.
        single_region: differentiate all outputs together, as stock AOTAutograd does.
        whole_after: if copies of a repeated structure share code (`regions`), run that code for this many
            calls. Then code for the whole graph replaces it, if another process has compiled it; that call
            waits for it. None: never replace it.
        cache_size: for how many kinds of input we cache code. The least recently used is dropped first.
        stock_dynamo: behind Dynamo, accept its deviations from eager: it inlines each ``autograd.Function``,
            ignores module hooks that are set after the first call, and raises different errors.

    Raises:
        OptionError: an option has a value that is not allowed.
    """

    backend: str | CompileFn = field(default="inductor", compare=False)
    backward: str | CompileFn | None = field(default=None, compare=False)
    partitioner: Policy = field(default="min_cut", compare=False)
    passes: Sequence[str | Callable[..., Any]] = field(default=(), compare=False)
    strict: bool = False
    dynamic: bool | None = None
    recompile_limit: int = 8
    cache_size: int = 64
    opaque: Iterable[str] = frozenset()
    regions: bool | int = True
    whole_after: int | None = CALLS_IN_PARTS
    single_region: bool = False
    background: bool = False
    cudagraphs: bool = False
    compile_timeout: float | None = None
    stock_dynamo: bool = False

    #: Replaces the callables in comparisons: they need not be hashable, and each equals only itself.
    _identities: tuple[Any, ...] = field(init=False, repr=False)

    def __new__(cls, *_: Any, **given: Any) -> Self:
        known = [name for name in cls.__dataclass_fields__ if name[0] != "_"]
        for name in given.keys() - known:
            raise OptionError.unknown(name, known)
        return super().__new__(cls)

    def __deepcopy__(self, memo: object) -> Config:
        """Itself: a copy of what was compiled has the same backend and passes."""
        return self

    def __post_init__(self) -> None:
        object.__setattr__(self, "passes", _collected(self.passes, tuple))
        object.__setattr__(self, "opaque", _collected(self.opaque, frozenset))
        for name, rule in ALLOWED.items():
            check(name, getattr(self, name), rule)
        chosen = (self.backend, self.backward, self.partitioner, *self.passes)
        identities = tuple(one if isinstance(one, str) else id(one) for one in chosen)
        object.__setattr__(self, "_identities", identities)

    @property
    def smallest_repeat(self) -> int:
        """The minimum size, in autograd nodes, of repeated structure that is compiled once; 0 to disable."""
        return SMALLEST_REPEAT if self.regions is True else int(self.regions)

    @property
    def fewest_copies(self) -> int:
        """The minimum number of copies of such structure."""
        return FEWEST_COPIES if self.regions is True else 2

    @property
    def patience(self) -> float | None:
        """How many seconds a call waits for code that another thread compiles. None: this thread compiles,
        and the call waits as long as it takes."""
        return 0 if self.background else self.compile_timeout


def _collected(value: Any, kind: Callable[[Iterable[Any]], Any]) -> Any:
    """A collection in its frozen form. A string is not a collection of names, so it is unchanged."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return value
    return kind(value)
