"""Lowering: traced once, reused under guards, symbolic when sizes change, interpreted when it must."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import retrograd
from retrograd import LoweringError
from retrograd.backends.registry import AtenBackend
from unit.retrograd.programs import leaf


def train(context: retrograd.CompiledAutograd, rows: int, dtype: torch.dtype = torch.float32) -> None:
    """One checked step of a small network on `rows` rows."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(dtype)
    x = torch.randn(rows, 6, dtype=dtype)
    (net(x) ** 2).sum().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    loss = (net(x) ** 2).sum()
    with context:
        loss.backward()
    for p, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_sizes_settle_after_two_compilations() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for rows in (4, 5, 6, 7, 12, 5):
        train(context, rows)
    assert (retrograd.counters["captures"], retrograd.counters["lowerings"]) == (2, 2)
    symbolic = context.explain().backwards[1].lowerings[0]
    assert "size()[0] ==" in symbolic.guards


class Preparing(AtenBackend):
    """Records when it is prepared, and when it compiles."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def prepare(self, *, in_process: bool = False) -> None:
        self.events.append("prepare")

    def decompositions(self) -> Mapping[Any, Any]:
        self.events.append("trace")
        return super().decompositions()

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("compile")
        return super().compile(*args, **kwargs)


def test_a_backend_prepares_before_a_trace_too_since_a_program_may_reach_a_gpu_inside_the_context() -> None:
    """Inductor's compile workers start only in a process that has used a GPU. A program that entered the
    context first compiled its first kernels one at a time, until the workers ran."""
    backend = Preparing()
    context = retrograd.compiled_autograd(backend)
    backend.events.clear()
    train(context, 4)
    assert backend.events[-3:] == ["prepare", "trace", "compile"]


@pytest.mark.parametrize("rows", [0, 1])
def test_zero_and_one_row_are_right_after_symbolic_sizes(rows: int) -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    for count in (4, 5, rows, 6, rows):
        train(context, count)
    assert context.explain().recompiles


def test_without_dynamic_every_size_is_lowered_until_the_limit() -> None:
    context = retrograd.compiled_autograd("aten", dynamic=False, recompile_limit=2)
    for rows in (4, 5, 6, 7, 8):
        train(context, rows)
    last = context.explain().backwards[-1].lowerings[-1]
    assert last.how == "interpreted"
    assert last.because.startswith("recompile limit of 2 reached: argument")


def test_in_strict_mode_the_limit_is_an_error_with_a_way_out() -> None:
    context = retrograd.compiled_autograd("aten", dynamic=False, recompile_limit=2, strict=True)
    for rows in (4, 5, 6):
        train(context, rows)
    with pytest.raises(LoweringError, match="recompile limit of 2") as raised:
        train(context, 7)
    assert raised.value.reason.code == "recompile-limit"
    assert raised.value.reason.way_out == "a larger recompile_limit=, or leave dynamic=None"


def test_another_dtype_is_not_run_by_code_for_the_first() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    train(context, 4, torch.float32)
    train(context, 4, torch.float64)
    train(context, 4, torch.float32)
    assert retrograd.counters["lowerings"] == 2


def test_other_strides_fail_the_guard_and_say_so() -> None:
    context = retrograd.compiled_autograd("aten", strict=True)
    w = leaf()
    for x in (torch.ones(3, 4).t(), torch.ones(4, 3)):
        w.grad = None
        root = (w * x).sum()
        with context:
            root.backward()
        assert torch.equal(w.grad, torch.ones(4, 3))
    (recompile,) = context.explain().recompiles
    assert "stride mismatch" in recompile.because


def test_strides_are_guarded_where_sizes_are_symbolic() -> None:
    context = retrograd.compiled_autograd("aten", dynamic=True, strict=True)
    for gap in (2, 1, 2, 3):  # two lowerings: without gaps, and with gaps of any size
        x = torch.randn(4, 4 * gap)[:, ::gap].requires_grad_()
        grads = []
        for around in (context, contextlib.nullcontext()):
            x.grad = None
            root = (x.sin() @ torch.ones(4, 4)).exp().sum()
            with around:
                root.backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)
        assert grads[0].stride() == grads[1].stride()
    assert retrograd.counters["lowerings"] == 2


def test_undefined_gradients_are_part_of_the_guards() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, give):
            ctx.give = give
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return (grad if ctx.give else None), None

    context = retrograd.compiled_autograd("aten", strict=True)
    w = leaf()
    for give in (True, False, True):
        w.grad = None
        root = Nothing.apply(w.sin() * 2, give).sum()
        with context:
            root.backward()
        assert (w.grad is not None) == give


def test_a_failing_backend_costs_only_the_compilation() -> None:
    def broken(gm: torch.fx.GraphModule, inputs: object) -> object:
        raise ValueError("no code today")

    w = leaf()
    with retrograd.compiled_autograd(broken) as context:
        (w * w).sum().backward()
    assert torch.equal(w.grad, w.detach() * 2)
    assert context.explain().backwards[0].lowerings[0].because == "ValueError: no code today"


def test_strict_reports_a_failing_backend() -> None:
    def broken(gm: torch.fx.GraphModule, inputs: object) -> object:
        raise ValueError("no code today")

    w = leaf()
    with pytest.raises(retrograd.LoweringError, match="no code today"):
        with retrograd.compiled_autograd(broken, strict=True):
            (w * w).sum().backward()
    assert w.grad is None


def test_a_callable_backend_gets_a_functional_aten_graph() -> None:
    seen: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen.append(gm)
        return gm.forward

    w = leaf()
    y = w.clone()
    y[:, 0].mul_(3)
    expected = torch.autograd.grad((y * y).sum(), w, retain_graph=True)[0]
    with retrograd.compiled_autograd(backend, strict=True):
        (grad,) = torch.autograd.grad((y * y).sum(), w)
    torch.testing.assert_close(grad, expected)
    targets = [node.target for node in seen[0].graph.nodes if node.op == "call_function"]
    assert targets
    assert all(isinstance(target, torch._ops.OpOverload) for target in targets)
    assert not any(target._schema.is_mutable for target in targets)


def test_a_boxed_backend_of_functorch_is_accepted() -> None:
    from functorch.compile import nop

    w = leaf()
    with retrograd.compiled_autograd(nop, strict=True):
        (w * w).sum().backward()
    assert torch.equal(w.grad, w.detach() * 2)


def test_a_backend_that_returns_no_callable_is_told_so() -> None:
    w = leaf()
    with pytest.raises(retrograd.LoweringError, match="returned NoneType, expected a callable"):
        with retrograd.compiled_autograd(lambda gm, inputs: None, strict=True):
            (w * w).sum().backward()


def test_inductor_compiles_the_segments() -> None:
    context = retrograd.compiled_autograd("inductor", strict=True)
    train(context, 4)
    assert [low.how for low in context.explain().backwards[0].lowerings] == ["inductor"]


def test_a_formula_may_ask_whether_its_saved_tensors_require_grad() -> None:
    def grads(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        a, b = torch.randn(3, 3, requires_grad=True), torch.randn(3, requires_grad=True)
        root = torch.linalg.solve(a, b).sum()
        with context:
            root.backward()
        return [a.grad, b.grad]

    ours = grads(retrograd.compiled_autograd("aten", strict=True))
    torch.testing.assert_close(ours, grads(contextlib.nullcontext()))


def test_code_traced_under_autocast_is_not_run_without_it() -> None:
    def grad(context: contextlib.AbstractContextManager[object], autocast: bool) -> torch.Tensor:
        torch.manual_seed(0)
        w = torch.randn(4, 4, requires_grad=True)
        root = (torch.randn(4, 4) @ w).sin().sum()
        with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            root.backward()
        assert w.grad is not None
        return w.grad

    context = retrograd.compiled_autograd("aten", strict=True)
    for autocast in (True, False, True):
        assert torch.equal(grad(context, autocast), grad(contextlib.nullcontext(), autocast))
    assert not torch.equal(grad(context, True), grad(context, False))
    (recompile,) = context.explain().recompiles
    assert recompile.because == "autocast was torch.bfloat16 on cpu, now off"


@pytest.mark.parametrize("kind", ["negated", "conjugated", "zero"])
def test_lazy_values_are_not_read_from_memory(kind: str) -> None:
    calls = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        def run(*args: torch.Tensor) -> object:
            calls.append(any(arg.is_neg() or arg.is_conj() or arg._is_zerotensor() for arg in args))
            return gm(*args)

        return run

    plain = torch.randn(3, dtype=torch.complex64 if kind == "conjugated" else torch.float32)
    lazy = {
        "negated": lambda: torch.complex(plain, -plain).conj().imag,
        "conjugated": plain.conj,
        "zero": lambda: torch._efficientzerotensor((3,)),
    }[kind]()

    def grads(context: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        x = torch.arange(3.0).to(plain.dtype).requires_grad_()
        found = []
        for cotangent in (plain, lazy, plain):
            with context:
                found += torch.autograd.grad((x.exp() * x).tan(), x, cotangent)
        return found

    found = grads(retrograd.compiled_autograd(backend=backend))
    for one, other in zip(found, grads(contextlib.nullcontext()), strict=True):
        assert torch.equal(one, other)
    assert calls == [False, False]


def grouped(weights: tuple[torch.Tensor, ...], x: torch.Tensor) -> torch.Tensor:
    """A sum behind grouped matrix products in float32, which torch's fake kernel does not take."""
    ends = torch.tensor([3, 8], dtype=torch.int32)
    for weight in weights:
        x = torch._grouped_mm(x.sin().exp(), weight, ends).tanh()
    return x.sum()


def _is_refused() -> bool:
    """Whether torch's fake kernel refuses what the real one takes."""
    with FakeTensorMode(), contextlib.suppress(RuntimeError):
        ends = torch.empty(2, dtype=torch.int32)
        torch._grouped_mm(torch.empty(8, 8), torch.empty(2, 8, 8), ends)
        return False
    return True


refused = pytest.mark.skipif(not _is_refused(), reason="this torch's fake kernel takes float32")


@refused
def test_a_call_that_cannot_be_traced_stands_apart_from_what_can_be() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8, requires_grad=True)
    weights = tuple(torch.randn(2, 8, 8, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(grouped(weights, x), (x, *weights))
    with retrograd.compiled_autograd("aten") as context:
        for _ in range(4):
            for found, wanted in zip(
                torch.autograd.grad(grouped(weights, x), (x, *weights)), expected, strict=True
            ):
                assert torch.equal(found, wanted)
    first, then = context.explain().backwards
    assert (first.runs, then.runs) == (1, 3)
    assert len(then.schedule.segments) == 4
    assert [lowering.how for lowering in then.lowerings] == ["aten"] * 4
    assert then.opaque_calls == {first.lowerings[0].because: 3}
    assert retrograd.counters["segments_given_up"] == 1


def test_the_log_says_interpreted_only_of_what_is(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        x = leaf()
        for _ in range(3):
            x = (x.sin().exp() @ torch.ones(3, 3)).tanh()
        x.sum().backward()

    with caplog.at_level("INFO", "retrograd.live"), retrograd.compiled_autograd("aten", regions=1) as context:
        run()
    shared = [one for one in context.explain().backwards[0].lowerings if "shared" in one.because]
    assert shared
    assert not any(one.is_interpreted for one in shared)
    assert "is interpreted" not in caplog.text


@refused
def test_strict_refuses_a_call_that_cannot_be_traced() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    loss = grouped((torch.randn(2, 8, 8, requires_grad=True),), x)
    context = retrograd.compiled_autograd("aten", strict=True)
    with context, pytest.raises(retrograd.LoweringError, match="BF16"):
        loss.backward()


def test_what_follows_a_call_of_several_gradients_that_stands_apart_is_compiled() -> None:
    context = retrograd.compiled_autograd("aten")
    for alpha in (0.1, 0.2, 0.3):
        x = leaf()[:3].detach().requires_grad_()
        (expected,) = torch.autograd.grad(torch.addmm(x.sin(), x.cos(), x.exp(), alpha=alpha).tanh().sum(), x)
        with context:
            torch.addmm(x.sin(), x.cos(), x.exp(), alpha=alpha).tanh().sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected)
    _, *others = context.explain().backwards
    for other in others:
        assert other.opaque_calls.total() == 1
        assert {lowering.how for lowering in other.lowerings} == {"aten"}
