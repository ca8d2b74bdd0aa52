"""Behind Dynamo: hooks of modules that are set later, errors on fake tensors, forward-mode AD."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

import retrograd
from retrograd.dynamo import eager_breaks as keep_eager


def compiled(fn, **options):
    return torch.compile(fn, backend="retrograd", options={"backend": "eager", **options})


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def tripled(module, args, output):
    return output * 3


@pytest.mark.parametrize("hooks_before", [False, True])
def test_a_hook_that_is_set_later_is_noticed(hooks_before):
    plain, other = model(), model()
    if hooks_before:
        model()[0].register_forward_hook(tripled)
    fast, x = compiled(other), torch.ones(2, 3)
    assert torch.equal(fast(x), plain(x))
    handles = [each[0].register_forward_hook(tripled) for each in (plain, other)]
    assert torch.equal(fast(x), plain(x))
    for handle in handles:
        handle.remove()
    assert torch.equal(fast(x), plain(x))


@pytest.mark.parametrize("kind", ["forward_hook", "full_backward_hook"])
def test_a_hook_of_all_modules_is_noticed(kind):
    module, seen = model(), []
    fast = compiled(lambda x: module(x) * 2)
    x = torch.ones(2, 3, requires_grad=True)
    for expected in (0, 4, 4, 0):
        handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda m, *_: seen.append(m))
        if not expected:
            handle.remove()
        seen.clear()
        fast(x).sum().backward()
        assert len(seen) == expected
        handle.remove()


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_hook_that_is_set_while_the_backend_compiles(is_removed):
    """Torch's count of operations, under a memory budget, sets and removes hooks of all modules then."""

    def backend(graph, inputs):
        handle = nn.Linear(1, 1).register_forward_hook(tripled)
        if is_removed:
            handle.remove()
        return graph

    plain, other = model(), model()
    fast, x = compiled(other, backend=backend), torch.ones(2, 3)
    assert torch.equal(fast(x), plain(x))
    for each in (plain, other):
        each[0].register_forward_hook(tripled)
    assert torch.equal(fast(x), plain(x))


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_hooks_of_others_compile_nothing_again():
    before, module = graphs(), model()
    fast, x = compiled(module), torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        fast(x).sum().backward()
    torch.ones(2, requires_grad=True).register_hook(lambda grad: None)  # of no module
    held = model()[0].register_forward_hook(tripled)
    fast(x)
    held.remove()
    module[0].register_forward_hook(tripled).remove()
    fast(x)
    assert graphs() == before + 1
    module[2].register_forward_hook(tripled)
    assert torch.equal(fast(x), module(x))
    assert graphs() == before + 2


def test_modules_are_looked_at_once_after_a_hook_was_set(monkeypatch):
    looks, look = [], weakref.ref
    monkeypatch.setattr(keep_eager, "ref", lambda each: lambda: (looks.append(1), look(each)())[1])
    fast, x = compiled(model()), torch.ones(2, 3)
    for expected in (False, False, True, False):
        looks.clear()
        if expected:
            model()[0].register_forward_hook(tripled)
        fast(x)
        assert bool(looks) == expected


def test_hooks_are_not_looked_for_if_dynamos_way_is_wanted():
    module, x = model(), torch.ones(2, 3)
    fast = compiled(module, stock_dynamo=True)
    expected = fast(x)
    module[0].register_forward_hook(tripled)
    assert torch.equal(fast(x), expected)


def test_an_error_is_eagers_and_comes_after_what_eager_does_before():
    def fails(a, log):
        a.add_(1)
        log.append("changed")
        return a + torch.ones(5)

    a, log = torch.zeros(3), []
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match") as caught:
        compiled(fails)(a, log)
    assert type(caught.value) is RuntimeError
    assert a.tolist() == [1.0] * 3
    assert log == ["changed"]


def test_an_error_that_the_function_expects():
    def recovers(a):
        try:
            return a + torch.ones(5)
        except RuntimeError:
            return a * 5

    assert compiled(recovers)(torch.ones(3)).tolist() == [5.0] * 3


def test_with_fullgraph_the_error_is_dynamos():
    fast = torch.compile(
        lambda a: a + torch.ones(5), backend="retrograd", fullgraph=True, options={"backend": "eager"}
    )
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError):
        fast(torch.ones(3))


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_tangent_goes_through_and_is_reported():
    fast = compiled(lambda x: x.sin() * 2)
    fast(torch.zeros(2))
    with forward_ad.dual_level():
        out = fast(forward_ad.make_dual(torch.zeros(2), torch.ones(2)))
        assert forward_ad.unpack_dual(out).tangent.tolist() == [2.0] * 2
    assert {reason.code for reason in retrograd.explain().fallbacks} <= {"forward-ad"}, "or Dynamo lets it be"


class Tagged(nn.Parameter):
    """A parameter with something to say to its optimizer."""

    factor = 3.0


class Scaled(torch.Tensor):
    """The same for a tensor whose class has a `__torch_function__`."""

    factor = 3.0


class ByClass(torch.optim.Optimizer):
    """Asks what its parameters are."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            factor = parameter.factor if isinstance(parameter, (Tagged, Scaled)) else 1.0
            parameter.add_(parameter.grad, alpha=-0.5 * factor)
            if type(parameter) is nn.Parameter:
                parameter.mul_(2)


@pytest.mark.parametrize("make", [Tagged, nn.Parameter, lambda data: data.as_subclass(Scaled)])
def test_an_optimizer_sees_the_classes_of_its_parameters(make):
    parameters = [make(torch.ones(2)).requires_grad_() for _ in range(2)]
    plain, other = (ByClass([each]) for each in parameters)
    fast = compiled(lambda: other.step())
    for _ in range(3):
        for each in parameters:
            each.grad = torch.ones(2)
        plain.step()
        fast()
        assert torch.equal(*map(torch.Tensor.detach, parameters))
    assert [type(each) for each in parameters] == [type(parameters[0])] * 2


@torch.library.custom_op("retrograd_tests::first_rows", mutates_args=())
def first_rows(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(len(x)) < count)[:, None]


first_rows.register_fake(lambda x, count: torch.empty_like(x))
first_rows.register_autograd(
    lambda ctx, grad: (torch.cat([grad[: ctx.count.item()], grad[ctx.count.item() :] * 0]), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "count", inputs[1]),
)


def test_the_graph_breaks_around_an_operator_whose_backward_looks_at_values():
    plain, other = model(), model()
    fast = compiled(lambda x, count: first_rows(other(x).sin(), count).cos())
    x = torch.randn(4, 3)
    for count in (torch.tensor(1), torch.tensor(3)):
        expected, found = first_rows(plain(x).sin(), count).cos(), fast(x, count)
        assert torch.equal(found, expected)
        expected.sum().backward()
        found.sum().backward()
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (plain, other))))
    report = str(retrograd.explain())
    assert "operator whose backward raises on fake tensors" in report
    assert "as eager runs it" not in report


def test_without_gradients_an_operator_stays_in_the_graph_whatever_its_backward_does():
    fast, x = compiled(lambda x, count: first_rows(x.sin(), count).cos()), torch.randn(4, 3)
    assert torch.equal(fast(x, torch.tensor(2)), first_rows(x.sin(), torch.tensor(2)).cos())
    assert "raises on fake tensors" not in str(retrograd.explain())


class Doubling(torch.overrides.TorchFunctionMode):
    """Doubles sines."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.sin, torch.Tensor.sin) else result


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


INSIDE = {
    "a checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=False),
    "a reentrant checkpoint": lambda x: checkpoint(torch.sin, x, use_reentrant=True),
    "a Function": Sine.apply,
    "a Function in a checkpoint": lambda x: checkpoint(Sine.apply, x, use_reentrant=False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("modes", [(Doubling,), (Doubling, lambda: torch.device("cpu")), ()])
def test_a_function_mode_reaches_what_is_kept_whole(name, modes):
    def trained(fn):
        x = torch.ones(3, requires_grad=True)
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            result = fn(x)
        result.sum().backward()
        return result.tolist(), x.grad.tolist()

    fast = compiled(lambda x: INSIDE[name](x) * 3)
    for _ in range(2):
        assert trained(fast) == trained(lambda x: INSIDE[name](x) * 3)


REENTRANT = {
    "with_an_input_that_needs_no_gradient": lambda f, x: checkpoint(f, x.detach(), use_reentrant=True) * x,
    "by_default": lambda f, x: checkpoint(f, x.detach()) * x,
    "by_default_and_with_an_input_that_needs_one": lambda f, x: checkpoint(f, x),
    "with_inputs_in_a_list": lambda f, x: checkpoint(lambda xs: f(xs[0]), [x], use_reentrant=True) * x,
    "without_inputs": lambda f, x: checkpoint(lambda: f(x), use_reentrant=True) * x,
    "with_an_option_of_others": lambda f, x: checkpoint(f, x, use_reentrant=True, debug=True),
    "with_a_context_of_others": lambda f, x: checkpoint(f, x, use_reentrant=True, context_fn=lambda: None),
    "with_an_argument_by_name": lambda f, x: checkpoint(f, input=x, use_reentrant=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REENTRANT)
def test_a_reentrant_checkpoint_differentiates_through_its_own_arguments_only(name):
    """What it reads in another way has a gradient in its backward, which runs if an argument requires
    grad."""

    def trained(compile_it):
        torch.manual_seed(0)
        layer, x, seen = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True), []
        fast = compile_it(lambda x: REENTRANT[name](layer, x).sum())
        for run in ("backward", "grad"):
            try:
                loss = fast(x)
                if run == "backward":
                    loss.backward()
                else:
                    torch.autograd.grad(loss, x)
            except (RuntimeError, ValueError) as error:
                seen.append(str(error).split(".")[0])
            seen += [None if t.grad is None else t.grad.tolist() for t in (layer.weight, layer.bias, x)]
        return seen

    assert trained(compiled) == trained(lambda fn: fn)


def test_a_default_device_reaches_a_checkpoint():
    fast = compiled(lambda x: checkpoint(lambda t: torch.arange(3), x, use_reentrant=False))
    with torch.device("meta"):
        assert fast(torch.ones(1, requires_grad=True)).device.type == "meta"


class Wrapped(torch.Tensor):
    """A tensor class that can be detached and multiplied, and knows no alias."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype)

    def __init__(self, data):
        self.inner = data

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, size=None, stride=None):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.t.default):
            made = cls(func(args[0].inner))
            return return_and_correct_aliasing(func, args, kwargs or {}, made)
        if func in (aten.mm.default, aten.addmm.default):
            return func(*[arg.inner if isinstance(arg, cls) else arg for arg in args])
        raise NotImplementedError(str(func))

    __torch_function__ = torch._C._disabled_torch_function_impl


def test_a_parameter_of_a_class_without_alias():
    def trained(fast):
        layers = model()
        for layer in (layers[0], layers[2]):
            layer.weight = nn.Parameter(Wrapped(layer.weight.detach()))
        fast(layers)(torch.ones(2, 3)).pow(2).sum().backward()
        return [parameter.grad.tolist() for parameter in layers.parameters()]

    assert trained(compiled) == trained(lambda layers: layers)
