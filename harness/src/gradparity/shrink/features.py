"""features: what a script is made of, for telling one defect from another.

In: a script. Out: the names of what it calls and does, without variables and numbers.
"""

from __future__ import annotations

import ast
import re

from gradparity.generate.script import Script
from gradparity.shrink.parsed import Parsed, nodes

RECORDING = frozenset(
    ["randn", "rand", "randint", "tensor", "leaf", "watch", "value", "compile", "backward", "module"]
)
"""Methods of the probe that every script may call."""
NEUTRAL = frozenset(
    [
        ".requires_grad_",
        ".backward",
        "torch.autograd.backward",
        ".sum",
        ".mean",
        "Mult",
        "Add",
        "Sub",
        "super",
        ".__init__",
        ".parameters",
        ".named_parameters",
        "tuple",
        "torch.nn.Linear",
        ".to",
    ]
    + ["class torch.nn.Module"]
)
"""What every program has in one spelling or another, and what stands for operators that do not matter."""
NUMBERED = re.compile(r"\.?[a-z]\d*")
"""Names of layers and of functions that the program defines."""
MODULES = frozenset(("torch", "F", "p", "ctx", "math"))


def features(script: Script) -> tuple[str, ...]:
    """Names of functions, methods, infix operators, blocks and settings, sorted."""
    parsed = Parsed.of(script)
    found = {setting.partition("(")[2].partition("=")[0] or setting for setting in script.settings}
    defined = {node.name for node in nodes(parsed.trees) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes(parsed.trees):
        found.update(_of(node, defined))
    return tuple(sorted(name for name in found - NEUTRAL if not NUMBERED.fullmatch(name)))


def _of(node: ast.AST, defined: set[str]) -> list[str]:
    if isinstance(node, ast.Call):
        name = _name(node.func)
        head, _, rest = name.partition(".")
        if head == "p":
            return [] if rest in RECORDING else [f"p.{rest} {_kind(node)}".strip()]
        return [] if head in defined or not name or name == "f" else [name]
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return [type(node.op).__name__]
    if isinstance(node, ast.Assign) and any(isinstance(target, ast.Subscript) for target in node.targets):
        return ["[…] ="]
    if isinstance(node, ast.ClassDef):
        return [f"class {ast.unparse(base)}" for base in node.bases]
    return []


def _name(function: ast.expr) -> str:
    """ "torch.sin" of a function, ".view" of a method, "f" of a name."""
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    base: ast.expr = function
    while isinstance(base, ast.Attribute):
        base = base.value
    plain = isinstance(base, ast.Name) and base.id in MODULES
    return ast.unparse(function) if plain else f".{function.attr}"


def _kind(call: ast.Call) -> str:
    return next((str(ast.literal_eval(each.value)) for each in call.keywords if each.arg == "kind"), "")
