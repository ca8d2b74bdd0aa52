"""Forms of a program: what is compiled and how the run goes.

In: a draft. Out: a Script, not yet run as a whole. Training in several steps is in `steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from textwrap import indent

import torch

from gradparity.generate.around.calls import calls, compiled, mode_around, other_call
from gradparity.generate.around.changes import between
from gradparity.generate.around.hooks import hooks
from gradparity.generate.around.losses import losses
from gradparity.generate.around.outputs import Outputs, outputs
from gradparity.generate.around.settings import settings
from gradparity.generate.draft import Draft, Rejected, Scope, is_float
from gradparity.generate.inputs import add_alias, add_input, shape
from gradparity.generate.kinds import python_state
from gradparity.generate.kinds.modules import ModuleClass
from gradparity.generate.script import Script, Step
from gradparity.generate.statements import grow
from gradparity.generate.steps.training import training

EARLY = 0.6
"""The share of programs whose leaves may have hooks before the function is called."""


def function(draft: Draft) -> Script:
    """A function of tensors, called once or a few times."""
    _inputs(draft)
    draft.around = mode_around(draft)
    scope = draft.outer()
    grow(scope, draft.chance.between(*draft.policy.length))
    _root(scope)
    found = outputs(scope)
    body = "\n".join([*scope.lines, f"return {found.returned}"])
    definition = f"def program({', '.join(draft.params)}):\n{indent(body, '    ')}"
    return _finished(draft, found, definition, "program")


def module(draft: Draft) -> Script:
    """A module with parameters, buffers and ties, called once."""
    drawn = ModuleClass(draft)
    rows = draft.chance.between(1, 5)
    name = add_input(draft, (rows, drawn.width), grad=draft.chance.flip(0.6))
    head = drawn.head("Model")
    draft.define(f"{head}\n")
    draft.put("m = p.module(Model())")
    draft.around = mode_around(draft)
    scope = draft.outer()
    scope.env["self"] = draft.env["m"]
    current = name
    for _ in range(draft.chance.between(*draft.policy.length)):
        if drawn.use(scope, current):
            made = [each for each in scope.tensors(is_float) if _goes_on(scope, each, rows, drawn.width)]
            current = made[-1] if made else current
        grow(scope, draft.chance.between(0, 1))
    _root(scope)
    found = outputs(scope)
    body = "\n".join([*scope.lines, f"return {found.returned}"])
    forward = f"    def forward(self, {', '.join(draft.params)}):\n{indent(body, '        ')}"
    draft.definitions.pop()
    script = _finished(draft, found, f"{head}\n\n{forward}", "m")
    shown = [f'p.value("{key}", m.{key})' for key in (*dict(scope.env["m"].named_buffers()), "calls", "rate")
             if "." not in key and hasattr(scope.env["m"], key)]  # fmt: skip
    return script.model_copy(
        update={"steps": (*script.steps, Step(title="what is left", lines=tuple(shown)))}
    )


def _goes_on(scope: Scope, name: str, rows: int, width: int) -> bool:
    return tuple(scope.env[name].shape) == (rows, width) and scope.env[name].dtype is torch.float32


def _root(scope: Scope) -> None:
    """Sees to it that something made here requires grad."""
    draft = scope.draft
    if draft.with_grad and not any(
        scope.env[name].requires_grad for name in scope.tensors() if name not in draft.env
    ):
        source = scope.choose(lambda tensor: tensor.requires_grad)
        if source is None:
            raise Rejected("nothing requires grad")
        inner = scope if scope.value("torch.is_grad_enabled()") else scope.block("with torch.enable_grad():")
        inner.add(f"{draft.name('v')} = {source} * 2")
        if inner is not scope:
            scope.close(inner)


def _inputs(draft: Draft) -> None:
    chance, policy = draft.chance, draft.policy
    draft.with_grad = not chance.flip(policy.without_grad)
    kinds = {"float": 6.0, "int": 1.0} if not draft.with_grad else {"float": 1.0}
    for place in range(chance.between(*policy.inputs)):
        if place and chance.flip(policy.aliased):
            add_alias(draft)
            continue
        kind = "complex" if "complex" in policy.kinds and chance.flip(0.5) else chance.weighted(kinds)
        add_input(draft, shape(draft), kind, place == 0 or None)


def _finished(draft: Draft, found: Outputs, definition: str, target: str) -> Script:
    """The script around a compiled function whose inside is drawn."""
    if draft.with_grad and not any(each.is_root for each in found.tensors):
        raise Rejected("nothing requires grad")
    call, given = calls(draft, found)
    roots = [each for each in given if each.is_root]
    early = hooks(draft, ()) if draft.chance.flip(EARLY) else []
    forward = [f"f = p.compile({compiled(draft, target)})", *early, *call]
    forward += other_call(draft, definition) if target == "program" else []
    later = [*hooks(draft, given), *between(draft, given)] if roots else []
    backward = losses(draft, roots)
    names = [name for name in python_state.OBJECTS if name in draft.params]
    last = [line for name in names for line in python_state.observed(name)]
    if backward and draft.chance.flip(0.3):
        last += [f'p.value("{each.name} after", {each.name})' for each in given]
    steps = (
        Step(title="inputs", lines=tuple(draft.inputs)),
        Step(title="forward", lines=tuple(forward)),
        Step(title="between", lines=tuple(later)),
        Step(title="backward", lines=tuple(backward)),
        Step(title="after", lines=tuple(last)),
    )
    return Script(
        policy=draft.policy.name,
        intends=tuple(sorted(draft.intends)),
        fp64=draft.fp64,
        settings=tuple(settings(draft)),
        definitions=(*draft.definitions, definition),
        steps=tuple(step for step in steps if step.lines),
    )


FORMS: dict[str, Callable[[Draft], Script]] = {"function": function, "module": module, "training": training}
