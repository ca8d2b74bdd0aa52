"""Python state: lists, dictionaries and objects that a compiled function reads and changes.

In: a scope. Out: a statement about an object that is made with the inputs, and is observed in the end.
"""

from __future__ import annotations

from gradparity.generate.draft import Scope
from gradparity.generate.holes import fill

OBJECTS = {
    "log0": "p.log",
    "state0": '{"calls": 0, "rate": 0.5}',
    "box0": "torch.nn.Identity()",
}
"""What each object is made of. A module without parts serves as a bag of attributes."""

STATEMENTS = {
    "log0": (
        "log0.append(1)",
        "log0.append({x}.shape)",
        "log0.extend([1, 2])",
        "print('seen', {x}.ndim)",
        "{out} = {x} * len(log0)",
        "class Helper:\n    def go(self):\n        log0.append('method')\nHelper().go()",
        "[log0.append(each) for each in range(2)]",
        "{out} = {x} if log0 else {x} * 2\nlog0.append('after')",
        "log0[:] = [len(log0)]",
        "(lambda: log0.append('lambda'))()",
        "for each in ({x}, {y}):\n    log0.append(each.ndim)",
    ),
    "state0": (
        'state0["calls"] += 1',
        '{out} = {x} * state0["rate"]',
        'state0["rate"] = state0["rate"] * 2',
        'state0["new"] = 1',
        'state0["last"] = {x}.detach()',
        '{out} = {x} + state0.pop("gone", 1)',
        '{out} = {x} * 2 if state0["calls"] > 0 else {x}\nstate0["calls"] += 1',
    ),
    "box0": (
        'box0.calls = getattr(box0, "calls", 0) + 1',
        "box0.last = {x}.detach() * 2",
        '{out} = {x} * getattr(box0, "rate", 3)\nbox0.rate = 2',
        "{out} = {x} * (2 if box0.training else 3)",
        'setattr(box0, "word", "seen")',
        "{out} = {x} + {x}.detach().sum().item()",
        "{out} = {x} * float({x}.detach().mean())",
        "{out} = {x} * random.random()",
        "{out} = {x} * (2 if random.random() > 0.5 else 3)",
        "{out} = {x} * random.randint(1, 3)",
        "{out} = {x} * float(np.random.rand())",
        "box0.last = np.random.randint(5)",
    ),
}


def python_state(scope: Scope) -> bool:
    """One statement about one object."""
    name = scope.chance.pick(list(OBJECTS))
    if name not in scope.draft.env:
        scope.draft.put(f"{name} = {OBJECTS[name]}")
        scope.draft.add_param(name)
    if name not in scope.env:
        return False
    text = fill(scope, scope.chance.pick(STATEMENTS[name]))
    return text is not None and scope.add(text)


def observed(name: str) -> list[str]:
    """Statements that show an object in the end; the log is observed anyway."""
    if name == "log0":
        return []
    if name == "state0":
        return [f'p.value("{name}", tuple((key, {name}[key]) for key in sorted({name})))']
    keys = ("calls", "last", "rate", "word")
    return [f'p.value("{name}", tuple(getattr({name}, key, None) for key in {keys}))']
