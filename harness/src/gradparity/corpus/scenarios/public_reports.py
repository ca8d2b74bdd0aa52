"""Programs of the kinds that public reports are about, and that the other topics do not have.

In: a probe, whose `compile` is the identity for eager. Out: gradients, values, events and errors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.masked import masked_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

COMPILED = ("compiled", "aot")


class ByAttribute(type):
    """A class to which everything belongs that has an attribute."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return getattr(instance, "is_marked", False)


class Marked(metaclass=ByAttribute):
    """What has a mark."""


@scenario(tags=COMPILED)
def isinstance_is_answered_by_a_metaclass(p: Probe) -> None:
    """A function asks a metaclass about its argument, which gets the mark after the first call."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    call = p.compile(lambda a: (a * 2 if isinstance(a, Marked) else a * 3).sum())
    for step in range(3):
        x.is_marked = step > 0
        out = call(x)
        p.value(f"out {step}", out)
        with p.backward():
            out.backward()


class Key:
    """Equal to what has the same name, whatever the case of its letters."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self.name.lower() == other.name.lower()

    def __hash__(self) -> int:
        return hash(self.name.lower())


@scenario(tags=COMPILED)
def a_dictionary_is_asked_by_an_equal_key(p: Probe) -> None:
    """A key that is another object, but equal, finds a weight, which is exchanged after the first call."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    weights = {Key("First"): 2.0, Key("second"): 3.0}
    call = p.compile(lambda a: (a * weights[Key("FIRST")] + (Key("Second") in list(weights))).sum())
    for step in range(3):
        weights[Key("first")] = 2.0 + (step > 0)
        out = call(x)
        p.value(f"out {step}", out)
        with p.backward():
            out.backward()


@scenario(tags=COMPILED)
def attributes_of_parameters_are_read(p: Probe) -> None:
    """A function scales parameters by a number, an attribute of each; one of them gets another number."""
    model = p.module(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
    for number, each in enumerate(model.parameters()):
        each.scale = 1.0 + number

    def scaled(a: Tensor) -> Tensor:
        for layer in model:
            a = (a @ (layer.weight * layer.weight.scale) + layer.bias * layer.bias.scale).tanh()
        return a.sum()

    call, x = p.compile(scaled), p.randn(2, 3)
    for step in range(3):
        if step == 1:
            next(model.parameters()).scale = 5.0
        out = call(x)
        p.value(f"out {step}", out)
        with p.backward():
            out.backward()


class Widening(torch.autograd.Function):
    """Its gradient has another dtype than its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(torch.float64) * 2


def _register_grad_dtype(name: str, dtype: torch.dtype | None) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(3, requires_grad=True))
        x.grad_dtype = dtype
        call = p.compile(lambda a: Widening.apply(a).sum())
        for step in range(2):
            with p.backward():
                call(x).backward()
            p.value(f"grad {step}", x.grad)

    body.__name__ = f"grad_dtype_{name}_and_a_function_of_another_dtype"
    body.__doc__ = f"A leaf whose `grad_dtype` is {dtype} gets gradients of float64 from a Function."
    scenario(tags=("compiled", "accumulation", "dtype"))(body)


_register_grad_dtype("none", None)
_register_grad_dtype("half", torch.float16)


class Operators(TorchDispatchMode):
    """Notes the products that pass, and changes them."""

    def __init__(self, p: Probe) -> None:
        super().__init__()
        self.p = p

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.p.event("mm", tuple(result.shape))
            result = result * 2
        return result


class Functions(TorchFunctionMode):
    """Notes the calls of a hook."""

    def __init__(self, p: Probe) -> None:
        super().__init__()
        self.p = p

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.mul:
            self.p.event("mul")
        return func(*args, **(kwargs or {}))


def _register_mode(mode: Callable[[Probe], Any]) -> None:
    def body(p: Probe) -> None:
        x, w = p.leaf("x", p.randn(2, 3, requires_grad=True)), p.leaf("w", p.randn(3, 3, requires_grad=True))
        call = p.compile(lambda a, b: (a.sin() @ b).cos())
        for _ in range(2):
            out = call(x, w)
            out.register_hook(lambda grad: torch.Tensor.mul(grad, 3))
            with p.backward(), mode(p):
                out.sum().backward()

    body.__name__ = f"mode_for_{mode.__name__.lower()}_around_the_backward_alone"
    body.__doc__ = f"A mode that sees {mode.__name__.lower()} is there in the backward, and not before."
    scenario(tags=("compiled", "modes"))(body)


_register_mode(Operators)
_register_mode(Functions)


def _register_error(error: type[BaseException]) -> None:
    def body(p: Probe) -> None:
        x = p.leaf("x", p.randn(3, requires_grad=True))
        call, errors = p.compile(lambda a: (a.sigmoid() * 2).exp()), [error("once")]

        def raising(grad: Tensor) -> None:
            if errors:
                raise errors.pop()

        inner = x * 1
        inner.register_hook(p.hook("inner", raising))
        loss = call(inner).sum()
        for step in range(3):
            try:
                with p.backward():
                    loss.backward()
            except BaseException as raised:
                p.event(f"raised {step}", type(raised).__name__)
            p.value(f"grad {step}", x.grad)

    body.__name__ = f"second_backward_of_a_compiled_graph_after_{error.__name__.lower()}"
    body.__doc__ = f"A hook behind a compiled part raises {error.__name__}; the graph was not retained."
    scenario(tags=("compiled", "hooks"))(body)


for _error in (ValueError, KeyboardInterrupt, SystemExit):
    _register_error(_error)


class IntoMain(torch.autograd.Function):
    """A linear layer whose backward adds the weight's gradient to `main_grad`, and returns none for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        weight.main_grad.addmm_(grad.t(), x)
        result = torch.zeros_like(weight) if weight.wants_zeros else None
        return grad @ weight, result


def _register_main_grad(wants_zeros: bool) -> None:
    def body(p: Probe) -> None:
        weights = [p.leaf(name, p.randn(3, 3, requires_grad=True)) for name in ("first", "second")]
        for each in weights:
            each.main_grad, each.wants_zeros = torch.zeros_like(each), wants_zeros
        call = p.compile(lambda a: IntoMain.apply(IntoMain.apply(a, weights[0]).relu(), weights[1]))
        for step in range(3):
            with p.backward():
                call(p.randn(2, 3)).square().sum().backward()
            p.value(f"main {step}", tuple(each.main_grad for each in weights))

    body.__name__ = "gradients_go_into_main_grad" + ("_and_zeros_into_grad" if wants_zeros else "")
    body.__doc__ = "Functions add gradients of weights to a buffer of their own, in three steps."
    scenario(tags=(*COMPILED, "function", "accumulation"))(body)


_register_main_grad(False)
_register_main_grad(True)


@scenario(tags=("steps", "aliasing"))
def parameters_are_swapped_between_steps(p: Probe) -> None:
    """`swap_tensors` gives a parameter of a compiled module what another one has."""
    model, other = p.module(nn.Linear(3, 2)), p.module(nn.Linear(3, 2), "other")
    call = p.compile(model)
    for step in range(3):
        if step == 1:
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                one.grad = None
                gc.collect()  # weak references in cycles of a compilation
                torch.utils.swap_tensors(one, two)
        out = call(p.randn(4, 3))
        p.value(f"out {step}", out)
        with p.backward():
            out.square().sum().backward()
        p.value(f"grads {step}", tuple(each.grad for each in (*model.parameters(), *other.parameters())))


@scenario(tags=("subclass",), fp64=False)
def masked_tensors_are_differentiated(p: Probe) -> None:
    """The gradient of a sum over a masked tensor has values where the mask is set."""
    mask = torch.tensor([True, False, True])
    x = masked_tensor(p.randn(3), mask, requires_grad=True)
    for step in range(2):
        with p.backward():
            (x * 3).sum().backward()
        assert x.grad is not None
        p.value(f"grad {step}", (x.grad.get_data(), x.grad.get_mask()))


@contextmanager
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@scenario(tags=("subclass", "compiled"))
def distributed_tensors_on_one_rank(p: Probe) -> None:
    """A product of a sharded and a replicated tensor, on a mesh with one rank, in two steps."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with _one_rank():
        mesh = distributed.init_device_mesh(p.device.type, (1,))
        x = distribute_tensor(p.randn(4, 3), mesh, [Shard(0)]).requires_grad_()
        w = distribute_tensor(p.randn(3, 2), mesh, [Replicate()]).requires_grad_()
        call = p.compile(lambda a, b: (a @ b).sin())
        for step in range(2):
            out = call(x, w)
            with p.backward():
                out.sum().backward()
            for name, each in (("x", x), ("w", w)):
                assert each.grad is not None
                p.value(f"{name} {step}", (each.grad.to_local(), str(each.grad.placements)))


@scenario(tags=(*COMPILED, "retain-graph", "inputs"))
def a_pipeline_stage_runs_its_backward_in_two_parts(p: Probe) -> None:
    """First the gradients of the inputs of two batches, then those of the weights, from the same graphs."""
    stage = p.module(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    call, weights = p.compile(stage), tuple(stage.parameters())
    for step in range(2):
        batches = [p.randn(2, 3, requires_grad=True) for _ in range(2)]
        outs = [call(batch) for batch in batches]
        cotangents = [torch.ones_like(out) for out in outs]
        for number, (batch, out, grad) in enumerate(zip(batches, outs, cotangents, strict=True)):
            with p.backward():
                (found,) = torch.autograd.grad(out, batch, grad, retain_graph=True)
            p.value(f"input {step} {number}", found)
        for out, grad in zip(outs, cotangents, strict=True):
            with p.backward():
                torch.autograd.backward(out, grad, inputs=weights)


@scenario(tags=("saved", "in-place"))
def saved_tensors_may_be_changed_where_that_is_allowed(p: Probe) -> None:
    """Inside `allow_mutation_on_saved_tensors`, a backward computes with what was saved before the change."""
    x = p.leaf("x", p.randn(3, requires_grad=True))
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        for _ in range(2):
            saved = x.clone()
            loss = saved.sin().sum() + saved.square().sum()
            saved.detach().mul_(5)
            with p.backward():
                loss.backward()


if hasattr(torch.autograd.graph, "node_creation_hook"):

    @scenario(tags=("hooks",))
    def nodes_are_seen_when_they_are_made(p: Probe) -> None:
        """A hook on the making of nodes sees those of the program, around forward and backward."""
        x = p.leaf("x", p.randn(3, requires_grad=True))
        hook: Any = torch.autograd.graph.node_creation_hook
        for _ in range(2):
            with hook(lambda node: p.event("made", node.name())), p.backward():
                (x * 2).sin().sum().backward()


@scenario(tags=("steps",))
def steps_with_muon(p: Probe) -> None:
    """An optimizer that orthogonalises the gradients of matrices trains two layers in three steps."""
    model = p.module(nn.Sequential(nn.Linear(4, 3, bias=False), nn.Tanh(), nn.Linear(3, 2, bias=False)))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)

    def whole(backward: Callable[[Tensor], None], x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().sum()
        backward(loss)
        optimizer.step()
        return loss

    run = p.training_step(whole)
    for step in range(3):
        p.value(f"loss {step}", run(p.randn(5, 4)).detach())


def _register_attention(is_inside: bool) -> None:
    def body(p: Probe) -> None:
        q, k, v = (p.leaf(name, p.randn(1, 2, 4, 8, requires_grad=True)) for name in "qkv")

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not is_inside:
                return scaled_dot_product_attention(q, k, v, is_causal=True)
            with sdpa_kernel(SDPBackend.MATH):
                return scaled_dot_product_attention(q, k, v, is_causal=True)

        call = p.compile(attend)
        for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(kernel):
                out = call(q, k, v)
            p.event("node", out.grad_fn is not None)
            with p.backward():
                out.square().sum().backward()

    body.__name__ = f"kernel_of_attention_is_chosen_{'inside' if is_inside else 'around'}"
    body.__doc__ = "`sdpa_kernel` chooses the kernel of an attention, by turns around two calls."
    scenario(tags=COMPILED, fp64=False)(body)


_register_attention(True)
_register_attention(False)
