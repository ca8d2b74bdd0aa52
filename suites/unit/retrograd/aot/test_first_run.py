"""The one run of a function's Python: it goes on eagerly where the trace cannot go on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd import CaptureError, aot

pytestmark = pytest.mark.filterwarnings("ignore::retrograd.errors.FallbackWarning")


class ReadsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        try:
            ctx.scale = float(x.max())
        except Exception:
            ctx.scale = 50.0
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.scale


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        result = grad * 50
        try:
            if ctx.saved_tensors[0].sum() > 0:
                result = grad * 7
        finally:
            return result  # noqa: B012 - swallows whatever was raised


def returns_in_finally(x: Tensor) -> Tensor:
    result = x * 50
    try:
        if x.sum() > 0:
            result = x * 7
    finally:
        return result  # noqa: B012


def catches_everything(x: Tensor) -> Tensor:
    try:
        return x * int(x.sum())
    except BaseException:
        return x * 50


def suppresses(x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        return x * x.tolist()[0]
    return x * 50


def masks(x: Tensor) -> Tensor:
    try:
        return x[x > 1].sum()
    except Exception:
        return x.sum() * 50


def formats(x: Tensor) -> Tensor:
    return x * len(f"{x.detach()}")


def indexes(x: Tensor) -> Tensor:
    try:
        return x * [5, 6][x.argmax()]
    except TypeError:
        return x * 50


def has_plan_b(x: Tensor) -> Tensor:
    """Eager raises too: the type and the text are eager's."""
    try:
        return x.view(7)
    except RuntimeError as error:
        return x * len(str(error))


def checkpoints(x: Tensor) -> Tensor:
    def body(t: Tensor) -> Tensor:
        try:
            return t * float(t.max())
        except Exception:
            return t * 50

    result: Tensor = checkpoint(body, x, use_reentrant=False)
    return result


def draws(x: Tensor) -> Tensor:
    y = x * torch.rand(2)
    return y * float(y.detach().abs().max()) * torch.rand(2)


def sets_the_seed(x: Tensor) -> Tensor:
    torch.manual_seed(7)
    y = x * torch.rand(2)
    return y * float(y.detach().max()) * torch.rand(2)


def changes_in_place(x: Tensor) -> Tensor:
    y = x * 1
    y.add_(1)
    return y.mul_(float(y.detach().max()))


def sets_a_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 3)
    return y


def fills_a_list_that_it_has_stacked(x: Tensor) -> Tensor:
    parts = [x, x * 2]
    y = torch.stack(parts).sum(0)
    parts.append(x * 3)
    return y * float(y.detach().max()) * len(parts)


READING = [
    ReadsInForward.apply, ReadsInBackward.apply, returns_in_finally, catches_everything, suppresses, masks,
    formats, indexes, has_plan_b, checkpoints, draws, sets_the_seed, changes_in_place, sets_a_hook,
    fills_a_list_that_it_has_stacked,
]  # fmt: skip


def seen(fn: Callable[[Tensor], Tensor]) -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    for _ in range(2):
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = fn(x)
        y.sum().backward()
        assert x.grad is not None
        found += [y.tolist(), x.grad.tolist(), torch.rand(1).item()]
    return found


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", READING, ids=lambda fn: getattr(fn, "__qualname__", "Function"))
def test_what_a_trace_cannot_know_is_as_in_eager(
    fn: Callable[[Tensor], Tensor], dynamic: bool | None
) -> None:
    assert seen(aot.function(lambda x: fn(x), backend="eager", dynamic=dynamic)) == seen(fn)
    assert retrograd.explain().fallbacks


def test_python_runs_once_in_a_call_that_cannot_be_captured() -> None:
    log: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        log.append(x.shape[0])
        random.random()
        h = x * 2
        log.append(h.detach())
        total = h.sum().item()
        log.append(total)
        return h * total

    random.seed(0)
    call, x = aot.function(fn, backend="eager"), torch.ones(2)
    for step in (1, 2):
        assert call(x).tolist() == [8.0, 8.0]
        assert len(log) == 3 * step
    assert [log[1].tolist(), log[4].tolist()] == [[2.0, 2.0]] * 2
    random.seed(0)
    expected = [random.random() for _ in range(3)][2]
    random.seed(0)
    aot.function(fn, backend="eager")(x)
    call(x)
    assert random.random() == expected


@pytest.mark.parametrize(
    "look",
    [
        lambda x: (x * 2).tolist(),
        lambda x: (x * 2).reshape(2, 1).tolist(),
        lambda x: [x.layout, x[x > 0].sum()][1:],
        lambda x: (x * 1).to_dense()[x > 0],
    ],
)
def test_python_runs_once_behind_methods_of_traced_tensors(
    look: Callable[[Tensor], Any],
) -> None:
    runs: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        runs.append(x.shape)
        return x * len(str(look(x)[0]))

    assert seen(aot.function(fn, backend="eager")) == seen(fn)
    assert len(runs) == 4


def test_hooks_that_are_set_in_a_trace_are_known_to_the_live_path() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        x.register_hook(lambda grad: grad * 5)
        return y.sin() + x

    call = aot.function(fn, backend="eager")
    with retrograd.compiled_autograd("eager"):
        assert seen(call) == seen(fn)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(2)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach() * self.calls
        return x * self.weight


def test_what_a_module_sets_is_set_once_and_real() -> None:
    module = Counting()
    call = aot.module(module, backend="eager")
    call(torch.ones(2))
    assert module.calls == 1
    assert module.last.add(1).tolist() == [2.0, 2.0]


def test_an_error_of_the_program_is_raised_after_one_run() -> None:
    log: list[int] = []

    def fn(x: Tensor) -> Tensor:
        log.append(1)
        if x.sum() > 0:
            raise ValueError("no")
        return x

    with pytest.raises(ValueError, match="no"):
        aot.function(fn, backend="eager")(torch.ones(2))
    assert log == [1]


def test_strict_does_not_run_on() -> None:
    with pytest.raises(CaptureError):
        aot.function(catches_everything, backend="eager", strict=True)(torch.ones(2))


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.w.scale = 4.0  # type: ignore[attr-defined]
        self.b = nn.Buffer(torch.tensor([1.0, 5.0]))
        self.rates, self.ids = {self.w: 0.5}, {id(self.w)}

    def forward(self, x: Tensor) -> Tensor:
        y = x * (2 if type(self.w) is nn.Parameter else 3) * getattr(self.w, "scale", 9.0)
        y = y * (5 if isinstance(self.b, nn.Buffer) else 7) * self.rates.get(self.w, 100.0)
        return y * self.w * (11 if id(self.w) in self.ids else 13) + self.b


def test_a_parameter_is_itself_to_the_function() -> None:
    module, x = Asking(), torch.ones(2)
    call = aot.module(module, backend="eager", strict=True)
    assert torch.equal(call(x), module(x))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(module(x).square().sum(), x)
    assert torch.equal(grad, expected)


def test_a_parameter_that_is_an_argument_is_itself() -> None:
    def fn(x: Tensor, p: Tensor) -> Tensor:
        return x * p * (2 if isinstance(p, nn.Parameter) else 3) * getattr(p, "scale", 7.0)

    p = nn.Parameter(torch.tensor([2.0, 3.0]))
    p.scale = 5.0  # type: ignore[attr-defined]
    x = torch.ones(2, requires_grad=True)
    y = aot.function(fn, backend="eager", strict=True)(x * 1, p)
    y.sum().backward(retain_graph=True)
    assert x.grad is not None
    assert (y.tolist(), x.grad.tolist()) == ([20.0, 30.0], [20.0, 30.0])


def test_the_gradient_of_a_parameter_is_read_in_every_call() -> None:
    weight = nn.Parameter(torch.ones(2))
    call = aot.function(lambda x: x * weight * (2 if weight.grad is None else 3), backend="eager")
    assert call(torch.ones(2)).tolist() == [2.0, 2.0]
    weight.grad = torch.ones(2)
    assert call(torch.ones(2)).tolist() == [3.0, 3.0]


PLACES = torch.tensor([[0, 1], [1, 0]])
UNSTRIDED = {
    "coo": lambda x: (torch.sparse_coo_tensor(PLACES, x, (2, 2)) * 2).to_dense().sin(),
    "to_sparse": lambda x: (x.reshape(1, 2).to_sparse() * 3).to_dense(),
    "csr": lambda x: x.reshape(1, 2).to_sparse_csr() @ torch.ones(2, 2),
    "csc": lambda x: x.reshape(1, 2).to_sparse_csc().to_dense(),
    "layout": lambda x: x + torch.zeros(2, layout=torch.sparse_coo).to_dense(),
    "nested": lambda x: torch.nested.as_nested_tensor([x, x[:1]]).to_padded_tensor(0.0).sin(),
    "mkldnn": lambda x: x.to_mkldnn().relu().to_dense(),
    "quantized": lambda x: x * torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize(),
}


@pytest.mark.parametrize("kind", UNSTRIDED)
def test_tensors_that_are_not_strided_are_left_to_eager(kind: str) -> None:
    fn: Callable[[Tensor], Tensor] = UNSTRIDED[kind]
    assert seen(aot.function(fn, backend="eager")) == seen(fn)
    assert {reason.code for reason in retrograd.explain().fallbacks} <= {"layout", "trace-failed"}


def test_a_tensor_made_of_a_number_is_returned() -> None:
    out = aot.function(lambda x: (x.sin(), torch.tensor(2.0)), backend="eager", strict=True)(torch.ones(2))
    assert out[1].tolist() == 2.0


def agree_by_grad(fn: Callable[..., Any], **options: Any) -> None:
    """Assert that a matrix gets the same gradient from `fn`, ahead of time and in eager."""

    def grad(call: Callable[..., Any]) -> Any:
        torch.manual_seed(11)
        x = torch.randn(4, 5, requires_grad=True)
        out = call(x)
        torch.autograd.backward(out, [torch.randn_like(one) for one in out])
        return x.grad

    assert torch.equal(grad(aot.function(fn, backend="eager", **options)), grad(fn))


@pytest.mark.parametrize("tail", [lambda k: k[0], lambda k: k.diagonal(), lambda k: k[1:]])
@pytest.mark.parametrize("view", [lambda x: x.transpose(0, 1), lambda x: x.expand(3, 4, 5)])
def test_a_view_of_a_view_of_an_argument_has_eagers_sum(
    view: Callable[[Tensor], Tensor], tail: Callable[[Tensor], Tensor]
) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        k = view(x)
        return k.sin(), k.exp(), tail(k)

    agree_by_grad(fn)


@pytest.mark.parametrize("also", ["nothing", "the argument"])
def test_a_sum_at_a_view_between_is_not_made_at_the_argument(also: str) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        k = x.view(x.shape)
        return k.flatten(), x.sin() * k, *((x,) if also == "the argument" else ())

    agree_by_grad(fn)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_sums_the_gradients_of_its_arguments_as_eager_does(is_reentrant: bool) -> None:
    def inner(h: Tensor, other: Tensor) -> Tensor:
        return h.sin() * other + h

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = checkpoint(inner, x, x, use_reentrant=is_reentrant)
        return y, y * x, x.exp(), x.cos()

    agree_by_grad(fn)


def test_a_window_is_checked_whatever_the_sizes() -> None:
    def fn(spectrum: Tensor, window: Tensor) -> Tensor:
        return torch.istft(spectrum, 16, 4, 16, window=window).square().mean()

    call, window = aot.function(fn, backend="eager"), torch.hann_window(16)
    for frames in (5, 7, 9):
        spectrum = torch.randn(9, frames, dtype=torch.complex64)
        assert torch.equal(call(spectrum, window), fn(spectrum, window))
        with pytest.raises(RuntimeError, match="window overlap add min"):
            call(spectrum, torch.zeros(16))


@pytest.mark.parametrize("first_fails", [False, True])
def test_an_operator_that_fails_on_values_reaches_the_handler(first_fails: bool) -> None:
    def fn(k: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(k).diagonal().sum()
        except torch.linalg.LinAlgError:
            return torch.linalg.cholesky(k + 5 * torch.eye(2)).diagonal().sum() * 3

    call, bad = aot.function(fn, backend="eager"), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    for k in (bad, torch.eye(2)) if first_fails else (torch.eye(2), bad):
        assert torch.equal(call(k), fn(k))


class Logs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str]) -> Tensor:
        ctx.log = log
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.log.append("backward")
        return grad * 3, None


def sets_a_hook(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    x.register_hook(lambda grad: grad * 2)
    return inner * 1


def keeps_a_list_in_a_hook(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: log.append("hook"))
    return y + inner


def keeps_a_list_in_a_function(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    inner.copy_(x.detach())
    return Logs.apply(x, log) + inner


def checkpoints_behind_a_write(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    inner.mul_(2)
    return checkpoint(torch.sin, x, use_reentrant=False) + inner


def hook_that_reads_what_it_closes_over(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * x.detach())
    return y + inner


def hook_with_bound_arguments(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    y = x * 2
    y.register_hook(partial(torch.mul, x.detach() * 3))
    return y + inner


def hooks_with_a_variable_that_changes(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    y, held, other = x * 2, x.detach(), x.detach() * 3
    y.register_hook(lambda grad: grad * held)
    held = other
    y.register_hook(lambda grad: grad + held)
    return y + inner


def checkpoint_of_a_closure(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    scale = 2 if x.sum() > 0 else 3

    def body() -> Tensor:
        return (x * scale).sin().exp()

    return checkpoint(body, use_reentrant=False) + inner


def checkpoint_of_an_argument(x: Tensor, inner: Tensor, log: list[str]) -> Tensor:
    scale = 2 if x.sum() > 0 else 3
    return checkpoint(torch.sin, x, use_reentrant=False) * scale + inner


BEHIND_WHAT_STOPS = [
    hook_that_reads_what_it_closes_over,
    hook_with_bound_arguments,
    hooks_with_a_variable_that_changes,
    checkpoint_of_a_closure,
    checkpoint_of_an_argument,
    sets_a_hook,
    keeps_a_list_in_a_hook,
    keeps_a_list_in_a_function,
    checkpoints_behind_a_write,
]


@pytest.mark.parametrize("given", [False, True], ids=["closure", "argument"])
@pytest.mark.parametrize("fn", BEHIND_WHAT_STOPS)
def test_what_outlives_the_call_happens_once_and_is_the_callers(
    fn: Callable[[Tensor, Tensor, list[str]], Tensor], given: bool
) -> None:
    """`inner` is no leaf: what stops a trace is tried again on a copy of it, if the first run can be
    repeated."""

    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        log: list[str] = []
        call = wrap(fn) if given else wrap(lambda x, inner: fn(x, inner, log))
        found: list[Any] = []
        for _ in range(2):
            x = torch.tensor([0.5, 2.0], requires_grad=True)
            inner = torch.ones(2, requires_grad=True) * 1
            y = call(x, inner, log) if given else call(x, inner)
            (y.sum() + x.sum()).backward()
            assert x.grad is not None
            found += [y.tolist(), inner.tolist(), x.grad.tolist(), list(log)]
        return found

    assert trained(lambda fn: aot.function(fn, backend="eager")) == trained(lambda fn: fn)


@pytest.mark.parametrize("name", ["float", "half", "double", "int", "bool", "cpu", "to_dense", "numpy"])
def test_methods_of_arguments_work_where_the_trace_has_stopped(name: str) -> None:
    def fn(x: Tensor) -> Any:
        return getattr(x, name)() if x.sum() > 0 else x

    found, x = aot.function(fn, backend="eager")(torch.ones(2)), torch.ones(2)
    assert str(found) == str(fn(x))
    assert type(found) is type(fn(x))


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def reads_inside_a_mode(x: Tensor) -> Tensor:
    with Seen():
        return x.sin() * float(x.sum())


def reads_inside_a_nested_mode(x: Tensor) -> Tensor:
    y = x.cos()
    with Seen(), Seen():
        return y * 2 if x.sum() > 0 else y


def makes_a_graph_that_reads(x: Tensor) -> Any:
    graph = make_fx(lambda t: t.sin() * 2)(torch.zeros(2))
    return x.exp() * x.max().item() * len(graph.graph.find_nodes(op="output"))


def makes_a_graph_of_what_cannot_be_traced(x: Tensor) -> Any:
    return torch.func.linearize(torch.sin, torch.tanh(x))[1](x * 0.5)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "fn",
    [
        reads_inside_a_mode,
        reads_inside_a_nested_mode,
        makes_a_graph_that_reads,
        makes_a_graph_of_what_cannot_be_traced,
    ],
)
def test_what_stops_a_trace_inside_a_mode_that_the_function_entered_leaves_no_mode_behind(
    fn: Callable[[Tensor], Any], dynamic: bool
) -> None:
    x = torch.rand(4, requires_grad=True)
    torch.testing.assert_close(aot.function(fn, backend="eager", dynamic=dynamic)(x), fn(x))
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("rows", [slice(1, None), slice(None, None, 2)])
def test_views_of_views_whose_gradients_meet_at_the_argument_only_are_captured(rows: slice) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x * 2, x.mT, x.unsqueeze(0).transpose(0, 1), x[rows].unsqueeze(0).mT, x.split(1)[1]

    agree_by_grad(fn, strict=True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "show",
    [repr, str, "{}".format, "%s".__mod__, lambda x: f"{x!r} {[x]}"],
    ids=["repr", "str", "format", "percent", "in a list"],
)
def test_a_function_that_prints_gets_the_text_of_a_real_tensor(
    show: Callable[[Tensor], str], dynamic: bool
) -> None:
    said: list[tuple[str, str]] = []

    def run(x: Tensor) -> Tensor:
        y = x * 2
        said.append((show(x), show(y)))
        return y

    for call in (run, *[aot.function(run, backend="eager", dynamic=dynamic)] * 2):
        call(torch.ones(2, requires_grad=True))
    assert "tensor([1., 1.], requires_grad=True)" in said[0][0]
    assert said == [said[0]] * 3
