"""short: a program in plain torch, as a person would write it, in the place of a script with a recorder.

In: a text whose function `run(p)` uses the probe, the subject, the row. Out: texts. In each, `program`
returns what it shows; eager runs it, the subject runs it, and the exit status is 1 while the two differ. A
short text shows less than the recorder sees: so there are several, the shortest first, and whoever takes one
must run it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

from gradparity.errors import ReproError
from gradparity.subjects.base import Subject
from gradparity.subjects.places import needed
from gradparity.verdict import Row

WIDTH, LONGEST = 100, 190
TEXT = '''"""{heading}"""

{imports}


{definitions}

'''
VALUES = """
def shown({words}):
    torch.manual_seed(0)
    try:
        {run}
{missing}    except Exception as error:
        print(repr(error)[:200])
        return {{"raises": type(error).__name__}}


def same(one, other):
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    try:
        return torch.testing.assert_close(other, one, {exact}equal_nan=True, check_stride=True) is None
    except AssertionError as error:
        return print(error)


eager, found = shown({eager}), shown({subject})
print(f"eager: {{eager}}\\n{name}: {{found}}")
sys.exit(not all(map(same, *map(tree_leaves, (eager, found)))))
"""
MISSING = """\
    except ModuleNotFoundError as error:
        print(f"could not run: {error}", file=sys.stderr)
        sys.exit(5)
"""
"""Where the subject imports something."""
RUN = """
def run({words}):
    torch.manual_seed(0)
    {plain_run}

"""
PEAK = """
def peak(*how):
    run(*how)  # compiles
    with torch.profiler.profile(profile_memory=True) as profiled:
        run(*how)
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))

"""
BY_EAGER = """
eager, found = {measure}({eager}), {measure}({subject})
print(f"{measure} of eager: {{eager}}; of {name}: {{found}}, {{found / eager:.2f}} times that")
sys.exit(found > {multiple} * eager)
"""
SECONDS = """
def seconds(*how):
    taken = []
    for _ in range(12):
        began = time.process_time()
        run(*how)
        taken.append(time.process_time() - began)
    return min(taken)

"""
BY_BUDGET = """
peaks = []
for share in {budgets}:
    torch.compiler.reset()
    with torch._functorch.config.patch(activation_memory_budget=share):
        peaks.append(peak({subject}))
    print(f"peak under a budget of {{share}}: {{peaks[-1]}}")
sys.exit(any(later > {multiple} * min(peaks[:place]) for place, later in enumerate(peaks) if place))
"""
ENDS = {
    "memory": RUN + PEAK + BY_EAGER.replace("{measure}", "peak").replace("{multiple}", "1.3"),
    "slow": RUN + SECONDS + BY_EAGER.replace("{measure}", "seconds").replace("{multiple}", "1.2"),
    "budget": RUN + PEAK + BY_BUDGET.replace("{budgets}", "(0.35, 0.15, 0.05)").replace("{multiple}", "1.3"),
}
IMPORTS = {
    "memory": {"import itertools"},
    "budget": {"import itertools", "import torch._functorch.config"},
    "slow": {"import time"},
}
"""By check, how a text shows what the check found; of what an oracle found, a text compares values."""


@dataclass(frozen=True)
class Manner:
    """What a text has besides: values of leaves; hooks hidden from Dynamo, as the recorder's are; the
    settings under which the subject runs.
    """

    state: bool = False
    hidden: bool = False
    settings: bool = False


MANNERS = (Manner(), Manner(settings=True), Manner(hidden=True), Manner(state=True), Manner(True, True, True))


def short(source: str, subject: Subject, row: Row) -> Iterator[str]:
    """The texts, the shortest first. Raises ReproError if the program has none, or the subject."""
    if "def program(" in source:  # the name that the text needs
        source = re.sub(r"\bprogram\b", "drawn_program", source)
    texts = (_text(source, subject, row, manner) for manner in MANNERS)
    yield from dict.fromkeys(texts)


def _text(source: str, subject: Subject, row: Row, manner: Manner) -> str:
    called = _Called(subject, manner)
    tree = ast.parse(source)
    plain = _Plain(called.has_backward, "payload" in row.symptom, manner, tree)
    definitions = [ast.unparse(ast.fix_missing_locations(node)) for node in plain.definitions(called.words)]
    imports = {"import sys", "import torch", *called.imports}
    imports |= IMPORTS.get(row.check, {"from torch.utils._pytree import tree_leaves"})
    imports |= {ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))}
    reason = f"{subject.name} differs from eager: {row.symptom}: {' '.join(row.reason.split())}"
    reason = reason if len(reason) <= LONGEST else f"{reason[:LONGEST]} …"
    if row.check and row.check not in ENDS:
        raise ReproError(f"there is no short form of what the check {row.check} finds")
    return (TEXT + ENDS.get(row.check, VALUES)).format(
        heading="\n\n".join(filter(None, (fill(reason, WIDTH), needed(subject.file))))
        .replace("\\", "\\\\")
        .replace('"', "'"),
        imports="\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
        definitions="\n\n\n".join([*called.definitions, *definitions]),
        words=called.words,
        run=called.run,
        plain_run=called.run.replace("\n    ", "\n"),
        missing=MISSING if any("import " in text for text in called.definitions) else "",
        exact="rtol=0, atol=0, " if subject.bitwise else "",
        eager=called.eager,
        subject=called.subject,
        name=subject.name,
    )


class _Called:
    """How the subject is called in a text: `words` are the program's parameters; `eager` and `subject` what
    is given for them; `run` calls the program; `definitions` are what `subject` needs.
    """

    def __init__(self, subject: Subject, manner: Manner) -> None:
        defined = {
            node.name: node for node in ast.parse(subject.script).body if isinstance(node, ast.FunctionDef)
        }
        self.definitions: list[str] = []
        self.has_backward = "around_backward" in defined
        self.imports = ["from contextlib import nullcontext"] if self.has_backward else []
        compiler = self._one("by_subject", defined)
        self.words, self.eager, self.subject = "compile", "lambda f: f", compiler or "lambda f: f"
        self.run = "return program(compile)"
        if self.has_backward:
            self.words, self.eager = "compile, backward", "lambda f: f, nullcontext"
            self.subject += ", " + str(self._one("around_backward", defined))
            self.run = "return program(compile, backward)"
        if manner.settings and "around_program" in defined:
            self.definitions.append(ast.unparse(defined["around_program"]))
            self.run = f"with around_program():\n            {self.run}"

    def _one(self, name: str, defined: dict[str, ast.FunctionDef]) -> str | None:
        """The expression for one of the subject's functions: a lambda, if one says it all."""
        if name not in defined:
            return None
        node = defined[name]
        last = node.body[-1]
        if len(node.body) == 1 and isinstance(last, ast.Return) and last.value is not None:
            return ast.unparse(ast.Lambda(node.args, last.value))
        self.definitions.append(ast.unparse(node))
        return name


@dataclass
class _Plain(ast.NodeTransformer):
    """Writes a program without the probe. `payload`: whether what hooks are given is shown."""

    has_backward: bool
    payload: bool
    manner: Manner
    tree: ast.Module
    results: list[str] = field(default_factory=list)
    uses: dict[str, str] = field(default_factory=dict)
    _stored: list[str] = field(default_factory=list)
    _named: list[Any] = field(default_factory=list)

    def definitions(self, words: str) -> list[ast.stmt]:
        """All definitions, with `program` in the place of `run`. Raises ReproError."""
        found: list[ast.stmt] = []
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "run":
                found.append(self._program(node, words))
            elif not isinstance(node, (ast.Import, ast.ImportFrom)):
                found.append(node)
        if left := [node for node in found if "p" in _names(node)]:
            lines = ast.unparse(left[0]).splitlines()
            line = next((line for line in lines if re.search(r"\bp\b", line)), lines[0])
            raise ReproError(f"there is no short form of {line.strip()}")
        return found

    def _program(self, run: ast.FunctionDef, words: str) -> ast.FunctionDef:
        self._stored = [
            node.id
            for node in ast.walk(run)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        loops = [node for node in ast.walk(run) if isinstance(node, (ast.For, ast.While, ast.FunctionDef))]
        calls = [node for held in loops for node in ast.walk(held)]
        self._named = [
            call.args[0].value
            for call in calls  # of the function itself once, of a loop or a function in it once more
            if isinstance(call, ast.Call)
            and _method(call) == "value"
            and isinstance(call.args[0], ast.Constant)
        ]
        made = ast.parse(f"def program({words}):\n    pass").body[0]
        assert isinstance(made, ast.FunctionDef)
        body: list[ast.stmt] = []
        for node in run.body[_has_docstring(run) :]:
            new = self.visit(node)
            body += new if isinstance(new, list) else [new]
        head = (
            [ast.parse(f"{', '.join(self.uses)} = {', '.join(self.uses.values())}").body[0]]
            if self.uses
            else []
        )
        parts = ["**seen"] if "seen" in self.uses else []
        parts += ["'order': order"] if "order" in self.uses else []
        if "leaves" in self.uses:
            parts.append("**{name: leaf.grad for name, leaf in leaves.items()}")
        shown = [*parts, *self.results] or ["'ended': True"]
        last = ast.parse(f"x = {{{', '.join(shown)}}}").body[0]
        assert isinstance(last, ast.Assign)
        made.body, made.decorator_list = [*head, *body, ast.Return(last.value)], run.decorator_list
        return made

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """A leaf in a variable of its own is shown by the variable."""
        target = node.targets[0]
        call = node.value
        is_own = isinstance(target, ast.Name) and self._stored.count(target.id) == 1
        if not (is_own and isinstance(call, ast.Call) and _method(call) in ("leaf", "watch", "module")):
            return self.generic_visit(node)
        name = ast.unparse(target)
        if _method(call) == "leaf":
            self.results.append(f"'{name}.grad': {name}.grad")
        if _method(call) == "module":
            self.results.append(f"**{{f'{{n}}.grad': v.grad for n, v in {name}.named_parameters()}}")
        elif self.manner.state or _method(call) == "watch":
            self.results.append(f"'{name}': {name}")
        node.value = self.visit(call.args[0 if _method(call) == "module" else 1])
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """A value whose name no other has."""
        call = node.value
        if isinstance(call, ast.Call) and _method(call) == "value" and isinstance(call.args[0], ast.Constant):
            name, value = call.args[0].value, ast.unparse(self.visit(call.args[1]))
            if self._named.count(name) == 1:
                self.uses["seen"] = "{}"
                return ast.parse(f"seen[{name!r}] = {value}").body[0]
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> Any:
        """The context of a backward, if the subject has one."""
        if not self.has_backward:
            rest = [item for item in node.items if not _is(item.context_expr, "backward")]
            if not rest:
                body = [self.visit(each) for each in node.body]
                return [each for part in body for each in (part if isinstance(part, list) else [part])]
            node.items = rest
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """What the probe knows."""
        if isinstance(node.value, ast.Name) and node.value.id == "p":
            known: dict[str, str] = {"backward": "backward"} if self.has_backward else {}
            known |= {"device": "torch.device('cpu')", "dtype": "torch.float32", "seed": "0"}
            known |= {"is_reference": "False", "compile": "compile"}
            if node.attr == "log":
                self.uses["order"] = "[]"
                return ast.Name("order", ast.Load())
            if node.attr in known:
                return ast.parse(known[node.attr], mode="eval").body
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call of the probe."""
        name = _method(node)
        self.generic_visit(node)
        write = getattr(self, f"_{name}", None) if name else None
        if write is None:
            return node
        words = [ast.unparse(each) for each in node.args]
        keys = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
        return ast.parse(write(*words, **keys), mode="eval").body

    def _randn(self, *shape: str, **more: str) -> str:
        return self._made("torch.randn", *shape, **more)

    def _rand(self, *shape: str, **more: str) -> str:
        return self._made("torch.rand", *shape, **more)

    def _made(self, how: str, *shape: str, dtype: str = "", requires_grad: str = "") -> str:
        words = [*(shape or ["()"])]
        if dtype:
            plain = dtype.strip("'")
            words.append(f"dtype=torch.{plain}" if plain.isidentifier() else f"dtype=getattr(torch, {dtype})")
        words += [f"requires_grad={requires_grad}"] if requires_grad else []
        return f"{how}({', '.join(words)})"

    def _randint(self, high: str, *shape: str) -> str:
        return f"torch.randint({high}, ({', '.join(shape)},))" if shape else f"torch.randint({high}, ())"

    def _tensor(self, data: str, requires_grad: str = "") -> str:
        made = data if data.startswith("torch.") else f"torch.tensor({data})"
        return f"{made}.requires_grad_({requires_grad})" if requires_grad else made

    def _cast(self, tensor: str) -> str:
        return tensor

    def _leaf(self, name: str, tensor: str) -> str:
        self.uses["leaves"] = "{}"
        return f"leaves.setdefault({name}, {tensor})"

    def _watch(self, name: str, tensor: str) -> str:
        self.uses["seen"] = "{}"
        return f"seen.setdefault({name}, {tensor})"

    def _module(self, module: str, name: str = "'m'") -> str:
        self.uses["leaves"] = "{}"
        each = f"leaves.update({{{name} + '.' + n: v for n, v in m.named_parameters()}}) or m"
        return f"(lambda m: {each})({module})"

    def _value(self, name: str, value: str) -> str:
        self.uses["seen"] = "{}"
        return f"seen.update({{({name}, len(seen)): {value}}})"

    def _invariant(self, name: str, holds: str, detail: str = "") -> str:
        return self._value(name, f"bool({holds})")

    def _same_mask(self, name: str, output: str, grad: str) -> str:
        return self._value(name, f"bool((({output} == 0) == ({grad} == 0)).all())")

    def _event(self, site: str, *payload: str, kind: str = "") -> str:
        self.uses["order"] = "[]"
        words = [site, *(payload if self.payload else ())]
        return f"order.append({words[0] if len(words) == 1 else '[' + ', '.join(words) + ']'})"

    def _hook(self, site: str, fn: str = "", kind: str = "") -> str:
        self.uses["order"] = "[]"
        if self.payload:
            taken = "arg.grad" if "acc" in kind else "arg"
            given = f"[at, *({taken} for arg in args if not isinstance(arg, torch.nn.Module))]"
        else:
            given = "at"
        made = f"lambda *args, at={site}: order.append({given})" + (
            f" or ({fn})(*args)" if fn and fn != "None" else ""
        )
        return f"torch._dynamo.disable({made})" if self.manner.hidden else f"({made})"


def _has_docstring(node: ast.FunctionDef) -> bool:
    return ast.get_docstring(node) is not None


def _method(node: ast.AST) -> str:
    """The method of the probe that a call calls; "" if it calls none."""
    function = node.func if isinstance(node, ast.Call) else None
    base = function.value if isinstance(function, ast.Attribute) else None
    return function.attr if isinstance(base, ast.Name) and base.id == "p" else ""  # type: ignore[union-attr]


def _is(node: ast.expr, method: str) -> bool:
    return _method(node) == method


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
