"""Custom autograd.Functions by a grammar: what they return, save, mark and change, what their backward does.

In: a scope. Out: a class in the draft's definitions and a call in the scope. Every part is a table; a drawing
takes one row of each that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradparity.generate.draft import Rejected, Scope, is_float


@dataclass(frozen=True)
class Forward:
    """Lines of a forward and what it returns. `saves`: what may be saved, by name; `two`: takes two tensors;
    `outs`: how many tensors it returns; `fresh`: needs an input that may be changed in place; `marks`: a line
    about its results for the context.
    """

    returns: str
    lines: tuple[str, ...] = ()
    saves: tuple[str, ...] = ("x",)
    two: bool = False
    outs: int = 1
    fresh: bool = False
    marks: str = ""


FORWARDS = (
    Forward("x * 2"),
    Forward("x.sin()"),
    Forward("out", ("out = x.exp()",), ("out",)),
    Forward("x.clone()"),
    Forward("x * y", two=True, saves=("x", "y")),
    Forward("x + y", two=True, saves=("x", "y")),
    Forward("out", ("out = x * 2", "out += 1"), ("x", "out")),
    Forward("out", ("out = torch.empty_like(x)", "out.copy_(x * 3)")),
    Forward("x"),
    Forward("x.view_as(x)"),
    Forward("x.view(x.shape)"),
    Forward("x[...]"),
    Forward("x.detach()"),
    Forward("x", ("x.mul_(2)",), fresh=True, marks="ctx.mark_dirty(x)"),
    Forward("x", ("x.add_(y)",), ("y",), two=True, fresh=True, marks="ctx.mark_dirty(x)"),
    Forward("x.sin(), x.cos()", outs=2),
    Forward("x, x * 2", outs=2),
    Forward("x * 2, y * 3", two=True, outs=2),
    Forward("one, two", ("one, two = x * 2, x > 0",), outs=2, marks="ctx.mark_non_differentiable(two)"),
    Forward("one, two", ("one, two = x * 2, x * 3",), outs=2, marks="ctx.mark_non_differentiable(two)"),
    Forward("out, out", ("out = x * 2",), outs=2),
    Forward("x * 2", ("log.append('forward')",)),
    Forward("(x * 2).t().contiguous().t() if x.ndim == 2 else x * 2"),
    Forward("x * scale", saves=()),
)

GRADS = (
    "g * 2",
    "-g",
    "g",
    "g * 3",
    "g.clone()",
    "torch.zeros_like(g)",
    "None",
    "g.sum().expand(shape)",
    "g.sum().expand(g.shape).contiguous()",
    "g.contiguous()",
    "g.reshape(-1).reshape(g.shape)",
    "g.t().contiguous().t() if g.ndim == 2 else g",
    "g * scale",
    "g.double()",
    "g * 2 if ctx.needs_input_grad[0] else None",
    "g.to(torch.bfloat16).to(g.dtype)",
)
"""What a backward returns for one input: right, wrong, None, in another layout or dtype."""

SAVED_GRADS = (
    "g * saved",
    "g * saved.cos()",
    "g + saved",
    "g * (saved + 1)",
    "saved.expand(g.shape) * g.sum()",
    "saved.clone()",
)

BEFORE = {
    "nothing": (),
    "counts": ("ctx.count += 1", "g = g * ctx.count"),
    "changes the gradient": ("g = g.clone()", "g.mul_(2)"),
    "logs": ("log.append('backward')",),
    "nested": (
        "with torch.enable_grad():",
        "    leaf = g.detach().requires_grad_()",
        "    inner = torch.autograd.grad(leaf.sin().sum(), leaf)[0]",
        "g = g * inner",
    ),
    "changes what is saved": ("saved.add_(g.detach().sum())",),
    "overwrites what is saved": ("g = g + saved.mean()", "saved.zero_()"),
    "scales what is saved": ("saved.mul_(2)",),
    "changes the state": ("state.add_(1)",),
    "raises": ('raise ValueError("on purpose")',),
    "asks what is needed": ("log.append(ctx.needs_input_grad)",),
    "draws": ("g = g * torch.rand_like(g)",),
}
RARE = {"nothing": 7.0, "counts": 3.0, "nested": 1.5, "raises": 0.3, "changes what is saved": 2.0}
CHANGES_SAVED = ("changes what is saved", "overwrites what is saved", "scales what is saved")


@dataclass(frozen=True)
class Design:
    """What was chosen for one Function."""

    forward: Forward
    setup: bool
    scale: str
    keeps: str
    saved: str
    before: str
    grads: tuple[str, ...]
    options: tuple[str, ...]
    differentiable_once: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """Parameters that are tensors: x, and y if there are two; the state and the log if they are used."""
        return ("x", "y") if self.forward.two else ("x",)


def apply_function(scope: Scope, setup: bool | None = None, on: str | None = None) -> bool:
    """A Function and its application. `setup`: with setup_context (None: any); `on`: to this tensor."""
    design = _design(scope, setup)
    name = on or scope.choose(
        lambda t: is_float(t) and not (design.forward.fresh and t.is_leaf and t.requires_grad)
    )
    if name is None:
        return False
    like = scope.env[name]
    others = scope.tensors(lambda t: t.shape == like.shape and t.dtype == like.dtype)
    class_name = scope.draft.name("Function")
    extra = _surroundings(scope, design, tuple(like.shape))
    scope.draft.define(source(class_name, design, extra))
    args = [name, *([scope.chance.pick(others)] if design.forward.two else []), *extra, design.scale]
    outs = ", ".join(scope.draft.name("v") for _ in range(design.forward.outs))
    return scope.add(f"{outs} = {class_name}.apply({', '.join(args)})")


def _design(scope: Scope, setup: bool | None) -> Design:
    chance = scope.chance
    forward = chance.pick(FORWARDS)
    with_setup = chance.flip(0.3) if setup is None else setup
    keeps = (
        chance.weighted({"nothing": 4, "save_for_backward": 5, "attribute": 1.5})
        if forward.saves
        else "nothing"
    )
    before = chance.weighted(dict.fromkeys(BEFORE, 1.0) | RARE)
    if keeps == "nothing" and before in CHANGES_SAVED:
        before = "nothing"
    if with_setup and forward.lines and "out" in forward.saves:
        forward = replace(forward, saves=("x",))
    grads = [chance.pick(GRADS if keeps == "nothing" or chance.flip(0.4) else SAVED_GRADS) for _ in range(2)]
    if not forward.two:
        grads = grads[:1]
    elif chance.flip(0.15):
        grads = grads[:1]
        scope.draft.intends.add("count")
    if before == "raises":
        scope.draft.intends.add("raised")
    if before in CHANGES_SAVED or forward.fresh:
        scope.draft.intends.add("version")
    tells = 0.3 if forward.outs == 2 else 0.15
    options = tuple(line for line in ("ctx.set_materialize_grads(False)",) if chance.flip(tells))
    saved = chance.pick(forward.saves) if forward.saves else ""
    return Design(
        forward, with_setup, chance.pick(("2.0", "3", "None", '"word"', "-1.0")), keeps, saved, before,
        tuple(grads), options, chance.flip(0.1),
    )  # fmt: skip


def _surroundings(scope: Scope, design: Design, shape: tuple[int, ...]) -> list[str]:
    """Tensors and lists that the Function changes besides; they are made with the inputs."""
    text = " ".join((*design.forward.lines, *BEFORE[design.before]))
    made = []
    if "state" in text:
        name = scope.draft.name("s")
        scope.draft.put(f'{name} = p.watch("{name}", torch.zeros({shape}, device=p.device))')
        scope.draft.add_param(name)
        made.append(name)
    if "log" in text:
        name = "log0"
        if name not in scope.draft.env:
            scope.draft.put(f"{name} = p.log")
            scope.draft.add_param(name)
        made.append(name)
    if any(each not in scope.env for each in made):
        raise Rejected("what the Function needs is not seen here")
    return made


def source(name: str, design: Design, extra: list[str]) -> str:
    """The class as text."""
    params = [*design.tensors, *("state" if each.startswith("s") else "log" for each in extra), "scale"]
    if design.setup:
        head = [f"def forward({', '.join(params)}):", *_indented(_body(design))]
        setup = [f"{', '.join(params)}, = inputs", *_unpacked(design), *_context(design, params)]
        forward = ["@staticmethod", *head, "", "@staticmethod", "def setup_context(ctx, inputs, output):"]
        forward += _indented(setup)
    else:
        forward = ["@staticmethod", f"def forward(ctx, {', '.join(params)}):"]
        lines = [*design.forward.lines, *_context(design, params), f"return {design.forward.returns}"]
        forward += _indented(lines)
    once = ["@torch.autograd.function.once_differentiable"] if design.differentiable_once else []
    backward = ["@staticmethod", *once, f"def backward(ctx, {_grad_names(design)}):"]
    backward += _indented(_backward(design, params))
    rule = ["generate_vmap_rule = True", ""] if design.setup else []
    return "\n".join(
        [f"class {name}(torch.autograd.Function):", *_indented([*rule, *forward, "", *backward])]
    )


def _body(design: Design) -> list[str]:
    return [*design.forward.lines, f"return {design.forward.returns}"]


def _unpacked(design: Design) -> list[str]:
    if "mark_non" in design.forward.marks:
        return ["one, two = output"]
    return ["out = output[0] if isinstance(output, tuple) else output"]


def _context(design: Design, params: list[str]) -> list[str]:
    lines = [design.forward.marks] if design.forward.marks else []
    if design.keeps == "save_for_backward":
        lines.append(f"ctx.save_for_backward({design.saved})")
    if design.keeps == "attribute":
        lines.append(f"ctx.kept = {design.saved}")
    lines += [f"ctx.{each} = {each}" for each in params if each not in ("x", "y")]
    return [*lines, "ctx.shape, ctx.count = x.shape, 0", *design.options]


def _grad_names(design: Design) -> str:
    return "g, h" if design.forward.outs == 2 else "g"


def _backward(design: Design, params: list[str]) -> list[str]:
    lines = [f"{each} = ctx.{each}" for each in params if each not in ("x", "y")]
    lines += ["scale = scale if isinstance(scale, (int, float)) else 1.0", "shape = ctx.shape"]
    if design.keeps == "save_for_backward":
        lines.append("(saved,) = ctx.saved_tensors")
    if design.keeps == "attribute":
        lines.append("saved = ctx.kept")
    if design.options:
        lines += ["if g is None:", f"    return {', '.join(['None'] * len(params))}"]
        if design.forward.outs == 2:
            lines.append("g = -g if h is None else g")
    if design.forward.outs == 2:
        lines.append("g = g + h if h is not None and h.shape == g.shape else g")
    rest = ["None"] * (len(params) - len(design.tensors))
    tensors = list(design.grads)
    returned = tensors if len(tensors) < len(design.tensors) else [*tensors, *rest]
    text = ", ".join(returned) + ("," if len(returned) == 1 else "")
    return [*lines, *BEFORE[design.before], f"return {text}"]


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]
