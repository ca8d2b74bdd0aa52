"""Names of subjects.

In: "eager", "stock-ca:inductor", "stock-step:aot_eager", "retrograd-live:eager",
"retrograd-live+aot_eager:eager", "retrograd-aot:eager", "retrograd-compile:eager",
"retrograd-compile+live:eager", "retrograd-step:eager", "compile:<backend>", "planted:<fault>",
"import:<module>:<class>"; a backend without "compile:" in front; behind "retrograd-…:" also the place of a
function; "retrograd-live:" and "retrograd-aot:" also with flags, as in "retrograd-live:inductor+cudagraphs".
Out: a Subject. Raises UnknownNameError for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradparity.errors import UnknownNameError
from gradparity.subjects.base import Blame, Subject
from gradparity.subjects.eager import Eager
from gradparity.subjects.flags import backend_and_options, flagged, without_flags
from gradparity.subjects.places import function_at, functions_of, loaded
from gradparity.subjects.planted import FAULTS, planted
from gradparity.subjects.retrograd_aot import BACKENDS as AOT_BACKENDS
from gradparity.subjects.retrograd_aot import (
    RetrogradAot,
    RetrogradCompile,
    RetrogradLiveOverAot,
    RetrogradStep,
    RetrogradWhole,
)
from gradparity.subjects.retrograd_behind_stock import FORWARDS, RetrogradBehindStock
from gradparity.subjects.retrograd_live import BACKENDS, RetrogradLive
from gradparity.subjects.stock import StockCompile, StockCompiledAutograd
from gradparity.subjects.stock_newer import NEEDS, newer
from gradparity.subjects.stock_passes import StockPasses


def _live(name: str) -> Subject:
    backend, options = backend_and_options(name)
    return RetrogradLive(name, backend, **options)


def _ahead(name: str) -> Subject:
    backend, options = backend_and_options(name)
    return RetrogradAot(name, backend, **options)


def _backend(name: str) -> str:
    return name.partition(":")[2]


NAMED: dict[str, Callable[[str], Subject]] = {
    "eager": Eager,
    "stock-compile:aot_eager": lambda name: StockCompile(name, "aot_eager"),
    "stock-compile:inductor": lambda name: StockCompile(name, "inductor"),
    "stock-passes:inductor": StockPasses,
    **dict.fromkeys(NEEDS, newer),
    "stock-ca:eager": lambda name: StockCompiledAutograd(name, "eager"),
    "stock-ca:inductor": lambda name: StockCompiledAutograd(name, "inductor"),
    **{f"retrograd-live:{backend}": _live for backend in BACKENDS},
    **dict.fromkeys(flagged(["retrograd-live:inductor"]), _live),
    **{
        f"retrograd-live+{forward}:{backend}": lambda name: RetrogradBehindStock(name, *_halves(name))
        for forward in FORWARDS
        for backend in ("eager", "inductor")
    },
    **{f"retrograd-aot:{backend}": _ahead for backend in AOT_BACKENDS},
    **dict.fromkeys(flagged(["retrograd-aot:inductor"]), _ahead),
    "retrograd-aot+dynamic:eager": lambda name: RetrogradAot(name, _backend(name), dynamic=True),
    "retrograd-live+retrograd-aot:eager": lambda name: RetrogradLiveOverAot(name, _backend(name)),
    **{
        f"retrograd-compile:{backend}": lambda name: RetrogradCompile(name, _backend(name))
        for backend in AOT_BACKENDS
    },
    **{
        f"retrograd-compile+live:{backend}": lambda name: RetrogradWhole(name, _backend(name))
        for backend in AOT_BACKENDS
    },
    **{
        f"retrograd-step:{backend}": lambda name: RetrogradStep(name, _backend(name))
        for backend in AOT_BACKENDS
    },
}

OWN = {name.partition(":")[0]: made for name, made in NAMED.items() if name.startswith("retrograd-")}
"""retrograd's ways, in which a backend of the user's own may stand."""

FORMS = {
    "compile:<backend>": "torch.compile with any registered backend",
    "compile:<module>:<function>": "the same, not registered; also compile:FILE.py:FUNCTION",
    "<backend>": "the same, if no subject has this name; also a FILE.py with one function",
    "compile:<backend>+random": "the same, drawing random numbers of its own",
    "stock-ca:<backend>": "eager forward, stock compiled autograd with any registered backend",
    "planted:<fault>": f"eager with a planted fault, to test the tester: {', '.join(FAULTS)}",
    "retrograd-<way>:<module>:<function>": "retrograd with a code generator of yours; also FILE.py:FUNCTION",
    "import:<module>:<class>": "a Subject of your own; also import:FILE.py:CLASS",
}


def full_name(name: str) -> str:
    """The name with "compile:" in front, if it is none of a subject but, perhaps, of a backend. A file
    without a function stands for the one that it defines.

    Raises:
        UnknownNameError: the file does not define exactly one.
    """
    is_subject = name in NAMED or without_flags(name) in NAMED or name.partition(":")[0] in {*_HEADS, *OWN}
    named = name if is_subject or name.count(":") > 1 else f"compile:{name}"
    form, _, rest = named.partition(":")
    return f"{named}:{_only_function(rest)}" if form in ("compile", *OWN) and rest.endswith(".py") else named


_HEADS = {form.partition(":")[0] for form in FORMS if ":" in form}


def listed() -> list[str]:
    """A line for each subject with a name of its own: the name, and which releases of torch have it, if not
    all do.
    """
    return [f"{name:<36} {NEEDS[name].describe()}" if name in NEEDS else name for name in NAMED]


def resolve(name: str, blame: Blame = Blame.own) -> Subject:
    """The subject of this name, which answers by this policy."""
    subject = _made(full_name(name))
    if blame is not Blame.own:
        subject.answers_for(blame)
    return subject


def _made(name: str) -> Subject:
    if (plain := without_flags(name)) in NAMED and NAMED[plain] in (_live, _ahead):
        return NAMED[plain](name)
    if name in NAMED:
        return NAMED[name](name)
    form, _, rest = name.partition(":")
    if form == "compile":
        return _compile(name, rest)
    if form == "stock-ca":
        return StockCompiledAutograd(name, _registered(rest))
    if form == "planted" and rest in FAULTS:
        return planted(name, rest)
    if form == "import":
        return _imported(name, rest)
    if form in OWN and ":" in rest:
        _check_function(backend_and_options(name)[0] if OWN[form] in (_live, _ahead) else rest)
        return OWN[form](name)
    own = [f"{head}:{rest}" for head in ("compile", *OWN) if ":" in rest]
    raise UnknownNameError("subject", name, [*own, *NAMED, *FORMS, *(f"planted:{fault}" for fault in FAULTS)])


def _halves(name: str) -> tuple[str, str]:
    """The compilers of forward and backward in "retrograd-live+forward:backward"."""
    forward, _, backend = name.partition("+")[2].partition(":")
    return forward, backend


def _compile(name: str, backend: str) -> Subject:
    if backend == "retrograd":
        return RetrogradCompile(name)
    plain, _, flag = backend.partition("+")
    own_random, place = flag == "random", plain if flag == "random" else backend
    if ":" in place:
        _check_function(place)
        return StockCompile(name, place, own_random)
    return StockCompile(name, _registered(place), own_random)


def _check_function(place: str) -> None:
    module = place.rpartition(":")[0]
    with _explained(_BACKEND, place, lambda: [f"{module}:{name}" for name in functions_of(module)]):
        function_at(place)


_BACKEND = "torch.compile backend"
#: how a backend is named that torch does not have, and a subject.
_WAYS = {
    _BACKEND: "compile:MODULE:FUNCTION, compile:FILE.py:FUNCTION, an entry point of torch_dynamo_backends",
    "subject": "import:MODULE:CLASS, import:FILE.py:CLASS",
}


@contextmanager
def _explained(what: str, place: str, there: Callable[[], list[str]] = list) -> Iterator[None]:
    """Whatever a user's module raises while it is imported becomes an UnknownNameError. It names what is
    `there`, which asks the module once more; if that is nothing, the files in the folder.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a script that ends itself is no backend
        why = f"{type(error).__name__}: {error}"
        known: list[str] = []
        with suppress(Exception, SystemExit):
            known = there()
        file, _, name = place.removeprefix("import:").rpartition(":")
        if not known and file.endswith(".py") and not Path(file).is_file():
            known = [f"{path}:{name}" for path in sorted(Path(file).parent.glob("*.py"))]
        raise UnknownNameError(what, place, known or [*NAMED], why, _WAYS[what]) from error


def _only_function(file: str) -> str:
    """The one function that the file defines."""
    with _explained(_BACKEND, file):
        found = functions_of(file)
    if len(found) != 1:
        why = "it defines several functions; name one" if found else "it defines no function"
        raise UnknownNameError(_BACKEND, file, [f"{file}:{name}" for name in found], why)
    return found[0]


def _registered(backend: str) -> str:
    """The name of a backend that Dynamo knows."""
    import torch._dynamo

    known: list[str] = torch._dynamo.list_backends(exclude_tags=None)
    if backend not in known:
        raise UnknownNameError(_BACKEND, backend, [*known, *NAMED], way_out=_WAYS[_BACKEND])
    return backend


def _imported(name: str, path: str) -> Subject:
    module, _, attribute = path.rpartition(":")
    with _explained("subject", name, lambda: [f"import:{module}:{one}" for one in _subjects_of(module)]):
        made = getattr(loaded(module), attribute)(name)
        if not isinstance(made, Subject):
            raise TypeError(f"{attribute} is no gradparity.Subject")
    if not any("accountable" in vars(cls) for cls in type(made).__mro__ if cls is not Subject):
        made.accountable = True  # unless it says something else
    return made


def _subjects_of(module: str) -> list[str]:
    """The subclasses of Subject that a module has."""
    classes = {name: value for name, value in vars(loaded(module)).items() if isinstance(value, type)}
    return [name for name, value in classes.items() if issubclass(value, Subject) and value is not Subject]
