"""Functions compiled ahead that change their inputs' data: with and without history, in part, under no_grad.

In: a probe, whose `compile` is the identity for eager. Out: what the caller's tensors hold afterwards, their
history and versions, and gradients that flow through what was written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.storages import history, share
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "in-place")


@scenario(tags=TAGS)
def aot_input_scaled_in_place(p: Probe) -> None:
    """An input without history is scaled: the caller's own tensor holds the result, and its version moved."""
    a, w = p.randn(3), p.leaf("w", p.randn(3, requires_grad=True))
    before, place = a._version, a.data_ptr()

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.mul_(2)
        return a * w

    out = p.compile(run)(a, w)
    p.value("a", a)
    p.event("moved", a._version > before, a.data_ptr() == place, *history(a))
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_input_changed_twice(p: Probe) -> None:
    """An input is changed, read and changed again: the result was computed from the state in between."""
    a, w = p.randn(3), p.leaf("w", p.randn(3, requires_grad=True))

    def run(a: Tensor, w: Tensor) -> Tensor:
        a.add_(1)
        middle = a.exp() * w
        a.mul_(3)
        return middle

    out = p.compile(run)(a, w)
    p.value("a", a)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_result_written_to_a_given_tensor(p: Probe) -> None:
    """With `out=` the result is the very tensor that was passed."""
    a, b, target = p.randn(3), p.randn(3), torch.zeros(3, dtype=p.dtype, device=p.device)
    out = p.compile(lambda x, y, into: torch.mul(x, y, out=into))(a, b, target)
    p.value("target", target)
    p.event("is target", out is target, share(out, target))


@scenario(tags=TAGS)
def aot_changed_intermediate_is_returned(p: Probe) -> None:
    """A function that changes its input in place and returns it returns the same object."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    h = x * 1
    out = p.compile(lambda a: a.mul_(2))(h)
    p.event("same object", out is h, *history(h))
    with p.backward():
        (out * h).sum().backward()


@scenario(tags=(*TAGS, "errors"))
def aot_leaf_changed_in_place(p: Probe) -> None:
    """A leaf that requires grad cannot be changed in place where it is differentiated: a RuntimeError."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    p.compile(lambda a: a.mul_(2).sum())(x)


@scenario(tags=(*TAGS, "errors"))
def aot_view_of_a_leaf_changed_in_place(p: Probe) -> None:
    """Nor can a view of such a leaf."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        a[0] = 1.0
        return a.sum()

    p.compile(run)(x)


@scenario(tags=TAGS)
def aot_leaf_changed_under_no_grad(p: Probe) -> None:
    """Under no_grad a parameter may be changed; what follows is differentiated at its new value."""
    w = p.leaf("w", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        with torch.no_grad():
            a.clamp_(min=0.25)
        return a.square().sum()

    out = p.compile(run)(w)
    p.value("w", w.detach())
    p.event("still a leaf", *history(w))
    with p.backward():
        out.backward()


@scenario(tags=TAGS)
def aot_history_is_written_into_an_input(p: Probe) -> None:
    """A buffer to which something differentiable is added requires grad afterwards, and is no leaf."""
    x, total = p.leaf("x", p.randn(3, requires_grad=True)), p.randn(3)

    def run(into: Tensor, a: Tensor) -> Tensor:
        into.add_(a.sin())
        return into.max()

    largest = p.compile(run)(total, x)
    p.event("total", *history(total), total.grad_fn is not None)
    with p.backward():
        (total.square().sum() + largest).backward()


@scenario(tags=TAGS)
def aot_slice_of_an_input_is_assigned(p: Probe) -> None:
    """Assigning to a slice cuts that part of the old history off and brings in the new one."""
    x, y = (p.leaf(name, p.randn(4, requires_grad=True)) for name in ("x", "y"))

    def run(into: Tensor, part: Tensor) -> Tensor:
        into[1:3] = part[:2] * 2
        return into.exp()

    h = x * 3
    out = p.compile(run)(h, y)
    p.value("h", h.detach())
    with p.backward():
        (out + h).sum().backward()


@scenario(tags=TAGS)
def aot_input_zeroed_and_filled(p: Probe) -> None:
    """An intermediate is cleared and filled anew: nothing flows to where it came from, all to the source."""
    x, y = (p.leaf(name, p.randn(3, requires_grad=True)) for name in ("x", "y"))

    def run(into: Tensor, source: Tensor) -> None:
        into.zero_()
        into.copy_(source.tanh())

    h = x * 2
    result = p.compile(run)(h, y)
    p.event("returns", result)
    with p.backward():
        h.sum().backward()


@scenario(tags=TAGS)
def aot_detached_alias_is_written(p: Probe) -> None:
    """Writing through `detach()` changes the value and the version, and leaves the history alone."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        a.detach().mul_(2)
        return a.sin()

    h = x + 1
    before = h._version
    out = p.compile(run)(h)
    p.value("h", h.detach())
    p.event("moved", h._version > before)
    with p.backward():
        (out + h).sum().backward()


@scenario(tags=TAGS)
def aot_data_attribute_is_written(p: Probe) -> None:
    """Writing through `.data` changes the value and neither the version nor the history."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    weight = p.randn(3)

    def run(a: Tensor, b: Tensor) -> Tensor:
        b.data.mul_(2)
        return a * b

    before = weight._version
    out = p.compile(run)(x, weight)
    p.value("weight", weight)
    p.event("moved", weight._version > before)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_intermediate_changed_under_no_grad(p: Probe) -> None:
    """An intermediate changed under no_grad keeps its history, and what follows sees the new value."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        with torch.no_grad():
            a.add_(10)
        return a.square()

    h = x * 3
    out = p.compile(run)(h)
    p.value("h", h.detach())
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_counter_over_three_calls(p: Probe) -> None:
    """An integer counter that the function advances counts every call, not only the first."""
    x, count = p.leaf("x", p.randn(3, requires_grad=True)), p.tensor(0)

    def run(a: Tensor, n: Tensor) -> Tensor:
        n.add_(1)
        return a / n

    call = p.compile(run)
    for step in range(3):
        with p.backward():
            call(x, count.clone() if step == 2 else count).sum().backward()
        p.value(f"count{step}", count)


@scenario(tags=TAGS, fp64=False)
def aot_input_filled_with_random_numbers(p: Probe) -> None:
    """Noise that the function draws into its input is the noise that eager draws."""
    x, noise = p.leaf("x", p.randn(4, requires_grad=True)), torch.empty(4, device=p.device)

    def run(a: Tensor, into: Tensor) -> Tensor:
        into.normal_()
        return a * into.abs()

    out = p.compile(run)(x, noise)
    p.value("noise", noise)
    with p.backward():
        out.sum().backward()


@scenario(tags=TAGS)
def aot_rows_added_to_an_input(p: Probe) -> None:
    """Rows are added at indices, one of them twice: the gradient picks the same rows."""
    table, rows = p.randn(4, 2), p.leaf("rows", p.randn(3, 2, requires_grad=True))

    def run(into: Tensor, where: Tensor, what: Tensor) -> Tensor:
        into.index_add_(0, where, what * 2)
        return into.sin()

    out = p.compile(run)(table, p.tensor([1, 3, 1]), rows)
    p.value("table", table.detach())
    with p.backward():
        (out.sum() + table[1].sum()).backward()


@scenario(tags=(*TAGS, "no-grad"))
def aot_mutation_without_any_gradient(p: Probe) -> None:
    """A function that only updates its inputs under no_grad, as an optimizer does, in three steps."""
    weight, grad, state = p.randn(3), p.randn(3), p.randn(3)

    def run(weight: Tensor, grad: Tensor, state: Tensor) -> None:
        state.mul_(0.9).add_(grad, alpha=0.1)
        weight.sub_(state, alpha=0.5)

    call = p.compile(run)
    with torch.no_grad():
        for step in range(3):
            call(weight, grad, state)
            p.value(f"step{step}", (weight.clone(), state.clone()))


@scenario(tags=TAGS)
def aot_mutation_before_an_exception(p: Probe) -> None:
    """A call that raises after a change in place leaves the change behind, as does the next, sound one."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    seen = p.randn(3)

    def run(a: Tensor, b: Tensor, other: Tensor) -> Tensor:
        b.add_(1)
        return a @ other

    call = p.compile(run)
    try:
        call(x, seen, p.randn(4))
    except RuntimeError as error:
        p.event("raised", type(error).__name__)
    p.value("changed once", seen)
    out = call(x, seen, p.randn(3))
    p.value("changed twice", seen)
    with p.backward():
        out.backward()


@scenario(tags=TAGS)
def aot_versions_of_inputs_changed_several_times(p: Probe) -> None:
    """Each operation in place counts in the version of an input, also on a row of it or under `no_grad`."""
    a, b, c = p.randn(3), p.randn(2, 3), p.randn(3)
    versions = [a._version, b._version, c._version]

    def run(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.add_(1)
        a.mul_(2)
        b[0].mul_(3)
        b[1] = a
        b.sin_()
        with torch.no_grad():
            c.add_(1)
            c.mul_(2)
        return a + b.sum(0) + c

    p.compile(run)(a, b, c)
    p.event("rose", *(t._version - before for t, before in zip((a, b, c), versions, strict=True)))


@scenario(tags=TAGS)
def aot_versions_of_outputs_changed_in_place(p: Probe) -> None:
    """A result that was changed in place says how often, also one that a formula saves at the end."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 2
        y.add_(1).mul_(0.5)
        y.exp_()
        z = torch.zeros(4, dtype=p.dtype, device=p.device)
        z[1:] = x.detach()
        return y, y[1:], z

    y, view, z = p.compile(run)(x)
    p.event("versions", y._version, view._version, z._version)
    with p.backward():
        (y.sum() + view.sum()).backward()


@scenario(tags=TAGS)
def aot_versions_of_running_statistics(p: Probe) -> None:
    """A batch norm writes its running statistics behind the version counter, not so its count of batches."""
    norm = p.module(torch.nn.BatchNorm1d(3))
    before = [buffer._version for buffer in norm.buffers()]
    with p.backward():
        p.compile(norm)(p.randn(4, 3)).pow(2).sum().backward()
    p.event("rose", *(b._version - v for b, v in zip(norm.buffers(), before, strict=True)))


@scenario(tags=TAGS)
def aot_error_tells_the_version_of_a_changed_input(p: Probe) -> None:
    """A tensor that a formula outside has saved is changed twice: the error names its version."""
    x, w = p.randn(3), p.leaf("w", p.randn(3, requires_grad=True))
    loss = (x * w).sum()

    def run(x: Tensor) -> Tensor:
        x.add_(1)
        x.mul_(2)
        return x.sum()

    p.compile(run)(x)
    try:
        with p.backward():
            loss.backward()
    except RuntimeError as error:
        p.event("error", str(error).split("is at ")[-1][:60])


@scenario(tags=TAGS)
def aot_views_returned_in_inference_mode(p: Probe) -> None:
    """In inference mode, views of a result come out as anywhere."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[0]

    with torch.inference_mode():
        y, first = p.compile(run)(p.randn(2, 3))
    p.value("first", first)
    p.event("shares", first.data_ptr() == y.data_ptr(), y.is_inference(), first.is_inference())


#: tensors with gaps in memory.
GAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns": lambda a: a[:, 1:14],
    "every_second_row": lambda a: a[::2],
    "every_second_column": lambda a: a[:, ::2],
    "transposed_columns": lambda a: a.t()[:, :11],
    "a_diagonal": lambda a: a.diagonal(),
}


def _register_gaps(name: str) -> None:
    def body(p: Probe) -> None:
        w, given = p.leaf("w", p.randn(1, requires_grad=True)), GAPS[name](p.randn(19, 19))

        def run(w: Tensor, given: Tensor) -> Tensor:
            given.mul_(3).add_(0.1).sigmoid_()
            return given.add(1).tanh_() * w

        out = p.compile(run)(w, given)
        p.value("results", (out, given))
        with p.backward():
            out.sum().backward()

    body.__name__ = f"aot_gaps_stay_in_{name}_of_an_input"
    body.__doc__ = "Kernels round otherwise where a tensor has gaps in memory: a change leaves them there."
    scenario(tags=TAGS)(body)


for _name in GAPS:
    _register_gaps(_name)


@scenario(tags=(*TAGS, "rnn"))
def aot_gated_cells_of_odd_width(p: Probe) -> None:
    """The cells of recurrent networks change chunks of one product in place."""
    cells = p.module(torch.nn.ModuleList([torch.nn.GRUCell(5, 7), torch.nn.LSTMCell(7, 6)]))

    def run(x: Tensor) -> Tensor:
        hidden, state = x.new_zeros(3, 7), (x.new_zeros(3, 6), x.new_zeros(3, 6))
        for step in x.unbind(1):
            hidden = cells[0](step, hidden)
            state = cells[1](hidden, state)
        return state[0].square().sum() + state[1].sum()

    call = p.compile(run)
    for number in range(2):
        loss = call(p.randn(3, 4, 5))
        p.value(f"loss{number}", loss)
        with p.backward():
            loss.backward()
