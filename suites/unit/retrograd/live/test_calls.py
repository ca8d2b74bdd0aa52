"""The typed calls: each against eager, in value, layout, identity and error."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import retrograd
from retrograd.engine.nodes import materializes_grads
from unit.retrograd.programs import Square

CONTEXTS = {
    "eager": contextlib.nullcontext,
    "retrograd": lambda: retrograd.compiled_autograd("eager", strict=True),
}


def both(run: Callable[[contextlib.AbstractContextManager[Any]], Any]) -> tuple[Any, Any]:
    """What `run` returns (or the error it raises) in eager and here."""
    results = []
    for context in CONTEXTS.values():
        try:
            results.append(run(context()))
        except Exception as error:
            results.append((type(error), str(error)))
    return results[0], results[1]


HOOK_RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda grad: None,
    "another gradient": lambda grad: grad * 2,
    "another size": lambda grad: grad[:1],
    "another dtype": lambda grad: grad.double(),
    "a string": lambda grad: "gradient",
    "a tuple": lambda grad: (grad,),
}


@pytest.mark.parametrize("name", HOOK_RESULTS)
def test_a_tensor_hook_may_return_what_eager_allows(name: str) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> list[float]:
        w = torch.arange(1.0, 4.0, requires_grad=True)
        y = w.sin()
        y.register_hook(HOOK_RESULTS[name])
        with context:
            y.sum().backward()
        return w.grad.tolist()

    eager, ours = both(run)
    assert eager == ours


NODE_RESULTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "nothing": lambda grads: None,
    "other gradients": lambda grads: tuple(g * 3 for g in grads),
    "too many": lambda grads: (*grads, grads[0]),
    "a tensor": lambda grads: grads[0],
    "a list": lambda grads: list(grads),
    "another size": lambda grads: tuple(g[:1] for g in grads),
    "None inside": lambda grads: tuple(None for _ in grads),
}


@pytest.mark.parametrize("name", NODE_RESULTS)
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_node_hook_may_return_what_eager_allows(name: str, when: str) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> Any:
        w = torch.arange(1.0, 4.0, requires_grad=True)
        y = w.sin()
        if when == "pre":
            y.grad_fn.register_prehook(NODE_RESULTS[name])
        else:
            y.grad_fn.register_hook(lambda outputs, grads: NODE_RESULTS[name](outputs))
        with context:
            y.sum().backward()
        return None if w.grad is None else w.grad.tolist()

    eager, ours = both(run)
    assert eager == ours


@pytest.mark.parametrize("result", [None, 1, torch.ones(3), torch.ones(2)])
def test_a_post_accumulate_hook_must_return_none(result: Any) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> list[float]:
        w = torch.arange(1.0, 4.0, requires_grad=True)
        w.register_post_accumulate_grad_hook(lambda p: result)
        with context:
            w.sin().sum().backward()
        return w.grad.tolist()

    eager, ours = both(run)
    assert eager == ours


def function_returning(gradients: Callable[[Tensor], Any], inputs: int) -> Any:
    class Returning(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            return args[0] * 1

        @staticmethod
        def backward(ctx, grad):
            return gradients(grad)

    w = torch.arange(1.0, 4.0, requires_grad=True)
    return w, Returning.apply(*([w] * inputs), "no tensor")


FUNCTION_RESULTS: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "right": (1, lambda g: (g, None)),
    "trailing None": (1, lambda g: (g, None, None, None)),
    "too few": (2, lambda g: (g, g)),
    "too many": (1, lambda g: (g, None, g)),
    "for a non-tensor": (1, lambda g: (g, g)),
    "not a tensor": (1, lambda g: ("g", None)),
    "None": (1, lambda g: (None, None)),
    "None and a tensor": (2, lambda g: (None, g, None)),
    "wrong size": (1, lambda g: (g.new_ones(2), None)),
    "expandable": (1, lambda g: (g.new_ones(2, 3), None)),
    "another dtype": (1, lambda g: (g.double(), None)),
}


@pytest.mark.parametrize("name", FUNCTION_RESULTS)
def test_a_custom_backward_may_return_what_eager_allows(name: str) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> Any:
        inputs, gradients = FUNCTION_RESULTS[name]
        w, y = function_returning(gradients, inputs)
        with context:
            y.sum().backward()
        return None if w.grad is None else (w.grad.tolist(), w.grad.dtype)

    eager, ours = both(run)
    if name == "wrong size":  # the same error, but the engine's own text names the check
        assert eager[0] is ours[0] is RuntimeError
        assert "but expected shape compatible with [3]" in ours[1]
    else:
        assert eager == ours


PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 3),
    "transposed": lambda: torch.randn(3, 4).t(),
    "with gaps": lambda: torch.randn(8, 3)[::2],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "of one row": lambda: torch.randn(1, 3),
    "zero-dimensional": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
}
GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda like: torch.randn(like.shape),
    "transposed": lambda like: torch.randn(like.shape[::-1]).permute(*reversed(range(like.dim()))),
    "expanded": lambda like: torch.randn(()).expand(like.shape),
}


@pytest.mark.parametrize("existing", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_grad_has_eagers_value_layout_and_identity(parameter: str, gradient: str, existing: bool) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> Any:
        torch.manual_seed(3)
        w = PARAMETERS[parameter]().requires_grad_()
        given = GRADIENTS[gradient](w)
        before = None
        if existing:
            before = w.grad = torch.ones_like(w.detach().contiguous())
        y = w * 1 if gradient != "expanded" else w.clone()
        with context:
            y.backward(given)
        assert w.grad is not None
        return w.grad.tolist(), w.grad.stride(), w.grad is before, w.grad.data_ptr() == given.data_ptr()

    eager, ours = both(run)
    assert eager[0] == ours[0]
    assert eager[2:] == ours[2:]
    sizes = PARAMETERS[parameter]().shape
    relevant = [i for i, size in enumerate(sizes) if size > 1]
    assert [eager[1][i] for i in relevant] == [ours[1][i] for i in relevant]


def test_a_gradient_that_somebody_holds_is_copied_not_stolen() -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> bool:
        held: list[Tensor] = []
        w = torch.ones(3, requires_grad=True)
        w.register_hook(held.append)
        with context:
            w.sin().sum().backward()
        held[0].fill_(99)
        return bool((w.grad == 99).any())

    assert both(run) == (False, False)


STOLEN = """
import contextlib, torch, retrograd

def run(context):
    pointers = []
    w = torch.ones(1000, requires_grad=True)
    w.register_hook(lambda grad: pointers.append(grad.data_ptr()))
    with context:
        w.sin().sum().backward()
    return w.grad.data_ptr() == pointers[0]

print(run(contextlib.nullcontext()), run(retrograd.compiled_autograd(backend="eager")))
"""


def test_a_fresh_gradient_is_stolen_not_copied() -> None:
    """In a process of its own: once Dynamo has raised an error, something holds one reference more, and
    gradients are copied."""
    done = subprocess.run([sys.executable, "-c", STOLEN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("order", ["sparse first", "dense first"])
def test_sparse_and_dense_gradients_meet(order: str) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> Any:
        w = torch.arange(12.0).reshape(4, 3).requires_grad_()
        index = torch.tensor([0, 2, 2])
        if order == "sparse first":
            dense = (w * 2).sum()
            sparse = torch.nn.functional.embedding(index, w, sparse=True).sum()
        else:
            sparse = torch.nn.functional.embedding(index, w, sparse=True).sum()
            dense = (w * 2).sum()
        with context:
            (sparse + dense).backward()
        return w.grad.layout, w.grad.to_dense().tolist()

    eager, ours = both(run)
    assert eager == ours


def test_activations_are_freed_as_the_backward_goes() -> None:
    import weakref

    def run(context: contextlib.AbstractContextManager[Any]) -> list[int]:
        class Keep(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                saved = x.clone()
                ctx.save_for_backward(saved)
                alive.append(weakref.ref(saved))
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                assert ctx.saved_tensors[0].shape == grad.shape
                return grad

        alive: list[Any] = []
        counts: list[int] = []
        w = torch.ones(3, requires_grad=True)
        y = w
        for _ in range(4):
            y = Keep.apply(y)
            y.register_hook(lambda grad: counts.append(sum(ref() is not None for ref in alive)))
        root = y.sum()
        del y
        with context:
            root.backward()
        return counts

    eager, ours = both(run)
    assert eager == ours == [4, 3, 2, 1]


@pytest.mark.parametrize("mode", ["grad mode", "autocast"])
def test_a_hook_that_leaves_a_mode_on_concerns_only_its_own_node(mode: str) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> Any:
        def leave_on(grad: Tensor) -> None:
            if mode == "grad mode":
                torch.set_grad_enabled(True)
            else:
                torch.set_autocast_enabled("cpu", True)

        seen: list[Any] = []
        w = torch.arange(1.0, 5.0).reshape(2, 2).requires_grad_()
        x = w @ w
        x.register_hook(lambda grad: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))))
        y = x.sin()
        z = y.exp()
        z.register_hook(leave_on)
        root = z.sum()
        with context:
            root.backward()
        return seen, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), w.grad.tolist()

    eager, ours = both(run)
    assert eager == ours


@pytest.mark.parametrize("late", [False, True], ids=["", "after a late hook"])
@pytest.mark.parametrize("reader", ["node", "function"])
def test_a_saved_tensor_changed_under_way_is_eagers_error(reader: str, late: bool) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> None:
        w = torch.ones(3, requires_grad=True)
        saved = w * 1
        y = (saved.sin() if reader == "node" else Square.apply(saved)) * 1

        def change(grad: Tensor) -> None:
            with torch.no_grad():
                saved.add_(1)
            if late:
                w.register_hook(lambda grad: None)

        y.register_hook(change)
        with context:
            y.sum().backward()

    eager, ours = both(run)
    assert eager[0] is ours[0] is RuntimeError
    text = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert text in eager[1]
    assert text in ours[1]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_torch_warns_of_a_grad_in_the_wrong_layout_as_in_eager(create_graph: bool) -> None:
    def warnings_of(context: contextlib.AbstractContextManager[object]) -> list[str]:
        x = torch.randn(3, 4, requires_grad=True)
        x.grad = torch.randn(4, 3).t()
        with warnings.catch_warnings(record=True) as caught, context:
            warnings.simplefilter("always")
            x.sin().sum().backward(create_graph=create_graph)
        return [str(w.message) for w in caught if "layout contract" in str(w.message)]

    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        eager = warnings_of(contextlib.nullcontext())
        ours = warnings_of(retrograd.compiled_autograd("eager", strict=True))
    finally:
        torch.set_warn_always(before)
    assert ours == eager
    assert len(ours) == 1
    assert "grad.sizes() = [3, 4], strides() = [1, 3]" in ours[0]


def test_hooks_are_called_once_where_the_node_writes_a_grad_that_python_refuses() -> None:
    calls: list[torch.dtype] = []
    x = torch.ones(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.dtype))
    root = (x * 2).sum()
    x.data = x.data.double()
    with retrograd.compiled_autograd("eager", strict=True):
        root.backward()
    assert calls == [torch.float32]
    x.grad = None
    (x * 2).sum().backward()
    assert calls == [torch.float32, torch.float64]


def test_the_flag_of_a_function_is_read_where_torch_keeps_it() -> None:
    ctx = Square.apply(torch.ones(2, requires_grad=True)).grad_fn
    assert materializes_grads(ctx)
    for flag in (False, True, False):
        ctx.set_materialize_grads(flag)
        assert materializes_grads(ctx) is flag


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x * 2, lambda x: (x * 2).t(), Square.apply])
def test_the_error_for_a_changed_saved_tensor_is_torch_s(make: Any) -> None:
    errors = []
    for context in (contextlib.nullcontext(), retrograd.compiled_autograd("eager", strict=True)):
        saved = make(torch.ones(2, 2, requires_grad=True))
        y = saved * torch.ones(2, requires_grad=True)
        whole = saved if saved._base is None else saved._base
        y.register_hook(lambda _, whole=whole: torch.autograd.graph.increment_version(whole))
        with context, pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
            y.sum().backward()
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


class Asking(torch.autograd.Function):
    """Compares its context with its node."""

    found: ClassVar[dict[Any, str]] = {}
    answers: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        node = torch._C._current_autograd_node()
        executed = torch._C._will_engine_execute_node(ctx)
        Asking.answers.append((ctx == node, ctx != node, ctx in [node], Asking.found.get(ctx), executed))
        return grad


def test_a_context_is_equal_to_its_node() -> None:
    y = Asking.apply(torch.ones(2, requires_grad=True))
    Asking.found[y.grad_fn] = "found"
    with retrograd.compiled_autograd("eager", strict=True):
        y.sum().backward()
    assert Asking.answers == [(True, False, True, "found", True)]


@pytest.mark.parametrize("retain", [False, True])
def test_an_unpack_hook_under_a_grad_mode_that_a_hook_left_on(retain: bool) -> None:
    def run(context: contextlib.AbstractContextManager[Any]) -> Any:
        seen: list[Any] = []
        x = torch.tensor([0.25, 0.5], requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda packed: packed):
            y = x * x
            z = y.sin()
        z.grad_fn.register_prehook(lambda grads: torch.set_grad_enabled(True) and None)
        y.register_hook(
            lambda grad: seen.append([node.name() for node, _ in grad.grad_fn.next_functions if node])
        )
        with context:
            z.sum().backward(retain_graph=retain)
        return seen, x.grad.tolist()

    eager, ours = both(run)
    assert eager == ours
    assert eager[0] == [["CosBackward0"]]


class LetsGo(torch.autograd.Function):
    """Says whether what it saved is free once it has let it go, in the middle of its backward."""

    freed: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x, keeps_none):
        ctx.save_for_backward(x.exp(), None if keeps_none else x.sin())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        saved = [weakref.ref(value) for value in ctx.saved_tensors if value is not None]
        ctx.maybe_clear_saved_tensors()
        LetsGo.freed.append(all(one() is None for one in saved))
        return grad * 2, None


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("keeps_none", [False, True])
def test_what_a_backward_lets_go_is_free_while_it_runs(retain, keeps_none):
    """Else the backward of a compiled model would hold all that it saved until it returns."""

    def steps(context):
        LetsGo.freed = []
        with context:
            for _ in range(5):  # the first run of a plan makes no guards
                x = torch.ones(3, requires_grad=True)
                loss = (LetsGo.apply(x.sin(), keeps_none) * LetsGo.apply(x.cos(), True)).sum()
                loss.backward(retain_graph=retain)
                if retain:
                    loss.backward()
        return LetsGo.freed, x.grad.tolist()

    eager, ours = both(steps)
    assert ours == eager
    assert eager[0][-1]


def test_gradients_of_all_layouts_beside_one_another() -> None:
    """Those that a leaf takes as they are, in whatever layout it has, and those that are copied into its."""

    def run(context: contextlib.AbstractContextManager[Any]) -> list[Any]:
        torch.manual_seed(0)
        kernel = torch.randn(3, 2, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
        single = torch.randn(3, 3, 1, 1).to(memory_format=torch.channels_last).requires_grad_()
        plain, turned = torch.randn(4, 3, requires_grad=True), torch.randn(3, 4).t().requires_grad_()
        leaves, shown = (kernel, single, plain, turned), []
        for step in range(6):
            image = torch.randn(2, 2, 5, 5).to(memory_format=torch.channels_last)
            features = functional.conv2d(functional.conv2d(image, kernel), single).mean((2, 3))
            with context:
                (features @ plain.t() @ turned.sin()).square().sum().backward()
            shown += [(leaf.grad.stride(), leaf.grad.flatten().tolist()) for leaf in leaves]
            if step % 3:
                for leaf in leaves:
                    leaf.grad = None
        return shown

    eager, ours = both(run)
    assert eager == ours
