"""What stands below the program in every repro: a recorder in plain torch, the comparison, the commands.

In: the settings and the program, which each script has instead of those below, and the functions in which a
subject says how a user would call it. Out: differences between eager and the subject. The imports and
everything below the recorder's mark are copied into each script; so this module imports torch and the
standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import random
import re
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# --- settings ---
SUBJECT, SEED, DEVICE = "eager", 0, "cpu"
BITWISE, REFERENCE, WIDEN = False, True, False


def by_subject(target: Any) -> Any:
    """A function or module as the subject compiles it."""
    return target


def around_backward() -> Any:
    """What a user puts around the backward."""
    return contextlib.nullcontext()


def around_program() -> Any:
    """Settings under which the subject runs."""
    return contextlib.nullcontext()


# --- program ---


def program(p: Any) -> None:
    """The program; each script has its own here."""
    p.value("nothing", None)


PROGRAM: Callable[[Any], None] = program


# --- recorder ---

MARKS = ("\n# --- " + "program ---\n", "\n# --- " + "recorder ---\n")
FLOORS = {torch.float64: 2e-14, torch.complex128: 2e-14, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Recorder:
    """Makes inputs, marks what is compiled and where the backward runs, records what the program shows."""

    def __init__(self, compiled: bool, dtype: torch.dtype) -> None:
        self.compiled, self.dtype, self.device = compiled, dtype, torch.device(DEVICE)
        self.seed = SEED
        self.is_reference = dtype is torch.float64
        self.log: list[Any] = []
        self.printed = io.StringIO()
        self.shown: dict[str, Any] = {}
        self.order: list[str] = []
        self.watched: dict[str, tuple[torch.Tensor, int]] = {}
        self.leaves: dict[str, torch.Tensor] = {}
        self.numbers = torch.Generator().manual_seed(SEED + 1)

    def made(self, tensor: torch.Tensor, requires_grad: bool, dtype: str = "float32") -> torch.Tensor:
        wanted = getattr(torch, dtype) if dtype != "float32" and not self.is_reference else self.dtype
        return tensor.to(device=self.device, dtype=wanted).requires_grad_(requires_grad)

    def randn(self, *shape: int, requires_grad: bool = False, dtype: str = "float32") -> torch.Tensor:
        return self.made(
            self.rounded(torch.randn(shape, generator=self.numbers), dtype), requires_grad, dtype
        )

    def rand(self, *shape: int, requires_grad: bool = False, dtype: str = "float32") -> torch.Tensor:
        return self.made(self.rounded(torch.rand(shape, generator=self.numbers), dtype), requires_grad, dtype)

    def rounded(self, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype))

    def randint(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.numbers).to(self.device)

    def tensor(self, data: Any, requires_grad: bool = False) -> torch.Tensor:
        tensor = torch.as_tensor(data)
        if tensor.is_floating_point():
            return self.made(tensor.to(torch.float32), requires_grad)
        return tensor.to(self.device)

    def cast(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.to(wide) if self.is_reference and floating else tensor

    def leaf(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.leaves[name] = tensor
        return self.watch(name, tensor)

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.watched[name] = (tensor, tensor._version)
        return tensor

    def module(self, module: Any, name: str = "m") -> Any:
        module.to(device=self.device, dtype=self.dtype)
        for key, parameter in module.named_parameters():
            self.leaf(f"{name}.{key}", parameter)
        for key, buffer in module.named_buffers():
            self.watch(f"{name}.{key}", buffer)
        return module

    def compile(self, target: Any) -> Any:
        return by_subject(target) if self.compiled else target

    def backward(self) -> Any:
        return around_backward() if self.compiled else contextlib.nullcontext()

    def hook(self, site: str, fn: Any = None, kind: str = "tensor") -> Callable[..., Any]:
        def recording(*args: Any) -> Any:
            seen = tuple(a for a in args if not isinstance(a, torch.nn.Module))
            if "accumulate" in kind or "post_acc" in kind:
                seen = tuple(a.grad if isinstance(a, torch.Tensor) else a for a in args)
            self.event(site, *seen, kind=kind)
            return fn(*args) if fn is not None else None

        return torch._dynamo.disable(recording) if self.compiled else recording

    def event(self, site: str, *payload: Any, kind: str = "event") -> None:
        self.order.append(f"{kind} {site}")
        self.shown[f"event {len(self.order) - 1} {kind} {site}"] = frozen(payload)

    def value(self, name: str, value: Any) -> None:
        self.shown[f"value {name} ({len(self.shown)})"] = frozen(value)

    def invariant(self, name: str, holds: bool, detail: str = "") -> None:
        self.shown[f"invariant {name}"] = bool(holds)

    def same_mask(self, name: str, output: torch.Tensor, grad: torch.Tensor) -> None:
        self.invariant(name, bool(((output == 0) == (grad == 0)).all()))

    def finish(self) -> None:
        self.shown |= {f"grad {name}": frozen(leaf.grad) for name, leaf in self.leaves.items()}
        for name, (tensor, version) in self.watched.items():
            self.shown[f"state {name}"] = frozen(tensor)
            self.shown[f"changed in place {name}"] = tensor._version > version
        self.shown["log"] = frozen([*self.log, *self.printed.getvalue().splitlines()])


def frozen(value: Any) -> Any:
    """A copy that later writes cannot change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return ("dict", *(frozen(item) for item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    return set(value) if isinstance(value, set) else value


def observed(compiled: bool, dtype: torch.dtype = torch.float32) -> Recorder:
    """One run of the program."""
    recorder = Recorder(compiled, dtype)
    torch._dynamo.reset()
    torch.manual_seed(SEED)
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    around = around_program() if compiled else contextlib.nullcontext()
    with contextlib.redirect_stdout(recorder.printed), around:
        try:
            widened(PROGRAM)(recorder) if recorder.is_reference and WIDEN else PROGRAM(recorder)
        except Exception as error:
            recorder.shown["raises"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        recorder.finish()
    return recorder


def widened(program: Callable[[Any], None]) -> Callable[[Any], None]:
    """The program with every narrower dtype that it names widened."""
    _, text, _ = in_three()
    for narrow, wide in (("float16", "float64"), ("float32", "float64"), ("complex64", "complex128")):
        text = re.sub(rf"torch\.b?{narrow}\b", f"torch.{wide}", text)
    names: dict[str, Any] = dict(globals())
    exec(text, names)
    found: Callable[[Any], None] = names[program.__name__]
    return found


def differences() -> list[str]:
    """What the subject shows otherwise than eager; empty if nothing."""
    eager, subject = observed(False), observed(True)
    reference = observed(False, torch.float64).shown if REFERENCE else {}
    one, two = eager.shown.get("raises"), subject.shown.get("raises")
    if one is not None or two is not None:
        same = one is not None and two is not None and one.split(":")[0] == two.split(":")[0]
        if not same:
            return [f"eager raises {one}, {SUBJECT} raises {two}"]
    if eager.order != subject.order:
        return [f"order of hooks: eager {eager.order}, {SUBJECT} {subject.order}"]
    names = [name for name in eager.shown if name in subject.shown or not name.startswith("state")]
    names = [name for name in names if name != "raises"]
    found = [unlike(eager.shown[n], subject.shown.get(n), reference.get(n)) for n in names]
    more = [name for name in subject.shown if name.startswith("value") and name not in eager.shown]
    return [
        *(f"{name}: {why}" for name, why in zip(names, found, strict=True) if why),
        *(f"{name}: only {SUBJECT} shows it" for name in more),
    ]


def unlike(eager: Any, subject: Any, reference: Any) -> str:
    """How two observations differ; "" if they do not."""
    if isinstance(eager, tuple) and isinstance(subject, tuple) and len(eager) == len(subject):
        wide = (
            reference
            if isinstance(reference, tuple) and len(reference) == len(eager)
            else [None] * len(eager)
        )
        return next(filter(None, map(unlike, eager, subject, wide)), "")
    if not isinstance(eager, torch.Tensor) or not isinstance(subject, torch.Tensor):
        nan = (
            isinstance(eager, float) and isinstance(subject, float) and eager != eager and subject != subject
        )
        close = (
            isinstance(eager, float)
            and isinstance(subject, float)
            and math.isclose(eager, subject, rel_tol=1e-4)
        )
        equal = nan or (close and not BITWISE) or (type(eager) is type(subject) and eager == subject)
        return "" if equal else f"eager {eager!r:.80}, {SUBJECT} {subject!r:.80}"
    for what in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(eager, what) != getattr(subject, what):
            return f"{what} is {getattr(eager, what)} in eager, {getattr(subject, what)} under {SUBJECT}"
    if eager.layout is torch.strided and 0 not in eager.shape:
        strides = [
            [n for n, size in zip(t.stride(), t.shape, strict=True) if BITWISE or size > 1]
            for t in (eager, subject)
        ]
        if strides[0] != strides[1]:
            return f"strides are {strides[0]} in eager, {strides[1]} under {SUBJECT}"
    return unlike_values(eager, subject, reference)


def unlike_values(eager: torch.Tensor, subject: torch.Tensor, reference: Any) -> str:
    """Equal bits, or an error against float64 of at most four times eager's own and a floor."""
    with torch.no_grad():
        eager, subject = (
            t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (eager, subject)
        )
        if torch.equal(eager.nan_to_num(), subject.nan_to_num()) and torch.equal(
            eager.isnan(), subject.isnan()
        ):
            return ""
        if BITWISE or not (eager.is_floating_point() or eager.is_complex()):
            return (
                f"not equal: eager {eager.flatten()[:4].tolist()}, {SUBJECT} {subject.flatten()[:4].tolist()}"
            )
        if low := rounded_through(eager, subject):
            return f"every value under {SUBJECT} is one of {low}, eager's are not"
        usable = isinstance(reference, torch.Tensor) and reference.shape == eager.shape
        wide = (reference if usable else eager).to(torch.complex128 if eager.is_complex() else torch.float64)
        floor = FLOORS.get(eager.dtype, 1e-5) * (float(wide.abs().nan_to_num().max()) + 0.1)
        ours, theirs = (float((t - wide).abs().nan_to_num(nan=math.inf).max()) for t in (eager, subject))
    if theirs <= 4 * ours + floor:
        return ""
    return f"error {theirs:.3g} against float64, eager's own {ours:.3g}"


def rounded_through(eager: torch.Tensor, subject: torch.Tensor) -> torch.dtype | None:
    """The lower dtype through which the subject's values went and eager's did not."""
    for low in (torch.float32, torch.bfloat16, torch.float16) if eager.is_floating_point() else ():
        before, after = ((t != t.to(low).to(t.dtype)).sum() for t in (eager, subject))
        is_rounding = (eager - subject).abs().max() >= torch.finfo(low).eps / 32 * eager.abs().max()
        if before >= 4 and not after and is_rounding:
            return low
    return None


def minified() -> str:
    """The program's function with every statement left out that the differences do not need."""
    before, text, after = in_three()
    tree, wanted = ast.parse(text), kinds_of(differences())
    for block in [node.body for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.With))]:
        for statement in list(reversed(block)):
            place = block.index(statement)
            block[place : place + 1] = [] if len(block) > 1 else [ast.Pass()]
            if kinds_of(tried(ast.unparse(tree))) != wanted:
                block[place : place + (len(block) == 1 and isinstance(block[0], ast.Pass))] = [statement]
    return f"{before}{MARKS[0]}{ast.unparse(tree)}\n\n{MARKS[1]}{after}"


def in_three() -> tuple[str, str, str]:
    """This file: what stands before the program, the program, what stands behind it."""
    before, _, rest = Path(__file__).read_text().partition(MARKS[0])
    text, _, after = rest.partition(MARKS[1])
    return before, text, after


def tried(text: str) -> list[str]:
    """The differences that another text of the program shows."""
    global PROGRAM
    kept, names = PROGRAM, dict(globals())
    try:
        exec(compile(text, __file__, "exec"), names)
        PROGRAM = names[kept.__name__]
        return differences()
    except Exception:
        return []
    finally:
        PROGRAM = kept


def kinds_of(found: list[str]) -> set[str]:
    """What kinds of differences there are: without names and numbers."""
    return {re.sub(r"[^a-z ]", "", text.split(":")[0].split(" ")[0]) for text in found}


class Test(unittest.TestCase):
    """Fails as long as the two differ."""

    def test_as_in_eager(self) -> None:
        found = differences()
        assert not found, "\n".join(found)


def main(words: list[str]) -> int:
    """The command named by the first word; without one, `run`."""
    command = words[0] if words else "run"
    try:
        by_subject(lambda x: x), around_backward()
    except ImportError as error:
        sys.stderr.write(f"could not run: {error}\n")
        return 5
    if command == "--unittest":
        from torch.testing._internal.common_utils import TestCase

        test = type("TestParity", (TestCase,), {"test_as_in_eager": Test.test_as_in_eager})
        result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(test))
        return 0 if result.wasSuccessful() else 1
    if command == "--minify":
        path = Path(__file__).with_name(f"{Path(__file__).stem}_min.py")
        path.write_text(minified())
        sys.stdout.write(f"wrote {path}\n")
        return 0
    if command not in ("run", "check"):
        sys.stdout.write(f"unknown command {command!r}; known: run, check, --unittest, --minify\n")
        return 4
    if command == "run":
        for compiled in (False, True):
            sys.stdout.write(f"\n{SUBJECT if compiled else 'eager'}:\n")
            for name, value in observed(compiled).shown.items():
                sys.stdout.write(f"  {name}: {value}\n")
    found = differences()
    sys.stdout.write("\n" + "\n".join(found or ["no difference"]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
