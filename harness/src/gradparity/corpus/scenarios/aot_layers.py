"""Functions of many layers that are alike: a capture may trace one of them for all.

In: a probe, whose `compile` is the identity for eager. Out: results, gradients, hooks in their order, numbers
that are drawn. One scenario for each kind of layer, and some for how layers are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradparity.corpus.scenario import scenario
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "layers")
DEPTH, WIDTH = 6, 8

#: given the value so far, a weight and a bias of its own, and a value that all layers share.
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _residual(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    inner = functional.gelu(functional.linear(functional.layer_norm(x, (WIDTH,)), w, b))
    return x + inner.sin() * 0.5 + inner


def _shared_twice(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    inner = functional.linear(x, w, b).tanh() * shared + shared.sin()
    return (x + inner * shared).tanh()


def _in_place(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    inner = functional.linear(x, w, b)
    inner += 1
    inner.mul_(0.5)
    return (x + inner.sin().add_(shared)).tanh()


def _changes_its_input(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    x = x.sin() + 1
    x += functional.linear(x.detach() * 2, w, b).tanh() * shared
    return x.cos().tanh()


def _without_grad(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(dim=-1, keepdim=True) + 1
    return (x + functional.linear(x / scale, w, b).relu() * scale).tanh()


def _in_low_precision(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=x.dtype is torch.float32):
        inner = functional.linear(functional.linear(x, w, b), w)
    return (x + inner.to(x.dtype).sin() * shared).tanh()


def _turned(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    inner = functional.linear(x, w, b).t().relu()
    return (x.t() + inner * 2).sin().tanh().t() * 1.5 + shared.view(1, WIDTH)


def _parts(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    left, right = functional.linear(x, w, b).chunk(2, dim=-1)
    inner = torch.cat([left.sin() * right, right[:, :2].expand(-1, 2), left[:, ::2]], dim=-1)
    return x + inner.tanh()


def _dropped(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    inner = functional.dropout(functional.linear(x, w, b).relu(), 0.3)
    return (x + functional.dropout(inner * shared, 0.5)).tanh()


def _detached(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    inner = functional.linear(x.detach().sin(), w, b)
    return inner.softmax(-1) * x + inner.relu().sum(0) * shared.detach()


def _clipped(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
    inner = functional.linear(x, w, b)
    return torch.where(inner > 0, inner, inner.exp() - 1).clamp(-2, 2) + torch.minimum(x, inner) * 0.1


LAYERS: dict[str, Layer] = {
    "residual": _residual,
    "shared_twice": _shared_twice,
    "in_place": _in_place,
    "changes_its_input": _changes_its_input,
    "without_grad": _without_grad,
    "in_low_precision": _in_low_precision,
    "turned": _turned,
    "parts": _parts,
    "dropped": _dropped,
    "detached": _detached,
    "clipped": _clipped,
}

#: how a loss is made of the results: `sum` sends back a gradient that is expanded.
LOSSES: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "sum": lambda results: results[-1].sum(),
    "square": lambda results: results[-1].square().mean(),
}


class _Stack:
    """Parameters of `DEPTH` layers and of a value that they share.

    Args:
        frozen: layers whose weights require no grad.
        tied: layers that have the weight of the first.
    """

    def __init__(self, p: Probe, frozen: Sequence[int] = (), tied: Sequence[int] = ()) -> None:
        self.weights = [p.randn(WIDTH, WIDTH, requires_grad=i not in frozen) for i in range(DEPTH)]
        self.biases = [p.randn(WIDTH, requires_grad=True) for _ in range(DEPTH)]
        self.scale = p.leaf("scale", p.randn(WIDTH, requires_grad=True))
        self.weights = [self.weights[0] if i in tied else one for i, one in enumerate(self.weights)]
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if weight.requires_grad and i not in tied:
                p.leaf(f"w{i}", weight)
            p.leaf(f"b{i}", bias)

    def run(self, layer: Layer, x: Tensor) -> list[Tensor]:
        """What each layer gives."""
        shared, results = self.scale.exp(), []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            x = layer(x, weight, bias, shared)
            results.append(x)
        return results


def _train(p: Probe, stack: _Stack, layer: Layer, steps: int = 2, **kinds: Any) -> None:
    """Two steps for each loss, behind a function that gives the last result."""
    call = p.compile(lambda x: stack.run(layer, x)[-1])
    for name, loss in LOSSES.items():
        for step in range(steps):
            out = call(p.randn(4, WIDTH, **kinds))
            p.value(f"{name}{step}", out.detach())
            with p.backward():
                loss([out]).backward()


#: what is drawn, and which casts there are, depends on the dtype.
_OF_ONE_DTYPE = ("dropped", "in_low_precision")


def _register(name: str) -> None:
    def alike(p: Probe) -> None:
        _train(p, _Stack(p), LAYERS[name])

    def with_hooks(p: Probe) -> None:
        stack = _Stack(p)
        for key, leaf in p.leaves().items():
            leaf.register_post_accumulate_grad_hook(p.hook(key))
        _train(p, stack, LAYERS[name], steps=1)

    for kind, body in {"alike": alike, "with_hooks": with_hooks}.items():
        body.__name__ = f"aot_layers_{kind}_{name}"
        body.__doc__ = f"Layers ({name}): their gradients, and the order in which hooks see them."
        tags = (*TAGS, "hooks") if kind == "with_hooks" else TAGS
        tags = (*tags, "low-precision") if name == "in_low_precision" else tags
        scenario(tags=tags, fp64=name not in _OF_ONE_DTYPE)(body)


for _name in LAYERS:
    _register(_name)


@scenario(tags=TAGS)
def aot_layers_of_which_some_are_unlike(p: Probe) -> None:
    """A frozen layer among others, and an input that requires grad."""
    _train(p, _Stack(p, frozen=(3,)), _residual)


@scenario(tags=TAGS)
def aot_layers_with_a_tied_weight(p: Probe) -> None:
    """Contributions of several layers to one gradient, and of two places in each layer."""
    stack = _Stack(p, tied=range(1, DEPTH, 2))
    _train(p, stack, lambda x, w, b, shared: _residual(x, w, b, shared) + functional.linear(x.sin(), w).cos())


@scenario(tags=(*TAGS, "retain"))
def aot_layers_whose_results_are_all_returned(p: Probe) -> None:
    """Each result is seen: it gets a cotangent of its own, in every subset, and has a hook."""
    stack = _Stack(p)
    call = p.compile(lambda x: stack.run(_shared_twice, x))
    results = call(p.randn(4, WIDTH))
    for i, result in enumerate(results):
        result.register_hook(p.hook(f"result {i}"))
    with p.backward():
        sum(result.sum() * i for i, result in enumerate(results)).backward(retain_graph=True)
        results[2].sin().sum().backward(retain_graph=True)
        (results[1] * results[4]).mean().backward()


@scenario(tags=(*TAGS, "autocast"), fp64=False)
def aot_layers_under_autocast(p: Probe) -> None:
    """Autocast keeps casts of weights, not those of values on the way, of which each layer makes several."""

    def layer(x: Tensor, w: Tensor, b: Tensor, shared: Tensor) -> Tensor:
        several = functional.linear(x, w, b).float() + functional.linear(x, w).float().sin()
        return (x + several + functional.linear(x, w.t()).float().cos()).tanh()

    stack = _Stack(p, tied=(5,))
    call = p.compile(lambda x: stack.run(layer, x)[-1])
    with torch.autocast(p.device.type, dtype=torch.bfloat16):
        out = call(p.randn(4, WIDTH))
    with p.backward():
        out.square().mean().backward()


def _register_change(name: str) -> None:
    def body(p: Probe) -> None:
        stack = _Stack(p)

        def run(x: Tensor) -> Tensor:
            results = stack.run(LAYERS[name], x)
            results[-1].mul_(2)
            return results[-1]

        out = p.compile(run)(p.randn(4, WIDTH))
        p.value("result", out.detach())
        with p.backward():
            out.square().mean().backward()

    body.__name__ = f"aot_layers_whose_last_result_is_changed_{name}"
    body.__doc__ = f"The last result is changed in place: an error only if eager has saved it ({name})."
    is_saved = name == "shared_twice"
    scenario(tags=(*TAGS, "in-place", *(["errors"] if is_saved else [])))(body)


for _name in ("residual", "shared_twice", "clipped", "detached"):
    _register_change(_name)


@scenario(tags=TAGS)
def aot_layers_without_gradients(p: Probe) -> None:
    """Under no_grad, then with grad, then of an input that has a history."""
    stack = _Stack(p)
    call = p.compile(lambda x: stack.run(_residual, x)[-1])
    with torch.no_grad():
        p.value("without", call(p.randn(4, WIDTH)))
    x = p.leaf("x", p.randn(4, WIDTH, requires_grad=True))
    for given in (x, x * 2):
        with p.backward():
            call(given).square().mean().backward()


@scenario(tags=TAGS)
def aot_layers_of_images(p: Probe) -> None:
    """Convolutions and normalisations, one with running statistics, which each layer changes."""
    for kind, norm in {"group": torch.nn.GroupNorm, "batch": torch.nn.BatchNorm2d}.items():
        sizes = (2, 4) if kind == "group" else (4,)
        norms = p.module(torch.nn.ModuleList(norm(*sizes) for _ in range(4)), kind)
        weights = [p.leaf(f"{kind}{i}", p.randn(4, 4, 3, 3, requires_grad=True)) for i in range(4)]

        def run(x: Tensor, norms: Any = norms, weights: Sequence[Tensor] = weights) -> Tensor:
            for norm, weight in zip(norms, weights, strict=True):
                inner = functional.silu(norm(functional.conv2d(x, weight, padding=1)))
                x = (x + inner * 0.5).sin() + inner
            return x

        image = p.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
        with p.backward():
            p.compile(run)(image).square().mean().backward()
