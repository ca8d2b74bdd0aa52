"""Losses and look-ups in which some labels count for nothing, and labels that are out of range.

In: a probe, whose `compile` is the identity for eager. Out: each loss and its gradient. Operators that are
taken apart before they are compiled are taken apart for labels that all count, too easily.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "labels")

_LABELS = torch.tensor([2, 0, 4, 2, 1])
_ROWS = torch.tensor(
    [[3, 0, -1, 2, 1], [-1, 3, 2, 1, 0], [2, 2, -1, -1, 4], [0, 1, 2, 3, 4], [4, -1, 4, -1, -1]]
)
_WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 1.5])

#: by name, losses of 5 rows of 5 scores.
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "labels_that_end": lambda x: functional.multilabel_margin_loss(x, _ROWS.to(x.device)),
    "labels_that_end_one_by_one": lambda x: functional.multilabel_margin_loss(
        x, _ROWS.to(x.device), reduction="none"
    ),
    "labels_of_one_row": lambda x: functional.multilabel_margin_loss(x[0], _ROWS[0].to(x.device)),
    "an_ignored_label": lambda x: functional.cross_entropy(x, _LABELS.to(x.device), ignore_index=2),
    "all_labels_ignored": lambda x: functional.cross_entropy(
        x, torch.full((5,), -100, device=x.device), reduction="sum"
    ),
    "an_ignored_label_smoothed": lambda x: functional.cross_entropy(
        x, _LABELS.to(x.device), _WEIGHTS.to(x), ignore_index=0, label_smoothing=0.2
    ),
    "a_label_without_weight": lambda x: functional.nll_loss(
        x.log_softmax(1), _LABELS.to(x.device), _WEIGHTS.to(x), reduction="none"
    ),
    "an_ignored_label_of_pixels": lambda x: functional.nll_loss(
        x.reshape(1, 5, 1, 5), _LABELS.to(x.device).reshape(1, 1, 5), ignore_index=4
    ),
    "margins_with_weights": lambda x: functional.multi_margin_loss(
        x, _LABELS.to(x.device), p=2, margin=0.5, weight=_WEIGHTS.to(x)
    ),
    "a_padded_row": lambda x: functional.embedding(_LABELS.to(x.device), x, padding_idx=2).square(),
    "padded_bags": lambda x: functional.embedding_bag(
        _LABELS.to(x.device), x, torch.tensor([0, 0, 3], device=x.device), mode="mean", padding_idx=2
    ),
    "the_largest_of_padded_bags": lambda x: functional.embedding_bag(
        _LABELS.to(x.device), x, torch.tensor([0, 2, 3], device=x.device), mode="max", padding_idx=-1
    ),
}


@scenario(tags=TAGS)
def aot_losses_of_labels_that_count_for_nothing(p: Probe) -> None:
    """One compilation serves all losses but those of several labels, which need sizes that are known."""
    x = p.leaf("x", p.randn(5, 5, requires_grad=True))
    for are_several in (True, False):
        chosen = {name: fn for name, fn in LOSSES.items() if name.startswith("labels") == are_several}
        losses = tuple(chosen.values())
        call = p.compile(lambda x, losses=losses: [loss(x) for loss in losses])
        for name, loss in zip(chosen, call(x), strict=True):
            p.value(name, loss)
            (grad,) = torch.autograd.grad(loss.sum(), x, retain_graph=True)
            p.value(f"gradient {name}", grad)


def _asserted(labels: Tensor, rows: Tensor, *text: str) -> Tensor:
    torch._assert_async((labels < 5).all(), *text)
    return rows.sin()


#: by name, what checks the values of the labels and rows that it is given.
CHECKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one_hot": lambda labels, rows: functional.one_hot(labels, 5) @ rows,
    "cross_entropy": lambda labels, rows: functional.cross_entropy(rows, labels),
    "embedding": functional.embedding,
    "gather": lambda labels, rows: rows.gather(0, labels[:, None]),
    "index_add": lambda labels, rows: rows.index_add(0, labels, rows),
    "asserted": lambda labels, rows: _asserted(labels, rows),
    "asserted_with_a_text": lambda labels, rows: _asserted(labels, rows, "too large"),
}


@scenario(tags=TAGS)
def aot_labels_out_of_range(p: Probe) -> None:
    """What checks its labels raises, also where the first labels were in range."""
    x = p.leaf("x", p.randn(5, 5).cpu().requires_grad_())  # such an error ends the use of a GPU
    for name, fn in CHECKED.items():
        call = p.compile(fn)
        for step, largest in enumerate((1, 7)):
            labels = torch.tensor([2, 0, 4, 2, largest])
            try:
                shown = call(labels, x)
            except (RuntimeError, IndexError) as error:
                p.event(f"{name} {step} raises", type(error).__name__, str(error).splitlines()[0])
            else:
                p.value(f"{name} {step}", shown)
