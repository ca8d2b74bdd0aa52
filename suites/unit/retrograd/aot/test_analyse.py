"""What a function does besides computing: mutation x alias, as literal plans and bit for bit as eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import retrograd
from retrograd import aot
from retrograd.errors import CaptureError
from retrograd.graph.joint_graph import AliasOf, ComputedOutput, ConstantOutput, JointValues, SameAs
from unit.retrograd.aot.against_eager import Make, agree, captured, leaf, plain, tensor, weights


@dataclass(frozen=True)
class Program:
    """A function with what the analysis has to find.

    Attributes:
        updates: per changed primal ``NAME: data``, ``shape`` or ``both``, ``unseen`` if autograd is not told.
        outputs: ``computed N``, ``same N``, ``alias of N``, ``view of value N``, ``constant``.
    """

    fn: Callable[..., Any]
    make: Make
    updates: Sequence[str] = ()
    outputs: Sequence[str] = ("computed",)


def data(*sizes: int) -> Make:
    """One tensor without grad."""

    def make() -> tuple[list[Tensor], list[Tensor]]:
        return [], [tensor(*sizes)]

    return make


def inner(*sizes: int) -> Make:
    """One tensor that requires grad and is no leaf."""

    def make() -> tuple[list[Tensor], list[Tensor]]:
        x = leaf(*sizes)
        return [x], [x * 1]

    return make


def given(*sizes: int) -> Make:
    """One leaf that requires grad."""

    def make() -> tuple[list[Tensor], list[Tensor]]:
        x = leaf(*sizes)
        return [x], [x]

    return make


def data_and_leaf() -> tuple[list[Tensor], list[Tensor]]:
    w = leaf(4, seed=5)
    return [w], [tensor(4), w]


def base_and_view() -> tuple[list[Tensor], list[Tensor]]:
    x = tensor(2, 3)
    return [], [x, x[0]]


def two_views() -> tuple[list[Tensor], list[Tensor]]:
    x = tensor(6)
    return [], [x[:4], x[2:]]


def inner_and_view() -> tuple[list[Tensor], list[Tensor]]:
    x = leaf(2, 3)
    h = x * 1
    return [x], [h, h[0]]


def twice_the_same() -> tuple[list[Tensor], list[Tensor]]:
    x = tensor(3)
    return [], [x, x]


def one_leaf_twice() -> tuple[list[Tensor], list[Tensor]]:
    x = leaf(3)
    return [x], [x, x]


def inner_twice() -> tuple[list[Tensor], list[Tensor]]:
    x = leaf(3)
    h = x * 1
    return [x], [h, h]


def adds(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def adds_and_returns_it(x: Tensor) -> Tensor:
    return x.mul_(2)


def counts(count: Tensor, w: Tensor) -> Tensor:
    count.add_(1)
    return w * count


def scales_without_grad(w: Tensor) -> Tensor:
    with torch.no_grad():
        w.mul_(2)
    return w * 3


def writes_through_a_view(x: Tensor) -> Tensor:
    x[0].add_(1)
    return x * 2


def writes_through_a_transpose_and_returns_it(x: Tensor) -> Tensor:
    y = x.t()
    y.add_(1)
    return y


def transposes(x: Tensor) -> Tensor:
    x.t_()
    return x * 2


def transposes_and_adds(x: Tensor) -> Tensor:
    x.t_()
    x.add_(1)
    return x * 2


def unsqueezes(x: Tensor) -> Tensor:
    x.unsqueeze_(0)
    return x + 1


def swaps(x: Tensor, y: Tensor) -> Tensor:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)
    return x - y


def writes_the_first(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x.sum() + y.sin().sum()


def writes_both(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    y.add_(1)
    return x.sum() - y.sum()


def writes_and_returns_views(x: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(1)
    return x[0], x.t()


def of_intermediate(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h, h.t()


def two_views_of_an_intermediate(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2
    return h[0], h[1:]


def intermediate_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x.exp()
    return h, h


def changed_intermediate(x: Tensor) -> Tensor:
    h = x.clone()
    h[0].mul_(3)
    return h.sin()


def unseen_by_data(x: Tensor) -> Tensor:
    x.data.add_(1)
    return x * 2


def unseen_by_detach(x: Tensor) -> Tensor:
    x.detach().add_(1)
    return x * 2


def writes_then_undoes(x: Tensor) -> Tensor:
    x.add_(1)
    x.sub_(1)
    return x * 2


PROGRAMS = {
    "computes only": Program(lambda x: x * 2, given(3)),
    "returns a number and a tensor": Program(
        lambda x: (3, x.sin(), None), given(3), (), ("constant", "computed", "constant")
    ),
    "returns its input": Program(lambda x: x, given(3), (), ("same 0",)),
    "returns an inner input": Program(lambda x: (x, x * 2), inner(3), (), ("same 0", "computed")),
    "returns a view of its input": Program(lambda x: x[0], given(2, 3), (), ("alias of 0",)),
    "returns an expanded input": Program(lambda x: x.expand(2, 3), given(3), (), ("alias of 0",)),
    "returns a view of an inner input": Program(lambda x: x.t(), inner(2, 3), (), ("alias of 0",)),
    "returns a detached input": Program(lambda x: x.detach(), given(3), (), ("alias of 0",)),
    "returns an intermediate and its view": Program(
        of_intermediate, given(2, 3), (), ("computed", "view of value")
    ),
    "returns two views of an intermediate": Program(
        two_views_of_an_intermediate, given(2, 3), (), ("view of value", "view of value")
    ),
    "returns an intermediate twice": Program(intermediate_twice, given(3), (), ("computed", "computed")),
    "returns a view of a number of elements 0": Program(lambda x: x[:0], given(3), (), ("alias of 0",)),
    "changes an intermediate": Program(changed_intermediate, given(2, 3)),
    "adds to data": Program(adds, data(3), ("args[0]: data",)),
    "adds to an inner input": Program(adds, inner(3), ("args[0]: data",)),
    "returns what it changed": Program(adds_and_returns_it, data(3), ("args[0]: data",), ("same 0",)),
    "returns an inner input that it changed": Program(
        adds_and_returns_it, inner(3), ("args[0]: data",), ("same 0",)
    ),
    "changes a counter": Program(counts, data_and_leaf, ("args[0]: data",)),
    "changes a leaf under no_grad": Program(scales_without_grad, given(3), ("args[0]: data unseen",)),
    "changes an inner input under no_grad": Program(scales_without_grad, inner(3), ("args[0]: data unseen",)),
    "writes through a view": Program(writes_through_a_view, data(2, 3), ("args[0]: data",)),
    "writes through a view of an inner input": Program(
        writes_through_a_view, inner(2, 3), ("args[0]: data",)
    ),
    "writes through a view and returns it": Program(
        writes_through_a_transpose_and_returns_it, data(2, 3), ("args[0]: data",), ("alias of 0",)
    ),
    "writes through a view of an inner input and returns it": Program(
        writes_through_a_transpose_and_returns_it, inner(2, 3), ("args[0]: data",), ("alias of 0",)
    ),
    "returns views of what it changed": Program(
        writes_and_returns_views, data(2, 3), ("args[0]: data",), ("alias of 0", "alias of 0")
    ),
    "returns views of the inner input that it changed": Program(
        writes_and_returns_views, inner(2, 3), ("args[0]: data",), ("alias of 0", "alias of 0")
    ),
    "transposes in place": Program(transposes, data(2, 3), ("args[0]: shape unseen",)),
    "transposes and adds in place": Program(transposes_and_adds, data(2, 3), ("args[0]: both",)),
    "unsqueezes in place": Program(unsqueezes, data(3), ("args[0]: shape unseen",)),
    "swaps two inputs": Program(
        swaps, lambda: ([], [tensor(3), tensor(3, seed=4)]), ("args[0]: data", "args[1]: data")
    ),
    "changes a detached leaf": Program(unseen_by_detach, given(3), ("args[0]: data",)),
    "changes and undoes": Program(writes_then_undoes, data(3), ("args[0]: data",)),
    "reads a view of its input": Program(lambda x, y: x.sum() * y.sum(), base_and_view),
    "reads one leaf twice": Program(lambda x, y: x * y, one_leaf_twice),
    "reads one inner input twice": Program(lambda x, y: x * y, inner_twice),
    "changes one input given twice": Program(writes_the_first, twice_the_same, ("args[0]: data",)),
    "changes one inner input given twice": Program(writes_the_first, inner_twice, ("args[0]: data",)),
    "changes a base, reads its view": Program(
        writes_the_first, base_and_view, ("base of shared memory: data",)
    ),
    "changes a base and its view": Program(writes_both, base_and_view, ("base of shared memory: data",)),
    "changes one of two views": Program(writes_the_first, two_views, ("base of shared memory: data",)),
    "changes both of two views": Program(writes_both, two_views, ("base of shared memory: data",)),
    "changes an inner base, reads its view": Program(
        writes_the_first, inner_and_view, ("base of shared memory: data",)
    ),
    "changes an inner base and its view": Program(
        writes_both, inner_and_view, ("base of shared memory: data",)
    ),
}


def updates(joint: JointValues) -> list[str]:
    found = []
    for update in joint.updates:
        what = "both" if update.view and update.value is not None else "shape" if update.view else "data"
        found.append(f"{joint.primals[update.primal].name}: {what}" + " unseen" * update.unseen)
    return found


def outputs(joint: JointValues) -> list[str]:
    return [_plan(plan) for plan in joint.outputs]


def _plan(plan: Any) -> str:
    match plan:
        case ConstantOutput():
            return "constant"
        case ComputedOutput():
            return "computed"
        case SameAs(source):
            return f"same {source}"
        case AliasOf(source=None):
            return "view of value"
        case AliasOf(source=source):
            return f"alias of {source}"
    raise AssertionError(plan)


@pytest.mark.parametrize("program", [pytest.param(p, id=name) for name, p in PROGRAMS.items()])
def test_plans(program: Program) -> None:
    _, args = program.make()
    joint = captured(program.fn, *args)
    assert updates(joint) == list(program.updates)
    assert outputs(joint) == list(program.outputs)


@pytest.mark.parametrize("policy", ["min_cut", "save_all", "recompute_all"])
@pytest.mark.parametrize("program", [pytest.param(p, id=name) for name, p in PROGRAMS.items()])
def test_as_eager(program: Program, policy: str) -> None:
    agree(program.fn, program.make, partitioner=policy)


@pytest.mark.xfail(strict=True, reason="such a view is refused, though its dtype and offset are known")
def test_returns_a_view_of_another_dtype() -> None:
    agree(lambda x: x.view(torch.int32), data(3))


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
@pytest.mark.parametrize("change", [transposes, transposes_and_adds, adds, scales_without_grad, unsqueezes])
def test_a_changed_input_can_be_used_on(change: Callable[[Tensor], Tensor]) -> None:
    """Its history after the call is eager's."""

    def run(call: Callable[[Tensor], Tensor]) -> list[object]:
        x = leaf(2, 3)
        h = x.sin()
        y = call(h)
        ((h * weights(h)).sum() + y.sum()).backward()
        return [x.grad.tolist(), h.tolist(), h.grad_fn is not None]  # type: ignore[union-attr]

    assert run(aot.function(change, backend="eager")) == run(change)


def changes_a_leaf(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def gives_other_memory(x: Tensor) -> Tensor:
    x.set_(torch.ones(3))
    return x * 2


def resizes_storage(x: Tensor) -> Tensor:
    y = x * 2
    x.untyped_storage().resize_(0)
    return y


def switches_requires_grad(x: Tensor) -> Tensor:
    y = x * 2
    x.requires_grad_(False)
    return y


def runs_a_backward(x: Tensor) -> Tensor:
    (x * 2).sum().backward()
    return x * 3


REFUSED = {
    "changes a leaf that requires grad": (changes_a_leaf, True, "leaf Variable that requires grad"),
    "gives an input other memory": (gives_other_memory, False, "args[0] other memory"),
    "resizes the storage of an input": (resizes_storage, False, "resize_() on an invalid python storage"),
    "switches requires_grad of an input": (switches_requires_grad, True, "switches requires_grad of args[0]"),
    "changes data behind the version counter": (unseen_by_data, True, "args[0] through .data"),
    "accumulates into an input": (runs_a_backward, True, "accumulates into args[0]"),
}


@pytest.mark.parametrize(("fn", "grad", "text"), [pytest.param(*r, id=name) for name, r in REFUSED.items()])
def test_what_a_graph_cannot_hold_is_refused(fn: Any, grad: bool, text: str) -> None:
    with pytest.raises(CaptureError) as refused:
        captured(fn, tensor(3, grad=grad))
    assert text in str(refused.value)
    assert refused.value.reason.stage == "aot.capture"
    assert refused.value.reason.way_out


def test_changing_the_shape_of_what_is_differentiable_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes the shape of args\[0\]"):
        captured(transposes, leaf(2, 3) * 1)


@pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")
@pytest.mark.parametrize(("fn", "grad", "text"), [pytest.param(*r, id=name) for name, r in REFUSED.items()])
def test_what_is_refused_runs_as_eager(fn: Any, grad: bool, text: str) -> None:
    def run(call: Any) -> tuple[Any, ...]:
        x = tensor(3, grad=grad)
        try:
            y = call(x)
        except RuntimeError as error:
            return type(error), str(error), x.tolist()
        return y.tolist(), x.requires_grad, x.grad is None or x.grad.tolist(), x.untyped_storage().size()

    assert run(aot.function(fn, backend="eager")) == run(fn)
    if isinstance(run(fn)[0], type):
        assert not retrograd.explain().fallbacks  # an error of the program's own is no fallback
        return
    *_, reason = retrograd.explain().fallbacks
    assert text in reason.text or "(untyped_storage)" in reason.text  # seen before the call that is refused


DATA = data(4, 4)


def turned(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 1
    view = base.t()
    view.cumsum_(0)
    return view[1:], base, view


def stepped(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 1
    view = base[:, ::2]
    view.cumsum_(0)
    return view[1:], base


@pytest.mark.parametrize("make", [plain(leaf(4, 4)), DATA], ids=["leaf", "data"])
@pytest.mark.parametrize("fn", [turned, stepped])
def test_a_change_in_place_keeps_the_layout(fn: Callable[..., Any], make: Make) -> None:
    agree(fn, make, is_differentiated=make is not DATA)


@pytest.mark.parametrize(
    "spread", [lambda x: x.expand(2, 3), lambda x: x.expand_as(x)[0], lambda x: x.unfold(-1, 2, 1)[:, :1]]
)
@pytest.mark.parametrize("write", [torch.Tensor.fill_, torch.Tensor.mul_, torch.Tensor.__imul__])
def test_a_write_to_what_was_spread_is_not_captured(
    spread: Callable[[Tensor], Tensor], write: Callable[[Tensor, float], Tensor]
) -> None:
    """Functionalisation adds what is written to such a view to what was there, and rounds on the way."""

    def fn(x: Tensor) -> Tensor:
        made = x * 1
        write(spread(made), 2.0)
        return made

    with pytest.raises(CaptureError, match="expanded or unfolded"):
        captured(fn, tensor(1, 3))


def spread_and_filled(x: Tensor) -> Tensor:
    made = x * 1
    made.expand(2, 3)[0].fill_(3.0)
    return made


@pytest.mark.parametrize(
    ("x", "fn"),
    [
        (TwoTensor(torch.zeros(1, 3), torch.ones(1, 3)), spread_and_filled),
        (torch.zeros(2, 1, 3), torch.func.vmap(spread_and_filled)),
    ],
    ids=["subclass", "vmap"],
)
def test_nor_is_one_of_a_subclass_or_inside_a_transform(x: Tensor, fn: Any) -> None:
    with pytest.raises(CaptureError, match="expanded or unfolded"):
        captured(fn, x)


def test_a_list_in_which_memory_stands_twice_is_not_captured() -> None:
    def twice(x: Tensor) -> Tensor:
        made = x * 1
        torch._foreach_add_([made[:2], made[1:]], 2.0)
        return made

    with pytest.raises(CaptureError, match="two share memory"):
        captured(twice, tensor(3))
