"""A capture that writes copies of a layer down makes the graph that tracing all of them makes."""

from __future__ import annotations

import gc
import hashlib
import importlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from retrograd import aot
from retrograd.aot import repeated
from retrograd.aot.joint_capture import JointGraph, capture_divided
from retrograd.backends.base import Backend
from retrograd.backends.registry import EagerBackend, InductorBackend
from retrograd.graph.joint_graph import CaptureOptions, CaptureState
from retrograd.trace import blocks

DEPTH, WIDTH = 6, 8
Program = Callable[[Tensor], Any]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The copies that are written into graphs, in order."""
    found: list[Any] = []
    outputs = blocks.Instance.outputs

    def noted(copy: Any, args: Any) -> Any:
        found.append(copy)
        return outputs(copy, args)

    monkeypatch.setattr(blocks.Instance, "outputs", noted)
    return found


def _state_of(program: Program, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> CaptureState:
    """What Dynamo makes of a program."""
    found: list[CaptureState] = []

    def capture(state: CaptureState, manner: CaptureOptions) -> Any:
        found.append(state)
        return capture_divided(state, manner)

    with monkeypatch.context() as patched:
        patched.setattr(importlib.import_module("retrograd.aot.compiler"), "capture_graph", capture)
        torch._dynamo.reset()
        torch.compile(program, backend="retrograd", options={"backend": lambda gm, _: gm})(x)
    (state,) = found
    return state


def _expressions(joint: JointGraph) -> list[Any]:
    """What the graph computes, whatever the order of its calls: of each result how it is made, and all nodes
    with their notes."""
    known: dict[fx.Node, str] = {}
    draws = 0

    def made(value: Any) -> str:
        return repr(fx.map_arg(value, lambda node: known[node]))  # type: ignore[arg-type,return-value]

    *nodes, output = joint.gm.graph.nodes
    for node in nodes:
        is_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        draws += is_draw
        told = f"{node.op} {node.target} {made((node.args, node.kwargs))} {draws if is_draw else ''}"
        known[node] = hashlib.sha1(told.encode(), usedforsecurity=False).hexdigest()
    return [made(output.args), sorted((known[node], _notes(node)) for node in nodes)]


def _notes(node: fx.Node) -> str:
    value = node.meta["val"]
    forms = [
        (tuple(one.shape), one.stride(), one.storage_offset(), one.dtype, one.untyped_storage().nbytes())
        for one in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(one, Tensor)
    ]
    is_sum = node.target is torch.ops.aten.add.Tensor  # of contributions, in the name of the copy
    left_out = {"val", "seq_nr", *({"autograd_node"} if is_sum else ())}
    return f"{forms} {sorted((key, str(note)) for key, note in node.meta.items() if key not in left_out)}"


def _assert_equal(one: JointGraph, other: JointGraph) -> None:
    assert one.signature == other.signature
    for name in ("reenters", "offsets_matter"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.gradients.keys() == other.gradients.keys()
    assert _expressions(one) == _expressions(other)


class Stack(nn.Module):
    """Layers with a weight of their own, and a parameter that all share."""

    def __init__(
        self, layer: Callable[..., Tensor], loss: Callable[[list[Tensor]], Any], depth: int = DEPTH
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.layer, self.loss = layer, loss

    def forward(self, x: Tensor) -> Any:
        """The loss of what all layers give."""
        results, shared = [], self.scale.exp()
        for one in self.layers:
            x = self.layer(one, x, shared)
            results.append(x)
        return self.loss(results)


def views_at_the_end(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    return (residual(one, x, shared).sin() + 1).t().contiguous().t()


def assigns(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    inner = one(x) * 1
    inner[:, 1:3] = x[:, :2].sin() * shared[:2]
    return (x + inner).tanh()


class TwoValues(Stack):
    """Two values lead from each layer to the next."""

    def forward(self, x: Tensor) -> Any:
        """The loss of both."""
        left, right = x, x.sin()
        for one in self.layers:
            left, right = left + one(right).tanh() * self.scale, right.sin() * left.cos() + left
        return self.loss([left + right])


def residual(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    inner = F.gelu(one(F.layer_norm(x, (WIDTH,))))
    return x + inner.sin() * 0.5 + inner


def shares(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    inner = one(x).tanh() * shared + shared.sin()
    return (x + inner * shared).tanh()


def changes_inside(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    inner = one(x)
    inner += 1
    return (x + inner.mul_(0.5).sin()).tanh()


def without_grad(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax() + 1
    return (x + one(x / scale).relu() * scale).tanh()


def cast_inside(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inner = one(one(x))
    return (x + inner.float().sin()).tanh()


def turned(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    inner = one(x).t().relu()
    return (x.t() + inner * 2).sin().tanh().t() * 1.5


def dropped(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    return (x + F.dropout(one(x).relu() * shared, 0.3)).tanh().sin()


def joined(one: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
    left, right = one(x).chunk(2, dim=-1)
    return x + torch.cat([left.sin() * right, right], dim=-1).tanh()


def square(results: list[Tensor]) -> Tensor:
    return results[-1].square().mean()


#: layer, loss, context of the call, and copies that are written.
PROGRAMS: dict[str, tuple[Any, Any, Any, int]] = {
    "residual": (residual, square, nullcontext, 5),
    "shares": (shares, square, nullcontext, 5),
    "changes inside": (changes_inside, square, nullcontext, 5),
    "without grad inside": (without_grad, square, nullcontext, 5),
    "cast inside": (cast_inside, square, nullcontext, 5),
    "turned": (turned, square, nullcontext, 5),
    "dropped": (dropped, square, nullcontext, 5),
    "joined": (joined, square, nullcontext, 5),
    "assigns": (assigns, square, nullcontext, 5),
    "all results": (residual, lambda results: results, nullcontext, 5),
    "no grad": (residual, square, torch.no_grad, 5),
    "autocast": (residual, square, lambda: torch.autocast("cpu", dtype=torch.bfloat16), 5),
    # The gradient of the last copy lies like its output, and those of the others are turned.
    "views at the end": (views_at_the_end, square, nullcontext, 8),
    # The sum sends back an expanded gradient: the last copy is traced as usual, all others once more.
    "sum": (residual, lambda results: results[-1].sum(), nullcontext, 9),
}


@pytest.mark.parametrize("decompositions", [False, True], ids=["as traced", "decomposed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_graph_is_that_of_the_whole_trace(
    name: str, decompositions: bool, monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    layer, loss, context, copies = PROGRAMS[name]
    with context():
        state = _state_of(Stack(layer, loss), torch.rand(4, WIDTH), monkeypatch)
    if decompositions:
        state = replace(state, decompositions=InductorBackend().decompositions())
    found, divided = repeated.capture_graph(state, CaptureOptions())
    whole, structure = capture_divided(state, CaptureOptions())
    assert found.state is state
    assert divided.order == structure.order
    assert len(written) == copies
    _assert_equal(found, whole)


def _refused() -> Iterator[Any]:
    """Programs, inputs, and whether autocast is on."""
    x = torch.rand(4, WIDTH)
    yield pytest.param(Stack(residual, square), x.requires_grad_() * 2, False, id="input with a history")
    yield pytest.param(TwoValues(residual, square), torch.rand(4, WIDTH), False, id="two values")
    again = Stack(lambda *given: checkpoint(residual, *given, use_reentrant=False), square)
    yield pytest.param(again, torch.rand(4, WIDTH), False, id="checkpoints")
    normal = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(5)]
    yield pytest.param(nn.Sequential(*normal), torch.rand(4, WIDTH), False, id="statistics that change")
    tied = nn.Linear(WIDTH, WIDTH)
    kept = Stack(lambda one, x, shared: residual(tied, x, shared) + one(x), square)
    yield pytest.param(kept, torch.rand(4, WIDTH), True, id="weight whose cast autocast keeps")


@pytest.mark.parametrize(("program", "x", "is_autocast"), [*_refused()])
def test_what_cannot_be_written_is_traced(
    program: nn.Module, x: Tensor, is_autocast: bool, monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_autocast):
        state = _state_of(program, x, monkeypatch)
    found, _ = repeated.capture_graph(state, CaptureOptions())
    whole, _ = capture_divided(state, CaptureOptions())
    assert not written
    _assert_equal(found, whole)


def test_copy_that_is_given_something_else_is_traced(
    monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    """Dynamo's strides are not always those of the trace."""
    state = _state_of(Stack(residual, square), torch.rand(4, WIDTH), monkeypatch)
    fits = blocks.TracedBlock.fits
    monkeypatch.setattr(blocks.TracedBlock, "fits", lambda *given: len(written) != 2 and fits(*given))
    found, _ = repeated.capture_graph(state, CaptureOptions())
    assert len(written) == 2
    _assert_equal(found, capture_divided(state, CaptureOptions())[0])


def test_nothing_of_a_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an autograd node holds in Python must not lead back to it."""
    state = _state_of(Stack(residual, square), torch.rand(4, WIDTH), monkeypatch)
    found: list[weakref.ref[Any]] = []
    outputs = blocks.Instance.outputs

    def noted(copy: Any, args: Any) -> Any:
        found.append(weakref.ref(copy))
        return outputs(copy, args)

    monkeypatch.setattr(blocks.Instance, "outputs", noted)
    joint, _ = repeated.capture_graph(state, CaptureOptions())
    gc.collect()
    assert len(found) == DEPTH - 1
    assert [one() for one in found] == [None] * len(found)
    assert joint.state is state


def test_compiled_model_learns_as_in_eager() -> None:
    model, x = Stack(shares, square), torch.rand(4, WIDTH)
    torch._dynamo.reset()
    order: list[str] = []
    for name, one in model.named_parameters():
        one.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(x).backward()
    expected, grads = [*order], {name: one.grad.clone() for name, one in model.named_parameters()}  # type: ignore[union-attr]
    model.zero_grad()
    order.clear()
    torch.compile(model, backend="retrograd", options={"backend": "eager"})(x).backward()
    assert order == expected
    for name, one in model.named_parameters():
        torch.testing.assert_close(one.grad, grads[name], rtol=0, atol=0)


@pytest.mark.parametrize("backend", [EagerBackend(), InductorBackend()], ids=["as traced", "decomposed"])
def test_autocast_keeps_no_cast_of_an_input_that_is_no_leaf(backend: Backend) -> None:
    weights = [torch.rand(WIDTH, WIDTH, requires_grad=True) for _ in range(3)]
    x = torch.rand(4, WIDTH, requires_grad=True) * 2

    def run(x: Tensor) -> Tensor:
        return sum((F.linear(x, one).float() for one in weights), torch.zeros(()))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = aot.create_state(run, (x,), decompositions=backend.decompositions())
        joint = aot.capture(state)
    back = [node for node in joint.gm.graph.nodes if node.meta.get("is_backward")]
    casts = [node for node in back if any(name in str(node.target) for name in ("to_copy", "convert"))]
    made = [node.meta["val"] for node in casts if node.meta["val"].shape == x.shape]
    assert sum(value.dtype is torch.float32 for value in made) == len(weights)


@pytest.fixture
def operators() -> Iterator[Any]:
    """An operator that gives a tensor and a size, as the attention of a GPU does; one with a Function."""
    with torch.library._scoped_library("retrograd_repeated", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("retrograd_repeated::doubled", torch.empty_like, lib=library)
        torch.library.register_autograd(
            "retrograd_repeated::doubled", lambda ctx, grad: grad * 2, lib=library
        )
        library.define("measured(Tensor x) -> (Tensor, SymInt)")
        library.impl("measured", lambda x: (x.sin(), x.shape[0]), "CompositeExplicitAutograd")
        torch.library.register_fake(
            "retrograd_repeated::measured", lambda x: (torch.empty_like(x), x.shape[0]), lib=library
        )
        yield torch.ops.retrograd_repeated


def test_calls_that_give_numbers_beside_tensors_are_written(
    operators: Any, monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    measured = operators.measured
    stack = Stack(lambda one, x, shared: residual(one, x, shared) + measured(x.detach())[0], square)
    state = _state_of(stack, torch.rand(4, WIDTH), monkeypatch)
    found, _ = repeated.capture_graph(state, CaptureOptions())
    assert len(written) == DEPTH - 1
    values = [node.meta["val"] for node in found.gm.graph.nodes if "measured" in str(node.target)]
    assert [type(one) for one in values[-1]] == [FakeTensor, int]
    _assert_equal(found, capture_divided(state, CaptureOptions())[0])


def test_functions_in_copies_are_known(
    operators: Any, monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    doubled = operators.doubled
    stack = Stack(lambda one, x, shared: residual(one, doubled(x), shared), square)
    state = _state_of(stack, torch.rand(4, WIDTH), monkeypatch)
    found, _ = repeated.capture_graph(state, CaptureOptions())
    assert len(written) == DEPTH - 1
    assert [region.has_functions for region in found.signature.regions] == [True]
    _assert_equal(found, capture_divided(state, CaptureOptions())[0])
