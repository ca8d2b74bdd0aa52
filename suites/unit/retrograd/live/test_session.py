"""One backward through the gateway: right results, clean fallbacks, nothing left behind."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch._C._dynamo import compiled_autograd as engine_protocol

import retrograd
from retrograd.live.capture.recorder import BackwardRecorder
from retrograd.live.contexts import is_anything_open
from unit.retrograd.programs import Square, everything, leaf, observed


def nothing_is_left() -> bool:
    prior = engine_protocol.set_autograd_compiler(None, False)
    return prior[0] is None and not is_anything_open()


def test_all_kinds_of_calls_are_as_in_eager_to_the_bit() -> None:
    grad, events = observed(contextlib.nullcontext(), everything)
    compiled_grad, compiled_events = observed(retrograd.compiled_autograd("eager"), everything)
    assert torch.equal(grad, compiled_grad)
    assert events == compiled_events


def test_a_structure_met_again_is_not_captured_again() -> None:
    w = leaf()
    for _ in range(3):
        w.grad = None
        with retrograd.compiled_autograd("eager"):
            (w * w).sum().backward()
    assert (retrograd.counters["captures"], retrograd.counters["runs"]) == (1, 3)


def test_equal_structure_in_another_order_gets_a_plan_of_its_own() -> None:
    def events(flip: bool, context: contextlib.AbstractContextManager[object]) -> list[str]:
        seen: list[str] = []
        x = torch.ones(2, requires_grad=True)
        if flip:
            right = x.sin()
            left = x.sin()
        else:
            left = x.sin()
            right = x.sin()
        left.register_hook(lambda grad: seen.append("left"))
        right.register_hook(lambda grad: seen.append("right"))
        root = (left + right).sum()
        with context:
            root.backward()
        return seen

    for flip in (False, True, False):
        expected = events(flip, contextlib.nullcontext())
        assert events(flip, retrograd.compiled_autograd("eager")) == expected
    assert (retrograd.counters["captures"], retrograd.counters["plans"]) == (1, 2)


def test_it_is_a_decorator_too() -> None:
    @retrograd.compiled_autograd("eager")
    def step(w: torch.Tensor) -> None:
        (w * w).sum().backward()

    w = leaf()
    step(w)
    step(w)
    assert torch.equal(w.grad, w.detach() * 4)
    assert retrograd.counters["runs"] == 2


def test_the_inner_of_two_contexts_wins_and_the_outer_is_restored() -> None:
    outer, inner = retrograd.compiled_autograd("eager"), retrograd.compiled_autograd("aten")
    w = leaf()
    with outer:
        with inner:
            (w * w).sum().backward()
        (w * w).cos().sum().backward()
    assert len(inner.explain().backwards) == len(outer.explain().backwards) == 1
    assert inner.explain().backwards[0].backend == "aten"
    assert nothing_is_left()


def test_a_user_error_comes_out_unchanged_and_leaves_nothing_behind() -> None:
    class Mine(Exception):
        pass

    def fail(grad: torch.Tensor) -> None:
        raise Mine("from the hook")

    w = leaf()
    y = w.sin()
    y.register_hook(fail)
    root = y.exp().sum()
    with pytest.raises(Mine, match="from the hook"), retrograd.compiled_autograd("eager"):
        root.backward()
    assert nothing_is_left()
    assert w.grad is None
    with retrograd.compiled_autograd("eager", strict=True):
        (w * w).sum().backward()
    assert torch.equal(w.grad, w.detach() * 2)


def test_eager_errors_are_eager_errors_and_no_fallback() -> None:
    w = leaf()
    root = (w * w).sum()
    with retrograd.compiled_autograd("eager"):
        root.backward()
        with pytest.raises(RuntimeError, match="second time"):
            root.backward()
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.ones(2).sum().backward()
    assert retrograd.counters["fallbacks"] == 0
    assert nothing_is_left()


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_unreached_input_raises_what_eager_raises(position: int) -> None:
    w = leaf()
    inputs = [w, w]
    inputs.insert(position, torch.ones(2, requires_grad=True))

    def message(context: contextlib.AbstractContextManager[object]) -> str:
        with pytest.raises(RuntimeError) as error, context:
            torch.autograd.grad((w * w).sum(), inputs)
        return str(error.value)

    assert message(retrograd.compiled_autograd("eager")) == message(contextlib.nullcontext())


def test_a_fallback_is_right_warned_of_once_and_explained() -> None:
    w = leaf()
    with retrograd.compiled_autograd("eager") as context, torch.autograd.set_detect_anomaly(True):
        with pytest.warns(retrograd.FallbackWarning, match="anomaly mode"):
            (w * w).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error", retrograd.FallbackWarning)
            (w * w).sum().backward()
    assert torch.equal(w.grad, w.detach() * 4)
    assert [(reason.code, count) for reason, count in context.explain().fallbacks.items()] == [
        ("anomaly-mode", 2)
    ]
    assert "ran as eager runs it 2 times [anomaly-mode]" in str(context.explain())


def test_strict_raises_instead_of_falling_back() -> None:
    w = leaf()
    root = (w * w).sum()
    with retrograd.compiled_autograd("eager", strict=True), torch.autograd.set_detect_anomaly(True):
        with pytest.raises(retrograd.CaptureError, match="anomaly mode") as error:
            root.backward()
    assert error.value.reason.stage == "live.capture"
    assert error.value.reason.way_out.startswith("without strict=True, it runs eagerly")
    assert w.grad is None


RECORDER_METHODS = (
    "begin",
    "enter_node",
    "node",
    "validate",
    "function",
    "accumulate",
    "add",
    "tensor_hook",
    "node_pre_hook",
    "node_post_hook",
    "post_accumulate_hook",
    "unpack",
    "copy_slices_prologue",
    "copy_slices_epilogue",
    "finish",
)


class Planted(Exception):
    pass


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
@pytest.mark.parametrize("rows", [(5,), (5, 6)], ids=["static", "symbolic"])
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("method", RECORDER_METHODS)
def test_a_fault_anywhere_in_capture_leaves_gradients_as_eager_has_them(
    method: str, nth: int, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = retrograd.compiled_autograd("eager")
    for count in rows[:-1]:
        observed(context, everything, count)
    original, calls = getattr(BackwardRecorder, method), []

    def faulty(self: BackwardRecorder, *args: object) -> object:
        calls.append(method)
        if len(calls) == nth:
            raise Planted(method)
        return original(self, *args)

    monkeypatch.setattr(BackwardRecorder, method, faulty)
    grad, events = observed(contextlib.nullcontext(), everything, rows[-1])
    faulty_grad, faulty_events = observed(context, everything, rows[-1])
    assert torch.equal(grad, faulty_grad)
    assert events == faulty_events
    assert context.explain().fallbacks.total() == (len(calls) >= nth)
    monkeypatch.undo()
    assert nothing_is_left()
    assert torch.equal(observed(context, everything, rows[-1])[0], grad)


def backward_of_its_square(inner: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that runs a backward of its own, over `inner`."""

    def nested(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            (inner * inner).sum().backward()

    return nested


def test_a_backward_inside_a_hook_is_compiled_too() -> None:
    inner = torch.ones(3, requires_grad=True)
    w = leaf()
    y = w.sin()
    y.register_hook(backward_of_its_square(inner))
    with retrograd.compiled_autograd("eager", strict=True):
        y.sum().backward()
    assert torch.equal(inner.grad, torch.full((3,), 2.0))
    assert torch.equal(w.grad, w.detach().cos())
    assert retrograd.counters["runs"] == 2


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_threads_in_one_context_each_get_their_gradients() -> None:
    context = retrograd.compiled_autograd("eager")
    results: dict[int, bool] = {}

    def train(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(4, 3, generator=generator, requires_grad=True)
        right = True
        for _ in range(20):
            w.grad = None
            root = Square.apply(w).sin().sum()
            with context:
                root.backward()
            right &= torch.equal(w.grad, (w.detach() ** 2).cos() * 2 * w.detach())
        results[seed] = right

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == dict.fromkeys(range(4), True)
    assert nothing_is_left()


def test_other_threads_without_a_context_run_stock() -> None:
    w = leaf()

    def train() -> None:
        (w * w).sum().backward()

    with retrograd.compiled_autograd("eager"):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(timeout=60)
    assert torch.equal(w.grad, w.detach() * 2)
    assert retrograd.counters["captures"] == 0


def test_stock_compiled_autograd_before_and_after_keeps_working() -> None:
    from torch._dynamo import compiled_autograd as stock

    def grad(context: contextlib.AbstractContextManager[object]) -> torch.Tensor:
        w = leaf()
        root = (w.sin() * w).sum()
        with context:
            root.backward()
        assert w.grad is not None
        return w.grad

    expected = grad(contextlib.nullcontext())
    for _ in range(2):
        assert torch.equal(grad(stock._enable(lambda gm: gm)), expected)
        assert torch.equal(grad(retrograd.compiled_autograd("eager", strict=True)), expected)
    assert nothing_is_left()


@pytest.mark.parametrize("retain_grad", [False, True], ids=["", "in the engine's frame"])
def test_a_second_derivative_through_unpack_hooks_is_eagers(retain_grad: bool) -> None:
    def second(context: contextlib.AbstractContextManager[object]) -> torch.Tensor:
        w = leaf()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * 1):
            y = w.sin()
            if retain_grad:
                y.retain_grad()
            z = (y * y).sum()
        with context:
            (grad,) = torch.autograd.grad(z, w, create_graph=True)
            (twice,) = torch.autograd.grad(grad.sum(), w)
        return twice

    compiled = second(retrograd.compiled_autograd("eager", strict=True))
    assert torch.equal(compiled, second(contextlib.nullcontext()))


def test_a_strict_error_inside_a_hook_is_the_hooks_error() -> None:
    inner = torch.ones(3, requires_grad=True)
    w = leaf()
    y = w.sin()
    y.retain_grad()
    y.register_hook(backward_of_its_square(inner))
    with pytest.raises(retrograd.CaptureError, match="inside one with retain_grad") as error:
        with retrograd.compiled_autograd("eager", strict=True):
            y.sum().backward()
    assert error.value.reason.code == "nested-in-engine-frame"
    assert w.grad is None
    assert nothing_is_left()


def test_a_differentiable_backward_is_eagers_whatever_the_context() -> None:
    w = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = w.clone()
        y[0].mul_(w[1])
    (expected,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    with retrograd.compiled_autograd("eager", strict=True) as context:
        (grad,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    assert torch.equal(grad, expected)
    assert grad.requires_grad == expected.requires_grad
    assert not context.report.fallbacks


@pytest.mark.parametrize("backend", ["eager", "aten"])
def test_a_compiled_forward_is_laid_in_also_with_changing_sizes(backend: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    compiled = torch.compile(net, backend="aot_eager")
    context = retrograd.compiled_autograd(backend, strict=True)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 4)
        net.zero_grad()
        net(x).pow(2).sum().backward()
        expected = [p.grad for p in net.parameters()]
        net.zero_grad()
        loss = compiled(x).pow(2).sum()
        with context:
            loss.backward()
        for p, grad in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad)
    assert not [step.reason for b in context.explain().backwards for step in b.schedule.opaque_calls]


def test_many_steps_leave_no_tensors_behind() -> None:
    import gc

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())

    def step() -> None:
        observed(retrograd.compiled_autograd("aten"), everything)

    for _ in range(3):
        step()
    before = tensors()
    for _ in range(20):
        step()
    assert tensors() <= before


def test_a_backend_need_not_be_hashable() -> None:
    """Two backwards of one structure are one capture with it, too."""

    class Backend(list[int]):
        def __call__(self, gm: torch.fx.GraphModule, example_inputs: object) -> object:
            self.append(len(gm.graph.nodes))
            return gm.forward

    backend, x = Backend(), torch.randn(3, requires_grad=True)
    context = retrograd.compiled_autograd(backend, strict=True)
    for _ in range(2):
        x.grad = None
        loss = (x.sin() * x).sum()
        with context:
            loss.backward()
    assert len(backend) == 1
    assert x.grad is not None
    assert torch.allclose(x.grad, x.detach().cos() * x.detach() + x.detach().sin())
