"""Sums of three gradients, when several outputs of a function compiled ahead reach one value.

In: a probe, whose `compile` is the identity for eager. Out: gradients, whose last bits say in which order
they were added up.
"""

from __future__ import annotations

from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "order")


def _shared(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs. `scale` gets three gradients: the middle two by way of both outputs, the last one, which
    eager adds last, by way of the first output only."""
    numerator = scale * x.square()
    denominator = scale + scale * (x - x * x)
    return numerator / denominator, denominator.log()


def _inputs(p: Probe) -> tuple[Tensor, Tensor]:
    return p.leaf("x", p.rand(64, requires_grad=True)), p.leaf("scale", p.rand(64, requires_grad=True))


def _backward(p: Probe, *outputs: Tensor) -> None:
    with p.backward():
        sum((output * p.rand(64)).sum() for output in outputs).backward()


@scenario(tags=TAGS)
def aot_sum_at_a_leaf_from_two_outputs(p: Probe) -> None:
    """A leaf gets its three gradients in the order of its uses, the last use first."""
    _backward(p, *p.compile(lambda x, scale: _shared(x.sin(), scale + 0.5))(*_inputs(p)))


@scenario(tags=TAGS)
def aot_sum_at_an_input_with_history_from_two_outputs(p: Probe) -> None:
    """So does an input that was computed; it is used outside too, before and after the call."""
    x, scale = _inputs(p)
    computed = scale.exp()
    before = computed.sqrt()
    outputs = p.compile(_shared)(x.sin(), computed)
    _backward(p, before, *outputs, computed.cos())


@scenario(tags=TAGS)
def aot_sum_at_a_hidden_value_from_two_outputs(p: Probe) -> None:
    """So does a value that the function keeps to itself."""
    _backward(p, *p.compile(lambda x, scale: _shared(x.sin(), scale.exp()))(*_inputs(p)))


@scenario(tags=TAGS)
def aot_sum_at_a_returned_value_from_two_outputs(p: Probe) -> None:
    """So does a value that is returned as well; a hook on it sees the sum, used or not."""
    x, scale = _inputs(p)

    def run(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        middle = scale.exp()
        return *_shared(x.sin(), middle), middle

    call = p.compile(run)
    for used in (2, 3):
        outputs = call(x, scale)
        outputs[2].register_hook(p.hook(f"middle of {used}"))
        _backward(p, *outputs[:used])


@scenario(tags=TAGS)
def aot_sum_of_two_at_a_returned_value_and_its_use(p: Probe) -> None:
    """A returned value gets a gradient from the caller, and one by way of each of two other outputs."""
    x, scale = _inputs(p)

    def run(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        middle = x.exp()
        used_first, used_last = middle.sin(), middle * scale
        first = used_last.cos()
        return middle, first, used_first.sigmoid()

    _backward(p, *p.compile(run)(x, scale))


@scenario(tags=(*TAGS, "hooks"))
def aot_sums_with_hooks_on_every_leaf(p: Probe) -> None:
    """Leaves are complete, and their hooks run, in eager's order where regions end for the sake of a sum."""
    leaves = [p.leaf(f"leaf {i}", p.rand(64, requires_grad=True)) for i in range(4)]
    for number, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(p.hook(f"leaf {number}", kind="post_acc"))

    def run(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
        ratio, log = _shared(a.sin(), b * c)
        return ratio * d, log + d * c, (ratio * log * b).tanh()

    call = p.compile(run)
    for _ in range(2):
        _backward(p, *call(*leaves))
    _backward(p, call(*leaves)[1])
