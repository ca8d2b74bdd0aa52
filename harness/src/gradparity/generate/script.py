"""Script: a program as data.

In: what was drawn, or a JSON text. Out: a frozen value with a JSON form and one Python source. That source is
the program's only meaning: the tester executes it, the shrinker cuts it, a stand-alone repro contains it.

A script has definitions (functions and classes) and steps. A step has a title and lines; a line is one
complete Python statement, which may span several text lines. All of them run in `run(p)`, where `p` is a
`Probe` or whatever stands in for one.
"""

from __future__ import annotations

import re
from textwrap import indent

from pydantic import BaseModel, ConfigDict, ValidationError

from gradparity.errors import CaseError

IMPORTS = {
    "F": "import torch.nn.functional as F",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "contextlib": "import contextlib",
    "flex_attention": "from torch.nn.attention.flex_attention import flex_attention",
    "functorch_config": "import torch._functorch.config as functorch_config",
    "gc": "import gc",
    "inductor_config": "import torch._inductor.config as inductor_config",
    "dynamo_config": "import torch._dynamo.config as dynamo_config",
    "math": "import math",
    "np": "import numpy as np",
    "random": "import random",
    "threading": "import threading",
    "TwoTensor": "from torch.testing._internal.two_tensor import TwoTensor",
    "weakref": "import weakref",
}
"""Names that a source may use, and the line that imports each."""

WIDER = {
    "torch.float16": "torch.float64",
    "torch.bfloat16": "torch.float64",
    "torch.float32": "torch.float64",
    "torch.complex64": "torch.complex128",
}
NARROW_NAME = re.compile("|".join(rf"{re.escape(name)}\b" for name in WIDER))


class Frozen(BaseModel):
    """Plain data that neither changes nor has fields that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Step(Frozen):
    """A stretch of the program: what it is about, and its statements."""

    title: str
    lines: tuple[str, ...] = ()


class Script(Frozen):
    """A program as data.

    `policy`, `seed`: how it was drawn; `attempt`: how many drawings eager rejected before. `intends`: names
    of the errors that eager may raise here (see `intended.py`), part of the specification. `fp64`: whether a
    float64 run makes sense. `cold`: the subject starts without caches. `settings`: decorators of `run`.
    """

    policy: str = "hand"
    seed: int = 0
    attempt: int = 0
    doc: str = ""
    intends: tuple[str, ...] = ()
    fp64: bool = True
    cold: bool = False
    settings: tuple[str, ...] = ()
    definitions: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def source(self) -> str:
        """The Python text: imports, definitions and `def run(p)`."""
        body = [_titled(step) for step in self.steps if step.lines]
        head = [*(f"@{setting}" for setting in self.settings), "def run(p):\n"]
        run = "\n".join(head) + indent("\n".join(body) or "pass", "    ")
        parts = [*self.definitions, run]
        used = [line for name, line in IMPORTS.items() if _uses(name, parts)]
        imports = "\n".join(["import torch", *sorted(used)])
        return "\n\n\n".join([imports, *parts]) + "\n"

    @property
    def wide_source(self) -> str:
        """The source of the float64 reference run: every narrower dtype that it names is widened."""
        return widened(self.source)

    def to_text(self) -> str:
        """The JSON text; `from_text` is the inverse."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_text(cls, text: str) -> Script:
        """Reads a JSON text. Raises CaseError if it is no script."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise CaseError(f"not a script: {error.errors()[0]['msg']}") from error


def widened(source: str) -> str:
    """A text with every narrower dtype that it names widened."""
    return NARROW_NAME.sub(lambda match: WIDER[match[0]], source)


def _titled(step: Step) -> str:
    head = f"# {step.title}\n" if step.title else ""
    return head + "\n".join(step.lines)


def _uses(name: str, parts: list[str]) -> bool:
    pattern = re.compile(rf"(?<![\w.]){name}\b")
    return any(pattern.search(part) for part in parts)
