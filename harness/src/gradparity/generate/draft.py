"""Draft: a script while it is being drawn, with the live value of every name.

In: choices. Out: statements that eager has executed already, so that their preconditions hold: a statement
that raises, or makes a value that is not finite, huge or long, is forgotten at once.

A `Scope` is where statements go: the compiled function, a nested function, the inside of a with block, or the
run around them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from textwrap import indent
from typing import Any

import torch

from gradparity.case import Case
from gradparity.generate.chance import Chance
from gradparity.generate.policy import Policy
from gradparity.generate.script import IMPORTS
from gradparity.probe import Probe, Way

HUBS = 3
"""So many tensors, the first ones that are made, are taken more often than others where a policy says so."""
VARIABLE = re.compile(r"[a-z]\d+")
Wanted = Callable[[torch.Tensor], bool]


class Rejected(Exception):
    """This drawing came to nothing; another one may."""


class Draft:
    """What all scopes of one drawing share: choices, names, definitions, inputs, settings.

    `modules`: the text of each layer that is a parameter; `around`: the head of a with block around the call.
    """

    def __init__(self, chance: Chance, policy: Policy) -> None:
        self.chance, self.policy = chance, policy
        self.probe = Probe(Case("generated", policy.name), Way(), torch.float32, torch.device("cpu"))
        self.env: dict[str, Any] = _names() | {"p": self.probe}
        self.definitions: list[str] = []
        self.inputs: list[str] = []
        self.params: list[str] = []
        self.intends: set[str] = set()
        self.scopes: list[Scope] = []
        self.opened: list[Scope] = []
        self.modules: dict[str, str] = {}
        self.around = ""
        self.fp64 = self.with_grad = True
        self._taken: dict[str, int] = {}

    def name(self, prefix: str) -> str:
        """A name that nobody has yet."""
        number = self._taken.get(prefix, 0)
        self._taken[prefix] = number + 1
        return f"{prefix}{number}"

    def define(self, text: str) -> None:
        """Adds a definition of the module. Raises Rejected if eager cannot execute it."""
        try:
            exec(text, self.env)
        except Exception as error:
            raise Rejected(f"definition: {error}") from error
        for scope in self.scopes:
            new = {key: value for key, value in self.env.items() if not VARIABLE.fullmatch(key)}
            scope.env.update({key: value for key, value in new.items() if key not in scope.env})
        self.definitions.append(text)

    def put(self, line: str) -> None:
        """Adds a line to the inputs, which run before the compiled function. Raises Rejected if it fails."""
        try:
            exec(line, self.env)
        except Exception as error:
            raise Rejected(f"input: {error}") from error
        self.inputs.append(line)

    def add_param(self, name: str) -> None:
        """Makes something among the inputs a parameter of the compiled function."""
        self.params.append(name)
        for scope in self.scopes:
            scope.env[name] = self.env[name]

    def release(self) -> None:
        """Lets go of all values; nothing is drawn afterwards.

        A checkpoint or a Function of the drawing holds its globals through C++, and these hold its result:
        Python's collector does not see that cycle.
        """
        for scope in self.opened:
            scope.env.clear()
        self.env.clear()
        self.probe.release()

    def outer(self) -> Scope:
        """A new scope: a function at module level, whose parameters are the inputs."""
        hidden = {name for name in self.env if VARIABLE.fullmatch(name)} - set(self.params)
        env = {name: value for name, value in self.env.items() if name not in hidden}
        return Scope(self, env, (self.around,) if self.around else ())


class Scope:
    """A list of statements in the making. `env`: the values of all names seen here. `headers`: of the with
    blocks in which they run, the outermost first. `keen`: in which share of choices the newest tensor is
    taken, so that statements go on from each other.
    """

    def __init__(self, draft: Draft, env: dict[str, Any], headers: tuple[str, ...] = ()) -> None:
        self.draft, self.env, self.headers = draft, env, headers
        self.lines: list[str] = []
        self.keen = 0.4
        draft.scopes.append(self)
        draft.opened.append(self)

    @property
    def chance(self) -> Chance:
        """The choices of the drawing."""
        return self.draft.chance

    def add(self, text: str) -> bool:
        """Executes one statement and keeps it if it went well."""
        before = self.env.copy()
        try:
            exec(self._inside(text), self.env)
        except Exception:
            self._forget(before)
            return False
        made = [value for key, value in self.env.items() if key not in before]
        policy = self.draft.policy
        if not all(is_sound(value, policy) for value in made):
            self._forget(before)
            return False
        if not made and not all(is_sound(value, policy) for value in before.values()):
            raise Rejected("a value changed in place is no longer finite")
        self.lines.append(text)
        return True

    def value(self, text: str) -> Any:
        """What an expression gives here. Raises Rejected if it raises."""
        seen = self.env.copy()
        try:
            exec(self._inside(f"found = {text}"), seen)
        except Exception as error:
            raise Rejected(f"value: {error}") from error
        return seen["found"]

    def block(self, header: str) -> Scope:
        """A scope whose statements run inside a with block; its names are seen here too."""
        return Scope(self.draft, self.env, (*self.headers, header))

    def nested(self, params: dict[str, Any]) -> Scope:
        """The inside of a nested function with these parameters; it sees the names of this scope."""
        return Scope(self.draft, self.env | params, self.headers)

    def close(self, inner: Scope) -> bool:
        """Takes a with block's statements over. False if there are none."""
        self.draft.scopes.remove(inner)
        if inner.lines:
            self.lines.append(f"{inner.headers[-1]}\n{indent(chr(10).join(inner.lines), '    ')}")
        return bool(inner.lines)

    def close_function(self, inner: Scope, head: str, result: str) -> bool:
        """Defines the nested function whose inside was drawn."""
        self.draft.scopes.remove(inner)
        body = "\n".join([*inner.lines, f"return {result}"])
        return self.add(f"{head}\n{indent(body, '    ')}")

    def tensors(self, wanted: Wanted = lambda tensor: True) -> list[str]:
        """Names of all tensors that fit, oldest first."""
        return [
            name
            for name, value in self.env.items()
            if VARIABLE.fullmatch(name) and isinstance(value, torch.Tensor) and _fits(value, wanted)
        ]

    def choose(self, wanted: Wanted = lambda tensor: True) -> str | None:
        """One tensor that fits, a recent one rather than an old one; None if there is none."""
        names = self.tensors(wanted)
        if not names:
            return None
        last = len(names) - 1
        given = [name for name in names if name in self.draft.params]
        if given and self.chance.flip(self.draft.policy.fresh):
            return self.chance.pick(given)
        if self.chance.flip(self.draft.policy.hub):
            made = [name for name in names if name not in self.draft.params]
            return self.chance.pick((made or names)[:HUBS])
        if self.chance.flip(self.keen):
            return names[last]
        return names[max(self.chance.between(0, last), self.chance.between(0, last))]

    def _inside(self, text: str) -> str:
        for header in reversed(self.headers):
            text = f"{header}\n{indent(text, '    ')}"
        return text

    def _forget(self, before: dict[str, Any]) -> None:
        self.env.clear()
        self.env.update(before)


def _fits(tensor: torch.Tensor, wanted: Wanted) -> bool:
    """Whether the tensor is wanted; not one that cannot be asked, as a view of what was changed in place."""
    try:
        return wanted(tensor)
    except RuntimeError:
        return False


def is_sound(value: Any, policy: Policy) -> bool:
    """Whether a value is of a size that a program may go on with; what is no tensor is."""
    if isinstance(value, (tuple, list)):
        return all(is_sound(item, policy) for item in value)
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return True
    if value.numel() > policy.longest or value.layout is not torch.strided:
        return False
    if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
        return True
    if policy.largest == math.inf:
        return True
    try:
        return float(value.detach().abs().max()) <= policy.largest
    except RuntimeError:  # a batched tensor inside vmap
        return True


def is_float(tensor: torch.Tensor) -> bool:
    """Whether it holds real floating point numbers."""
    return tensor.is_floating_point()


def _names() -> dict[str, Any]:
    """What a source imports, whatever it uses."""
    made: dict[str, Any] = {"__name__": "gradparity_draft", "torch": torch}
    exec("\n".join(IMPORTS.values()), made)
    return made
