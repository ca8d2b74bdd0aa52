"""Modules: layers called in a function, and modules with shared parameters and buffers.

In: a scope. Out: a module made with the inputs and called, or a class whose forward is drawn like a function.
"""

from __future__ import annotations

from gradparity.generate.draft import Draft, Scope, is_float
from gradparity.generate.inputs import size

LAYERS = (
    "torch.nn.Linear({d}, {d})",
    "torch.nn.Linear({d}, {d}, bias=False)",
    "torch.nn.LayerNorm({d})",
    "torch.nn.RMSNorm({d})",
    "torch.nn.BatchNorm1d({d})",
    "torch.nn.GroupNorm(1, {d})",
    "torch.nn.Dropout(0.3)",
    "torch.nn.Sequential(torch.nn.Linear({d}, {d}), torch.nn.ReLU())",
    "torch.nn.Sequential(torch.nn.Linear({d}, 5), torch.nn.GELU(), torch.nn.Linear(5, {d}))",
    "torch.nn.PReLU()",
    "torch.nn.Softmax(-1)",
    "torch.nn.Identity()",
    "torch.nn.ParameterList([torch.randn({d}), torch.randn({d})])",
    "torch.nn.Bilinear({d}, {d}, {d})",
    "torch.nn.Embedding(4, {d})",
    "torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear({d}, {d}))",
    "torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear({d}, {d}))",
)
CALLS = {
    "Bilinear": "{m}({x}, {x})",
    "Embedding": "{m}(torch.tensor([0, 1, 0])).sum(0) + {x}",
    "ParameterList": "{x} * {m}[0] + {m}[1]",
}
MEMBERS = {
    "weight": "self.weight = torch.nn.Parameter(torch.randn({d}))",
    "table": "self.table = torch.nn.Parameter(torch.randn({d}, {d}))",
    "own": "self.own = Weight(torch.randn({d}))",
    "scale": 'self.register_buffer("scale", torch.ones({d}))',
    "count": 'self.register_buffer("count", torch.zeros(()))',
    "rate": "self.rate = 0.5",
    "calls": "self.calls = 0",
}
USES = {
    "weight": (
        "{out} = {x} * self.weight",
        "{out} = {x} + self.weight.exp()",
        "{out} = {x} / self.weight.norm()",
    ),
    "table": (
        "{out} = {x} @ self.table",
        "{out} = F.linear({x}, self.table)",
        "{out} = {x} @ self.table[:, :1]",
    ),
    "own": (
        "{out} = {x} * self.own",
        "{out} = self.own.times({x})",
        "{out} = {x} * (self.own if type(self.own) is Weight else 2)",
        "{out} = {x} + self.own.rate",
    ),
    "scale": (
        "{out} = {x} * self.scale",
        "self.scale.mul_(0.9)",
        "self.scale.copy_({x}.detach().flatten()[0])",
    ),
    "count": (
        "self.count.add_(1)",
        "{out} = {x} * (self.count + 1)",
        "self.count += 1\n{out} = {x} * self.count",
    ),
    "rate": ("{out} = {x} * self.rate", "self.rate = self.rate * 2"),
    "calls": ("self.calls += 1", "{out} = {x} * (self.calls + 1)"),
}
"""By member, the lines that may stand in a forward."""
OWN = """class Weight(torch.nn.Parameter):
    rate = 3.0

    def times(self, other):
        return other * self.rate * self"""
"""A parameter of a class of its own."""


def call_module(scope: Scope) -> bool:
    """A layer that is a parameter of the function, a new one or one that is called already, and its call on a
    tensor whose last size fits.
    """
    name = scope.choose(
        lambda t: is_float(t) and t.dtype is scope.draft.probe.dtype and t.ndim == 2 and t.numel() > 0
    )
    if name is None:
        return False
    draft, width = scope.draft, str(scope.env[name].shape[-1])
    there = [key for key, text in draft.modules.items() if f"({width}" in text and key in scope.env]
    if there and scope.chance.flip(0.5):
        layer = scope.chance.pick(there)
        return scope.add(f"{draft.name('v')} = {call_of(draft.modules[layer], layer, name)}")
    layer, text = draft.name("m"), scope.chance.pick(LAYERS).replace("{d}", width)
    draft.put(f'{layer} = p.module({text}, "{layer}")')
    draft.add_param(layer)
    draft.modules[layer] = text
    return scope.add(f"{draft.name('v')} = {call_of(text, layer, name)}")


def call_of(layer: str, module: str, operand: str) -> str:
    """How a layer of this kind is called."""
    kind = layer.split("(")[0].removeprefix("torch.nn.")
    return CALLS.get(kind, "{m}({x})").replace("{m}", module).replace("{x}", operand)


class ModuleClass:
    """A module class while it is being drawn: its members, and how its forward may use them."""

    def __init__(self, draft: Draft, width: int | None = None) -> None:
        chance = draft.chance
        self.width = width or max(size(draft), 1)
        self.layers = {
            f"l{place}": chance.pick(LAYERS).replace("{d}", str(self.width))
            for place in range(chance.between(1, 3))
        }
        self.members = chance.some(list(MEMBERS), 0)
        if "own" in self.members:
            draft.define(OWN)
        self.ties = self._ties(draft)

    def _ties(self, draft: Draft) -> list[str]:
        linear = [name for name, text in self.layers.items() if text.startswith("torch.nn.Linear")]
        if len(linear) > 1 and draft.chance.flip(0.4):
            return [f"self.{linear[1]}.weight = self.{linear[0]}.weight"]
        if linear and "table" in self.members and draft.chance.flip(0.3):
            return [f"self.table = self.{linear[0]}.weight"]
        return []

    def head(self, name: str) -> str:
        """The class with its `__init__`."""
        lines = [f"self.{key} = {text}" for key, text in self.layers.items()]
        lines += [MEMBERS[member].replace("{d}", str(self.width)) for member in self.members]
        body = "\n        ".join(["super().__init__()", *lines, *self.ties])
        return f"class {name}(torch.nn.Module):\n    def __init__(self):\n        {body}"

    def use(self, scope: Scope, operand: str) -> bool:
        """One line of the forward that calls a layer or uses a member."""
        chance, out = scope.chance, scope.draft.name("v")
        if not self.members or chance.flip(0.6):
            layer = chance.pick(list(self.layers))
            return scope.add(f"{out} = {call_of(self.layers[layer], f'self.{layer}', operand)}")
        row = chance.pick(USES[chance.pick(self.members)])
        return scope.add(row.replace("{out}", out).replace("{x}", operand))
