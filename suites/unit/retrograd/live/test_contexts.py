"""Who compiles a backward: contexts nested, suspended, shared, left elsewhere; the process-wide switch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._C._dynamo import compiled_autograd as engine_protocol
from torch._dynamo import compiled_autograd as stock

import retrograd
from retrograd.config import Config
from retrograd.events import counters
from retrograd.live.contexts import claim, is_anything_open
from retrograd.live.session import Session
from retrograd.report import NOTHING, Report
from unit.retrograd.programs import leaf


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    retrograd.disable()
    prior = engine_protocol.set_autograd_compiler(None, False)
    assert prior[0] is None
    assert not is_anything_open()


def ran_by() -> str:
    """Which backend ran a backward just now: the name of ours, or `stock`."""
    before = {id(backward): backward.runs for backward in retrograd.explain().backwards}
    w = leaf()
    w.sin().sum().backward()
    assert torch.equal(w.grad, w.detach().cos())
    ran = [b.backend for b in retrograd.explain().backwards if b.runs > before.get(id(b), 0)]
    return ran[0] if ran else "stock"


def in_thread(fn: Callable[[], object]) -> object:
    """What `fn` returns or raises on a thread of its own."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(fn())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=60)
    return results[0]


class CountingCompiler:
    """A compiler for stock compiled autograd that counts its graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        self.graphs += 1
        return gm


# the process-wide switch


def test_enable_compiles_on_all_threads_until_disable() -> None:
    release, ready = threading.Event(), threading.Event()
    seen: list[str] = []

    def waiting() -> None:
        ready.set()
        release.wait(timeout=60)
        seen.append(ran_by())

    early = threading.Thread(target=waiting)
    early.start()
    ready.wait(timeout=60)
    retrograd.enable("eager")
    release.set()
    early.join(timeout=60)
    assert seen == ["eager"]
    assert ran_by() == "eager"
    assert in_thread(ran_by) == "eager"
    retrograd.disable()
    assert ran_by() == in_thread(ran_by) == "stock"
    assert not is_anything_open()


def test_a_second_enable_replaces_the_first_and_one_disable_ends_it() -> None:
    retrograd.enable("eager")
    retrograd.enable("aten", dynamic=False)
    assert ran_by() == "aten"
    retrograd.disable()
    assert ran_by() == "stock"
    retrograd.disable()
    assert ran_by() == "stock"


def test_a_context_wins_over_the_process_and_outlives_its_end() -> None:
    retrograd.enable("aten")
    with retrograd.compiled_autograd("eager"):
        assert ran_by() == "eager"
        assert in_thread(ran_by) == "aten"
        retrograd.disable()
        assert ran_by() == "eager"
        retrograd.enable("aten")
        assert ran_by() == "eager"
    assert ran_by() == "aten"


def test_reset_keeps_the_setting_and_forgets_the_captures() -> None:
    retrograd.enable("eager")
    ran_by()
    assert retrograd.counters["captures"] == 1
    retrograd.reset()
    assert str(retrograd.explain()) == NOTHING
    assert ran_by() == "eager"
    assert retrograd.counters["captures"] == 1


def test_enable_refuses_what_the_context_refuses_and_changes_nothing_then() -> None:
    retrograd.enable("eager")
    with pytest.raises(retrograd.OptionError):
        retrograd.enable("fast")
    with pytest.raises(TypeError, match="option 'speed': there is no such option"):
        retrograd.enable("aten", speed=2)
    assert ran_by() == "eager"


def test_enable_strict_raises_for_what_cannot_be_captured() -> None:
    retrograd.enable("eager", strict=True)
    with pytest.raises(retrograd.CaptureError, match="anomaly mode"), torch.autograd.set_detect_anomaly(True):
        leaf().sin().sum().backward()


def test_the_warning_of_a_fallback_shows_the_users_line() -> None:
    w = leaf()
    for run in (
        lambda: w.sin().sum().backward(),
        lambda: torch.autograd.backward(w.sin().sum()),
        lambda: torch.autograd.grad(w.sin().sum(), w),
    ):
        retrograd.reset()
        with warnings.catch_warnings(record=True) as caught, retrograd.compiled_autograd("eager"):
            warnings.simplefilter("always")
            with torch.autograd.detect_anomaly(check_nan=False):
                run()
        (warning,) = [item for item in caught if item.category is retrograd.FallbackWarning]
        assert warning.filename == __file__


# contexts that do not end in the order in which they began


def test_a_suspended_generator_that_entered_a_context_ends_its_own_only() -> None:
    def steps() -> Iterator[str]:
        with retrograd.compiled_autograd("aten"):
            yield ran_by()
            yield ran_by()

    with retrograd.compiled_autograd("eager"):
        generator = steps()
        assert next(generator) == "aten"
    assert next(generator) == "aten"
    generator.close()
    assert ran_by() == "stock"


def test_a_decorated_generator_is_inside_only_while_it_runs() -> None:
    @retrograd.compiled_autograd("eager")
    def steps(first: str) -> Iterator[object]:
        try:
            sent = yield (first, ran_by())
            yield sent, ran_by()
        except ValueError:
            yield "thrown", ran_by()
        finally:
            closed.append(ran_by())
        return

    closed: list[str] = []
    generator = steps("a")
    assert next(generator) == ("a", "eager")
    assert ran_by() == "stock"
    assert generator.send("b") == ("b", "eager")
    assert generator.throw(ValueError()) == ("thrown", "eager")
    generator.close()
    assert closed == ["eager"]
    assert ran_by() == "stock"


def test_a_decorated_coroutine_is_inside_while_others_are_not() -> None:
    @retrograd.compiled_autograd("eager")
    async def compiled() -> list[str]:
        first = ran_by()
        await asyncio.sleep(0)
        return [first, ran_by()]

    async def plain() -> list[str]:
        first = ran_by()
        await asyncio.sleep(0)
        return [first, ran_by()]

    async def both() -> list[list[str]]:
        return await asyncio.gather(compiled(), plain())

    assert asyncio.run(both()) == [["eager", "eager"], ["stock", "stock"]]


def test_an_asynchronous_generator_cannot_be_decorated() -> None:
    async def steps():
        yield 1

    with pytest.raises(TypeError, match="cannot decorate the asynchronous generator"):
        retrograd.compiled_autograd("eager")(steps)


def test_a_task_inherits_the_context_for_as_long_as_it_is_open() -> None:
    async def main() -> list[str]:
        release = asyncio.Event()

        async def child() -> list[str]:
            first = ran_by()
            await release.wait()
            with retrograd.compiled_autograd("aten"):
                return [first, ran_by()]

        async def late() -> str:
            await release.wait()
            return ran_by()

        with retrograd.compiled_autograd("eager"):
            tasks = [asyncio.create_task(child()), asyncio.create_task(late())]
            await asyncio.sleep(0)
        release.set()
        with contextlib.ExitStack() as stack:
            result = await tasks[0]
            stack.enter_context(retrograd.compiled_autograd("eager"))
            return [*result, await tasks[1]]

    assert asyncio.run(main()) == ["eager", "aten", "stock"]


def test_a_context_left_on_another_thread_is_a_clear_error_and_stays_open_here() -> None:
    context = retrograd.compiled_autograd("eager")
    with context:
        error = in_thread(lambda: context.__exit__(None, None, None))
        assert isinstance(error, retrograd.ContextError)
        assert "another thread or task" in str(error)
        assert ran_by() == "eager"
    with pytest.raises(retrograd.ContextError):
        context.__exit__(None, None, None)
    assert ran_by() == "stock"


def test_one_context_entered_twice_is_left_twice() -> None:
    context = retrograd.compiled_autograd("eager")
    with context:
        with context:
            assert ran_by() == "eager"
        assert ran_by() == "eager"
    assert ran_by() == "stock"


def test_an_exception_through_nested_contexts_restores_the_outer() -> None:
    with retrograd.compiled_autograd("eager"):
        with pytest.raises(KeyError), retrograd.compiled_autograd("aten"):
            raise KeyError("inside")
        assert ran_by() == "eager"


# stock compiled autograd


def test_stock_inside_ours_wins_and_ours_is_restored() -> None:
    compiler = CountingCompiler()
    with retrograd.compiled_autograd("eager"):
        with stock._enable(compiler):
            assert ran_by() == "stock"
        assert compiler.graphs == 1
        assert ran_by() == "eager"
        with pytest.raises(KeyError), stock._enable(compiler):
            raise KeyError("inside")
        assert ran_by() == "eager"
    assert ran_by() == "stock"
    assert compiler.graphs == 1


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_ours_inside_stock_wins_also_when_it_falls_back_and_stock_is_restored() -> None:
    compiler = CountingCompiler()
    seen: list[torch.Tensor] = []
    with stock._enable(compiler):
        with contextlib.suppress(KeyError), retrograd.compiled_autograd("eager"):
            assert ran_by() == "eager"
            y = leaf().sin()
            y.register_hook(seen.append)
            y.sum().backward()
            with torch.autograd.set_detect_anomaly(True):
                assert ran_by() == "stock"
            raise KeyError("inside")
        assert (compiler.graphs, len(seen)) == (0, 1)
        assert ran_by() == "stock"
        assert compiler.graphs == 1
        assert stock.compiled_autograd_enabled


def test_stock_finds_our_structure_where_a_backward_does_not_come_through_python() -> None:
    grads = []
    for number in range(3):
        x = torch.tensor([0.25, 0.5], requires_grad=True)
        root = (x.sin() * x).sum()
        if number < 2:
            with retrograd.compiled_autograd("eager", strict=True):
                root.backward()
        else:
            with stock._enable(torch.compile(backend="eager")):
                torch.autograd.Variable._execution_engine.run_backward(
                    (root,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True
                )
        grads.append(x.grad)
    assert counters["plans"] == 2  # ours, and one that runs as captured
    assert torch.equal(grads[0], grads[2])


def test_three_contexts_deep_each_level_has_its_own() -> None:
    compiler = CountingCompiler()
    with retrograd.compiled_autograd("eager"), stock._enable(compiler):
        with retrograd.compiled_autograd("aten"):
            assert ran_by() == "aten"
            with stock._enable(compiler):
                assert ran_by() == "stock"
            assert ran_by() == "aten"
        assert ran_by() == "stock"
    assert compiler.graphs == 2


def test_the_config_of_dynamo_switches_stock_on_inside_its_callables_only() -> None:
    def step(w: torch.Tensor) -> None:
        w.sin().sum().backward()

    captures = torch._dynamo.utils.counters["compiled_autograd"]
    with retrograd.compiled_autograd("eager"), torch._dynamo.config.patch(compiled_autograd=True):
        before, w = captures["captures"], leaf()
        torch.compile(step, backend="eager")(w)
        assert torch.equal(w.grad, w.detach().cos())
        assert captures["captures"] == before + 1
        assert ran_by() == "eager"


# stances


def test_force_eager_runs_the_stock_engine_silently_even_if_strict() -> None:
    compiler = CountingCompiler()
    with warnings.catch_warnings(), retrograd.compiled_autograd("eager", strict=True) as context:
        warnings.simplefilter("error", retrograd.FallbackWarning)
        with torch.compiler.set_stance("force_eager"), torch.autograd.set_detect_anomaly(True):
            assert ran_by() == "stock"
        assert ran_by() == "eager"
        with torch.compiler.set_stance("force_eager"), stock._enable(compiler):
            assert ran_by() == "stock"
    assert (context.report.fallbacks.total(), compiler.graphs) == (0, 0)


def step(w: torch.Tensor, rows: int) -> torch.Tensor:
    root = (w[:rows] * 2).sin().sum()
    return torch.autograd.grad(root, w)[0]


def test_eager_on_recompile_interprets_what_has_no_code_and_compiles_it_later() -> None:
    w = leaf()
    with retrograd.compiled_autograd("aten", strict=True):
        for stance, rows, lowerings in (
            ("eager_on_recompile", 4, 0),
            ("default", 4, 1),
            ("eager_on_recompile", 3, 1),
            ("eager_on_recompile", 4, 1),
            ("default", 3, 2),
        ):
            with torch.compiler.set_stance(stance):
                grad = step(w, rows)
            assert torch.equal(grad[:rows], (w[:rows] * 2).cos().detach() * 2)
            assert retrograd.counters["lowerings"] == lowerings


def test_fail_on_recompile_raises_with_the_reason_and_leaves_known_code_alone() -> None:
    w = leaf()
    with retrograd.compiled_autograd("aten"):
        step(w, 4)
        with torch.compiler.set_stance("fail_on_recompile"):
            step(w, 4)
            with pytest.raises(
                retrograd.LoweringError, match="segment 0 has no code for its inputs, under fail"
            ):
                step(w, 3)
        assert torch.equal(step(w, 3)[:3], (w[:3] * 2).cos().detach() * 2)


def test_a_function_mode_does_not_see_that_outputs_are_marked() -> None:
    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    output = torch.ones(2, requires_grad=True).sin()
    with Seeing():
        claim([output], Session(Config(backend="eager"), Report()))
    assert seen == []
    assert output.grad_fn is not None
    assert output.grad_fn.metadata
