"""Where PyTorch's documentation states what eager does.

In: a symptom and hook kinds. Out: a page and what it says, in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradparity.verdict import Row, Verdict

BASE = "https://docs.pytorch.org/docs/stable/"


@dataclass(frozen=True)
class Page:
    """An address and what stands there."""

    address: str
    says: str

    def describe(self) -> str:
        """One line of Markdown."""
        return f"{self.address}: {self.says}"


HOOKS = Page(
    BASE + "notes/autograd.html#backward-hooks-execution",
    "whether and in which order hooks are called during a backward",
)
AUTOGRAD = Page(
    BASE + "notes/autograd.html#how-autograd-encodes-the-history",
    "how a backward computes gradients from the recorded graph",
)
GRAD = Page(
    BASE + "generated/torch.Tensor.grad.html",
    "`.grad` is None until a backward has reached the leaf, and accumulates from then on",
)
LAYOUT = Page(
    BASE + "autograd.html#default-gradient-layouts",
    "the strides that a new `.grad` has",
)
IN_PLACE = Page(
    BASE + "notes/autograd.html#in-place-correctness-checks",
    "a version counter finds saved tensors that were changed in place",
)
RANDOM = Page(BASE + "notes/randomness.html", "equal seeds give equal random numbers")
COMPILE = Page(
    BASE + "generated/torch.compile.html",
    "a compiled function may be slower or faster than the function, not something else",
)
ACCURACY = Page(BASE + "notes/numerical_accuracy.html", "which differences in the last bits are no bugs")

BY_SYMPTOM = {
    "hook-order": HOOKS,
    "hook-count": HOOKS,
    "hook-payload": HOOKS,
    "grad-none": GRAD,
    "grad-strides": LAYOUT,
    "grad-values": ACCURACY,
    "values": ACCURACY,
    "state-values": COMPILE,
    "state-version": IN_PLACE,
    "random-state": RANDOM,
    "invariant": RANDOM,
    "no-exception": IN_PLACE,
}


def page(row: Row) -> Page:
    """The page for this divergence."""
    symptom = row.symptom.removesuffix("-bits")
    if row.verdict is Verdict.HOOK_ORDER or symptom.startswith("event"):
        return HOOKS
    return BY_SYMPTOM.get(symptom, AUTOGRAD if symptom.startswith("grad") else COMPILE)
