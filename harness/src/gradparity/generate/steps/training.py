"""Training in several steps: the program around the changes.

In: a draft. Out: a script: a module, an optimizer, a function that runs one step (often a whole step, which a
subject may compile), and steps with a change between two of them.
"""

from __future__ import annotations

from textwrap import indent

from gradparity.generate.around.settings import settings
from gradparity.generate.draft import Draft
from gradparity.generate.script import Script, Step
from gradparity.generate.steps.changes import AREAS

LAYERS = ("torch.nn.Linear({d}, {d})", "torch.nn.Linear({d}, {d}, bias=False)")
MIDDLES = (
    "torch.nn.Identity()",
    "torch.nn.LayerNorm({d})",
    "torch.nn.Dropout(0.3)",
    "torch.nn.BatchNorm1d({d})",
    "torch.nn.ReLU()",
    "torch.nn.RMSNorm({d})",
    "torch.nn.Sequential(torch.nn.Linear({d}, {d}), torch.nn.GELU())",
)
JOINTS = (
    "h = self.{l}(h)",
    "h = self.{l}(h) + h",
    "h = torch.tanh(self.{l}(h))",
    "h = self.{l}(h * self.rate)",
    "h = F.relu(self.{l}(h)) * self.scale",
    "h = F.linear(self.{l}(h), self.l0.weight)",
    "h = self.{l}(h).sin()",
)
EXTRAS = (
    "h = h * self.rate",
    "self.calls += 1",
    "h = h * (2 if self.flag else 1)",
    "h = h * self.scale",
    "h = h + len(self.history)",
    'h = h * self.table_of["rate"]',
    "self.scale.mul_(0.9)",
    "h = h if self.training else h * 2",
    "h = h + self.calls",
)
LOSSES = (
    "result.sum()",
    "result.pow(2).mean()",
    "result.mT.sum()",
    "(result * 0.5).sum()",
    "result.abs().sum()",
)
OPTIMIZERS = (
    "torch.optim.SGD(m.parameters(), lr=0.1)",
    "torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)",
    "torch.optim.AdamW(m.parameters(), lr=0.01)",
    "torch.optim.Adam(m.parameters(), lr=0.01, foreach=True)",
    "torch.optim.RMSprop(m.parameters(), lr=0.01)",
)
WHOLE = 0.5
"""The share of programs with a whole step."""
ZEROING = ("m.zero_grad()", "optimizer.zero_grad()", "m.zero_grad(set_to_none=False)", "pass")


def training(draft: Draft) -> Script:
    """A script of three to five steps with one or two changes between them."""
    width = max(2, draft.chance.weighted({3: 4, 2: 3, 4: 2, 5: 1}))
    layers = {f"l{place}": each.replace("{d}", str(width)) for place, each in enumerate(_layers(draft))}
    linear = [name for name, text in layers.items() if text.startswith("torch.nn.Linear")]
    changes = [
        _change(draft, width, layers, linear) for _ in range(draft.chance.weighted({1: 5, 2: 3, 3: 1}))
    ]
    steps = [
        Step(title="inputs", lines=tuple(_beginning(draft, width))),
        Step(title="step 1", lines=('step("step 1", x)',)),
    ]
    number = 2
    for title, text in changes:
        plain = draft.chance.between(0, 1)
        steps += [
            Step(title=f"step {number + each}", lines=(f'step("step {number + each}", x)',))
            for each in range(plain)
        ]
        number += plain
        steps.append(Step(title=f"step {number}: {title}", lines=(text, f'step("step {number}", x)')))
        number += 1
    steps.append(Step(title=f"step {number}", lines=(f'step("step {number}", x)',)))
    return Script(
        policy=draft.policy.name,
        intends=("version", "freed", "raised", "shape", "unused"),
        settings=tuple(settings(draft)),
        definitions=(_module(draft, layers, width),),
        steps=tuple(steps),
    )


def _layers(draft: Draft) -> list[str]:
    middle = [draft.chance.pick(MIDDLES)] if draft.chance.flip(0.5) else []
    return [draft.chance.pick(LAYERS), *middle, draft.chance.pick(LAYERS)]


def _module(draft: Draft, layers: dict[str, str], width: int) -> str:
    members = [f"self.{name} = {text}" for name, text in layers.items()]
    members += [
        f'self.register_buffer("scale", torch.ones({width}))',
        "self.rate, self.calls, self.flag = 0.5, 0, False",
        'self.history, self.table_of = [], {"rate": 2.0}',
    ]
    lines = [draft.chance.pick(JOINTS).replace("{l}", name) for name in layers]
    for extra in draft.chance.shuffled(EXTRAS)[: draft.chance.between(0, 2)]:
        lines.insert(draft.chance.between(0, len(lines)), extra)
    body = "\n".join(["super().__init__()", *members])
    forward = "\n".join([*lines, "return h"])
    head = f"class Model(torch.nn.Module):\n    def __init__(self):\n{indent(body, ' ' * 8)}"
    return f"{head}\n\n    def forward(self, h):\n{indent(forward, ' ' * 8)}"


def _beginning(draft: Draft, width: int) -> list[str]:
    chance = draft.chance
    update = ["optimizer.step()"] if chance.flip(0.6) else []
    loss, zeroing = chance.pick(LOSSES), chance.pick(ZEROING)
    lines = ["m = p.module(Model())", "f = p.compile(m)", f"optimizer = {chance.pick(OPTIMIZERS)}"]
    if chance.flip(WHOLE):
        whole = [zeroing, "result = f(x)", f"backward({loss})", *update, "return result"]
        lines += [_function("whole(backward, x)", whole), "run_whole = p.training_step(whole)"]
        step = ["result = run_whole(x)"]
    else:
        step = [zeroing, "result = f(x)", f"with p.backward():\n    {loss}.backward()", *update]
    step.append("p.value(name, (result, *(each.grad for each in m.parameters())))")
    return [*lines, f"x = p.randn(4, {width})", _function("step(name, x)", step)]


def _function(head: str, lines: list[str]) -> str:
    return f"def {head}:\n{indent(chr(10).join(lines), '    ')}"


def _change(draft: Draft, width: int, layers: dict[str, str], linear: list[str]) -> tuple[str, str]:
    """One change as a title and a text, with its holes filled."""
    area = draft.chance.weighted(draft.policy.areas)
    title, text = draft.chance.deal(area, AREAS[area])
    one, two = draft.chance.shuffled(linear)[:2]
    holes = {"{w}": f"m.{one}.weight", "{v}": f"m.{two}.weight", "{l}": one, "{k}": two, "{d}": str(width)}
    for hole, filling in (holes | {"{n}": draft.name("hook")}).items():
        text = text.replace(hole, filling)
    return title, text
