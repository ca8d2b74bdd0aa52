"""All stages in one call: when a capture is used again, when there is another, when eager runs."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import retrograd
from retrograd import aot
from retrograd.errors import CaptureError, FallbackWarning, OptionError
from unit.retrograd.aot.against_eager import captures, leaf, tensor

quiet = pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")


def compiled(fn: Callable[..., Any], **options: Any) -> aot.AotFunction:
    return aot.function(fn, **{"backend": "eager", "strict": True, **options})


def fallbacks() -> int:
    return retrograd.counters["aot_fallbacks"]


def same(fn: Callable[..., Any], call: Callable[..., Any], *args: Any) -> None:
    expected, found = fn(*args), call(*args)
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(found, expected)


# Guards: the first call is captured; is there a capture for the second?

w = tensor(3, 4)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], int]] = {
    "the same": (lambda x: x * 2, (w,), (w,), 1),
    "other values": (lambda x: x * 2, (w,), (w + 1,), 1),
    "another dtype": (lambda x: x * 2, (w,), (w.double(),), 2),
    "another layout": (lambda x: x * 2, (w,), (torch.ones(4, 3).t(),), 2),
    "another rank": (lambda x: x * 2, (w,), (tensor(3, 4, 1),), 2),
    "another size": (lambda x: x * 2, (w,), (tensor(5, 4),), 2),
    "requires_grad": (lambda x: x * 2, (w,), (leaf(3, 4),), 2),
    "a parameter for a tensor": (lambda x: x * 2, (leaf(3, 4),), (nn.Parameter(tensor(3, 4)),), 2),
    "no leaf": (lambda x: x * 2, (leaf(3, 4),), (leaf(3, 4) * 1,), 2),
    "another number": (lambda x, n: x * n, (w, 2), (w, 3), 2),
    "an equal number": (lambda x, n: x * n, (w, 2), (w, 2), 1),
    "a float for an int": (lambda x, n: x * n, (w, 2), (w, 2.0), 2),
    "True for 1": (lambda x, n: x * n, (w, 1), (w, True), 2),
    "another string": (lambda x, how: getattr(x, how)(), (w, "sin"), (w, "cos"), 2),
    "another dtype as argument": (lambda x, to: x.to(to), (w, torch.float64), (w, torch.int32), 2),
    "another key": (lambda x: next(iter(x.values())) * 2, ({"a": w},), ({"b": w},), 2),
    "another length": (lambda x: sum(x), ([w],), ([w, w + 1],), 2),
    "one tensor twice": (lambda x, y: x * y, (w, w.clone()), (w, w), 2),
    "no longer one twice": (lambda x, y: x * y, (w, w), (w, w.clone()), 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_guards(name: str) -> None:
    fn, first, second, expected = CALLS[name]
    call = compiled(fn, dynamic=False)
    same(fn, call, *first)
    same(fn, call, *second)
    assert captures() == expected
    same(fn, call, *first)
    assert captures() == expected


def test_keywords_are_told_from_one_another() -> None:
    call = compiled(lambda x, *, by=1, plus=0: x * by + plus)
    assert torch.equal(call(w, by=2), w * 2)
    assert torch.equal(call(w, plus=2), w + 2)
    assert torch.equal(call(x=w, by=3), w * 3)
    assert captures() == 3


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        pytest.param(torch.no_grad, 2, id="no_grad"),
        pytest.param(torch.enable_grad, 1, id="enable_grad"),
        pytest.param(functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16), 2, id="autocast"),
    ],
)
def test_modes_are_guarded(mode: Callable[[], Any], expected: int) -> None:
    fn = lambda x: x @ x  # noqa: E731
    call, x = compiled(fn), leaf(3, 3)
    same(fn, call, x)
    with mode():
        same(fn, call, x)
        assert call(x).requires_grad == fn(x).requires_grad
    same(fn, call, x)
    assert captures() == expected


def test_memory_that_is_shared_where_the_function_writes_is_guarded() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x + y

    call = compiled(fn)
    for make in (lambda: (torch.ones(4), torch.ones(4)), lambda: (lambda x: (x, x[:]))(torch.ones(4))):
        expected, found = fn(*make()), call(*make())
        assert torch.equal(found, expected)
    assert captures() == 2


# Sizes


def test_a_size_that_changes_is_symbolic_from_then_on() -> None:
    fn = lambda x: (x * 2).sum(0)  # noqa: E731
    call = compiled(fn)
    for size in (3, 5, 7, 9):
        same(fn, call, tensor(size, 4))
    assert captures() == 2
    same(fn, call, tensor(5, 6))
    assert captures() == 3
    same(fn, call, tensor(8, 9))
    assert captures() == 3


def test_gradients_with_symbolic_sizes() -> None:
    fn = lambda x, w: (x @ w).tanh().sum(0)  # noqa: E731
    call = compiled(fn)
    for size in (2, 3, 4, 6):
        found = []
        for run in (fn, call):
            x, weight = leaf(size, 3), leaf(3, 2)
            run(x, weight).sum().backward()
            found.append([x.grad, weight.grad])
        assert all(map(torch.equal, *found))
    assert captures() == 2


def test_static_sizes_are_captured_each() -> None:
    call = compiled(lambda x: x * 2, dynamic=False)
    for size in (3, 5, 7):
        call(tensor(size))
    assert captures() == 3


def test_symbolic_from_the_start() -> None:
    fn = lambda x: x.reshape(-1).cumsum(0) * x.shape[0]  # noqa: E731
    call = compiled(fn, dynamic=True)
    for sizes in ((3, 4), (5, 6), (7, 8)):
        same(fn, call, tensor(*sizes))
    assert captures() == 1


def test_what_the_function_asks_of_a_size_is_guarded() -> None:
    fn = lambda x: x * 2 if x.shape[0] > 4 else x * 3  # noqa: E731
    call = compiled(fn, dynamic=True)
    for size in (3, 2, 6, 8, 3):
        same(fn, call, tensor(size))
    assert captures() == 2


def test_sizes_0_and_1_are_special() -> None:
    fn = lambda x: x.expand(3, 4) if x.shape[0] == 1 else x[:3] * 2  # noqa: E731
    call = compiled(fn, dynamic=True)
    for size in (5, 1, 6):
        same(fn, call, tensor(size, 4))
    assert captures() == 2


# How many


@quiet
def test_more_kinds_than_the_limit_run_eagerly() -> None:
    call = compiled(lambda x: x * 2, dynamic=False, recompile_limit=2, strict=False)
    for size in (2, 3, 4, 5):
        assert torch.equal(call(tensor(size)), tensor(size) * 2)
    assert (captures(), fallbacks()) == (2, 2)
    assert "recompile-limit" in [reason.code for reason in retrograd.explain().fallbacks]


def test_the_limit_is_an_error_if_strict() -> None:
    call = compiled(lambda x: x * 2, dynamic=False, recompile_limit=1)
    call(tensor(2))
    with pytest.raises(CaptureError, match="recompile_limit"):
        call(tensor(3))


def test_reset_forgets() -> None:
    call = compiled(lambda x: x * 2)
    call(w)
    call.reset()
    call(w)
    assert captures() == 2


def test_backends() -> None:
    with pytest.raises(OptionError, match="nowhere"):
        aot.function(lambda x: x, backend="nowhere")
    seen = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        seen.append(len(example_inputs))
        return gm.forward

    x = leaf(3)
    compiled(lambda x: x.sin(), backend=backend)(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert seen == [1, 2]


# Eager instead


def reads_data(x: Tensor) -> Tensor:
    return x * x.sum().item()


def test_what_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    call = compiled(reads_data, strict=False)
    with pytest.warns(FallbackWarning, match="_local_scalar_dense"):
        assert torch.equal(call(w), reads_data(w))
    assert torch.equal(call(w), reads_data(w))
    assert (captures(), fallbacks()) == (0, 2)
    *_, reason = retrograd.explain().fallbacks
    assert (reason.stage, bool(reason.way_out)) == ("aot.capture", True)


def test_strict_raises_instead() -> None:
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        compiled(reads_data)(w)


@quiet
def test_errors_of_the_function_are_those_of_eager() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        compiled(fails, strict=False)(w)
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        compiled(lambda x: x + torch.ones(7), strict=False)(w)


@quiet
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: torch.eye(3).to_sparse_csr(), id="sparse csr"),
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse coo"),
        pytest.param(
            lambda: torch.quantize_per_tensor(torch.ones(3, 3), 0.1, 0, torch.qint8), id="quantized"
        ),
        pytest.param(lambda: torch.ones(3, 3, dtype=torch.cfloat).conj(), id="conjugated"),
        pytest.param(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"),
    ],
)
def test_tensors_of_other_kinds_run_eagerly(value: Callable[[], Tensor]) -> None:
    call = compiled(lambda x: x.clone(), strict=False)
    for _ in range(2):
        assert type(call(value())) is Tensor
        assert call(value()).layout == value().layout
    assert captures() == 0
    assert fallbacks() == 4


@quiet
def test_inside_a_transform_of_functorch() -> None:
    fn = lambda x: (x * x).sum()  # noqa: E731
    assert torch.equal(torch.func.grad(compiled(fn, strict=False))(w), w * 2)
    assert captures() == 0


@quiet
@pytest.mark.parametrize("remove", ["mutations", "mutations_and_views"])
@pytest.mark.parametrize(
    "inner",
    [
        lambda t, x: x.sin(),
        lambda t, x: (t * x).sin(),
        lambda t, x: t.view(3, 1).add_(1).sin(),
        lambda t, x: torch.vmap(lambda row: row * x.exp())(t),
        lambda t, x: torch.func.grad(lambda t: (x * t.exp()).sum())(t),
    ],
    ids=["of a closure", "of both", "in place on a view", "vmap", "grad"],
)
def test_functionalize_runs_eagerly(inner: Callable[[Tensor, Tensor], Tensor], remove: str) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.func.functionalize(lambda t: inner(t, x), remove=remove)(x * 1) * 2

    call, x = compiled(fn, strict=False), leaf(3)
    for _ in range(2):
        same(fn, call, x)
        assert torch.equal(*(torch.autograd.grad(one(x).sum(), x)[0] for one in (fn, call)))
    assert captures() == 0


def test_inside_another_capture_it_is_the_function_itself() -> None:
    inner = compiled(lambda x: x.sin())
    outer = compiled(lambda x: inner(x) * 2)
    x = leaf(3)
    outer(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * 2)


@quiet
def test_saved_tensor_hooks_around_a_call() -> None:
    packed = []

    def pack(value: Tensor) -> Tensor:
        packed.append(tuple(value.shape))
        return value

    call, x = compiled(lambda x: x.sin(), strict=False), leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        call(x).sum().backward()
    assert packed == [(3,)]
    torch.testing.assert_close(x.grad, x.detach().cos())


# What a function refers to


def test_tensors_of_a_closure_are_inputs() -> None:
    scale = leaf(4)
    call = compiled(lambda x: x * scale)
    call(w)
    with torch.no_grad():
        scale.mul_(2)
    assert torch.equal(call(w), w * scale)
    call(w).sum().backward()
    assert torch.equal(scale.grad, w.sum(0))
    assert captures() == 1


def test_methods_and_partials() -> None:
    class Holder:
        def __init__(self) -> None:
            self.scale = 2.0

        def times(self, x: Tensor, more: float) -> Tensor:
            return x * self.scale * more

    assert torch.equal(compiled(Holder().times)(w, 2.0), w * 4)
    assert torch.equal(compiled(functools.partial(torch.mul, w))(w), w * w)


# Modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return self.last(self.drop(self.first(x)))


def module(mod: nn.Module, **options: Any) -> aot.AotModule:
    return aot.module(mod, **{"backend": "eager", "strict": True, **options})


def agree(mod: nn.Module, call: nn.Module, x: Tensor = w) -> None:
    """Outputs and gradients of the module and of its compiled form, from one state and seed."""
    found = []
    before = {name: value.clone() for name, value in mod.state_dict().items()}
    for run in (mod, call):
        mod.load_state_dict(before)
        mod.zero_grad()
        torch.manual_seed(1)
        run(x).sin().sum().backward()
        found.append([p.grad if p.grad is None else p.grad.clone() for p in mod.parameters()])
        found[-1] += [value.clone() for value in mod.buffers()]
    for expected, value in zip(*found, strict=True):
        assert (expected is None and value is None) or torch.equal(expected, value)


def test_a_module_and_its_buffers() -> None:
    net = Net()
    call = module(net)
    agree(net, call)
    agree(net, call)
    assert captures() == 1
    assert net.seen.item() == 2


def test_training_and_evaluation() -> None:
    net = Net()
    call = module(net)
    agree(net, call)
    net.eval()
    agree(net, call)
    net.train()
    net.drop.eval()
    agree(net, call)
    assert captures() == 3
    net.drop.train()
    agree(net, call)
    assert captures() == 3


def test_the_compiled_module_is_switched_with_its_module() -> None:
    net = Net()
    call = module(net)
    call.eval()
    assert not net.training
    agree(net, call)


def test_tied_weights() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    call = module(net)
    agree(net, call)
    net[2].weight = nn.Parameter(tensor(4, 4))
    agree(net, call)
    assert len(list(net.parameters())) == 2


def test_a_parameter_is_replaced() -> None:
    net = nn.Linear(4, 2)
    call = module(net)
    agree(net, call)
    net.weight = nn.Parameter(tensor(2, 4, seed=8))
    agree(net, call)
    assert captures() == 1


def test_requires_grad_is_switched() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    call = module(net)
    agree(net, call)
    net[0].requires_grad_(False)
    agree(net, call)
    assert captures() == 2
    net[0].requires_grad_(True)
    agree(net, call)
    assert captures() == 2


def test_a_submodule_is_replaced() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    call = module(net)
    agree(net, call)
    net[1] = nn.Sigmoid()
    agree(net, call)
    assert captures() == 2


def test_a_submodule_is_added() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    call = module(net)
    agree(net, call)
    net.append(nn.Tanh())
    agree(net, call)


def test_a_bias_is_taken_away() -> None:
    net = nn.Linear(4, 4)
    call = module(net)
    agree(net, call)
    net.bias = None
    agree(net, call)


def test_a_bias_is_added() -> None:
    net = nn.Linear(4, 4, bias=False)
    call = module(net)
    agree(net, call)
    net.bias = nn.Parameter(tensor(4))
    agree(net, call)


def test_a_module_gets_another_class() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    call = module(net)
    agree(net, call)
    net[1].__class__ = nn.Sigmoid
    agree(net, call)


def test_a_parameter_is_renamed() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(tensor(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * next(iter(self._parameters.values()))

    net = Scale()
    call = module(net)
    agree(net, call)
    net.two = nn.Parameter(net.one.detach() * 2)
    del net.one
    agree(net, call)


@quiet
def test_hooks_that_are_added_later_run() -> None:
    net = Net()
    call = module(net, strict=False)
    call(w)
    seen: list[str] = []
    handle = net.first.register_forward_hook(lambda *_: seen.append("forward"))
    net.last.register_full_backward_hook(lambda *_: seen.append("backward"))
    call(w).sum().backward()
    assert seen == ["forward", "backward"]
    handle.remove()
    call(w).sum().backward()
    assert seen == ["forward", "backward", "backward"]


def test_the_same_state_as_the_module() -> None:
    net = Net()
    call = module(net)
    assert [id(p) for p in call.parameters()] == [id(p) for p in net.parameters()]
    assert call.first is net.first
    with pytest.raises(OptionError, match=r"got function\n  expected  a torch\.nn\.Module"):
        aot.module(lambda x: x)  # type: ignore[arg-type]


@quiet
def test_a_lazy_module_runs_eagerly_until_it_is_initialised() -> None:
    call = module(nn.LazyLinear(3), strict=False)
    assert call(w).shape == (3, 3)
    assert call(w).shape == (3, 3)
    assert captures() == 1


def test_moving_a_module_to_another_dtype() -> None:
    net = nn.Linear(4, 2)
    call = module(net)
    agree(net, call)
    net.double()
    agree(net, call, w.double())
    assert captures() == 2


def test_an_attribute_that_is_a_number() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    net = Scaled()
    call = module(net)
    assert torch.equal(call(w), w * 2)
    net.factor = 3.0
    assert torch.equal(call(w), w * 3)


def test_a_list_that_grows_with_each_call() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(1)
            return x * len(self.seen)

    net = Growing()
    call = module(net, recompile_limit=3, strict=False)
    for step in range(1, 9):
        assert torch.equal(call(w), w * step)
    assert len(net.seen) == 8
    codes = {reason.code for reason in retrograd.explain().fallbacks}
    assert codes == {"side-effect", "recompile-limit"}


class Acts(nn.Module):
    """Reads attributes that are no plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[Tensor], Tensor] = torch.tanh
        self.shift = torch.zeros(1)
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.inner(x)) * getattr(self, "scale", 1.0) + self.shift


def no_scale(net: nn.Module) -> None:
    del net.scale


CHANGES: dict[str, Callable[[Any], object]] = {
    "another function": lambda net: setattr(net, "act", torch.exp),
    "a lambda": lambda net: setattr(net, "act", lambda t: t * 3),
    "a new attribute": lambda net: setattr(net, "scale", 5.0),
    "an attribute that is gone": no_scale,
    "another forward": lambda net: setattr(net.inner, "forward", lambda t: t + 1),
    "its own forward": lambda net: delattr(net.inner, "forward"),
    "another tensor": lambda net: setattr(net, "shift", torch.ones(1)),
    "a method of another object": lambda net: setattr(net, "act", nn.Softplus().forward),
}


def test_attributes_that_are_replaced_between_calls() -> None:
    net = Acts()
    call = module(net, recompile_limit=50)
    assert torch.equal(call(w), net(w))
    for name, change in CHANGES.items():
        change(net)
        for _ in range(2):
            assert torch.equal(call(w), net(w)), name


def test_a_module_that_changes_too_often_does_not_stop_others() -> None:
    call = compiled(lambda net, x: net(x) * net.factor, recompile_limit=2, strict=False)
    changing, steady = nn.Identity(), nn.Identity()
    steady.factor = 2.0
    for step in range(5):
        changing.factor = float(step)
        assert torch.equal(call(changing, w), w * step)
    before = captures()
    assert torch.equal(call(steady, w), w * 2)
    assert captures() == before + 1


def test_a_module_that_was_not_seen_for_long_is_looked_at_again() -> None:
    call = compiled(lambda net, x: net(x) * net.factor, cache_size=64, recompile_limit=100)
    nets = [nn.Identity() for _ in range(70)]
    for number, net in enumerate(nets):
        net.factor = float(number)
        assert torch.equal(call(net, w), w * number)
    nets[0].factor = 100.0
    assert torch.equal(call(nets[0], w), w * 100)


# Memory and threads


def test_inputs_are_not_kept_alive() -> None:
    call = compiled(lambda x: x.sin())
    x = leaf(1000)
    reference = weakref.ref(x)
    call(x).sum().backward()
    del x
    gc.collect()
    assert reference() is None


def test_two_threads() -> None:
    fn = lambda x: (x.sin() * x).sum()  # noqa: E731
    call, found = compiled(fn), []

    def work(seed: int) -> None:
        x = leaf(50, seed=seed)
        for _ in range(5):
            x.grad = None
            call(x).backward()
        y = leaf(50, seed=seed)
        fn(y).backward()
        found.append(torch.equal(x.grad, y.grad))  # type: ignore[arg-type]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_a_start_that_is_a_tensor_is_read_in_every_call() -> None:
    """With symbolic sizes it is a size of its own: the guard reads it out of the tensor."""
    call, before = compiled(lambda x, start: x.narrow(0, start, 2) * 2, dynamic=True), captures()
    x, y = leaf(5), leaf(5)
    for start in (1, 3, 0):
        found = call(x, torch.tensor(start))
        assert torch.equal(found, y[start : start + 2] * 2)
        found.sum().backward()
        (y[start : start + 2] * 2).sum().backward()
        assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    assert captures() - before == 1


@pytest.mark.parametrize("flip", [0, 2])
def test_numpy_arrays_are_arguments_by_value(flip: int) -> None:
    call, before = compiled(lambda x, factors: x * float(factors.sum())), captures()
    factors = np.arange(3.0)
    assert torch.equal(call(w, factors), w * 3)
    assert torch.equal(call(w, factors.copy()), w * 3)
    assert captures() - before == 1
    factors[flip] += 1
    assert torch.equal(call(w, factors), w * 4)
    assert captures() - before == 2


# Where a tensor begins in its memory


def differentiated(fn: Callable[[Tensor], Tensor], begin: int) -> tuple[Tensor, Tensor]:
    memory = torch.arange(10.0, requires_grad=True)
    result = fn(memory[begin : begin + 4])
    result.sum().backward()
    assert memory.grad is not None
    return result.detach(), memory.grad


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x * x.storage_offset(), 2),
        (lambda x: x.as_strided((2,), (1,), 3) * 2, 2),
        (lambda x: torch.as_strided(x, (2,), (1,), storage_offset=3) * 2, 2),
        (lambda x: x.as_strided((2,), (1,)) * 2, 1),
        (lambda x: x[1:] * 2, 1),
    ],
)
def test_an_offset_that_is_read_is_guarded(fn: Callable[[Tensor], Tensor], expected: int) -> None:
    call, before = compiled(fn), captures()
    for begin in (2, 3, 2):
        found, wanted = differentiated(call, begin), differentiated(fn, begin)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
    assert captures() - before == expected


# Tensors that a function closes over


def changed_sizes(t: Tensor) -> None:
    t.data = torch.full((5, 4), 3.0)


def changed_dtype(t: Tensor) -> None:
    t.data = t.data.double()


def changed_grad(t: Tensor) -> None:
    t.requires_grad_(not t.requires_grad)


@pytest.mark.parametrize("change", [changed_sizes, changed_dtype, changed_grad])
def test_the_metadata_of_a_tensor_that_is_closed_over_is_guarded(change: Callable[[Tensor], None]) -> None:
    other = torch.full((3, 4), 2.0)
    fn = lambda x: x.sum() * other  # noqa: E731
    call, before = compiled(fn), captures()
    same(fn, call, w)
    change(other)
    same(fn, call, w)
    assert captures() - before == 2
    assert call(w).requires_grad is other.requires_grad


@quiet
def test_a_tensor_that_is_given_and_closed_over_may_be_changed() -> None:
    other = torch.ones(3)
    call = compiled(lambda x: (x.add_(1), other * 2)[1], strict=False)
    assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(call(other), torch.full((3,), 4.0))
    assert torch.equal(call(other[:]), torch.full((3,), 6.0))


def test_a_parameter_may_be_replaced_by_another() -> None:
    net = nn.Linear(3, 3)
    call, x = compiled(lambda m, x: m(x)), tensor(2, 3)
    same(lambda x: net(x), lambda x: call(net, x), x)
    net.weight, net.bias = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.zeros(5))
    same(lambda x: net(x), lambda x: call(net, x), x)
    net.double()
    same(lambda x: net(x), lambda x: call(net, x), x.double())
