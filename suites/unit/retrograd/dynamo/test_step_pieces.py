"""What no graph can hold: Dynamo leaves its graph there, and the step goes on as Python runs it."""

from __future__ import annotations

import gc
import logging
import random
import time
import warnings
import weakref
from traceback import FrameSummary
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.variables import TensorVariable

import retrograd
from retrograd.dynamo.frames import why_ended
from unit.retrograd.dynamo.twins import Program, assert_compiled, run_twins

COUNTER = 0


def batches(count=4, size=5):
    return [(torch.randn(size, 4), torch.randint(3, (size,))) for _ in range(count)]


def of_dynamo_2_11(what):
    """A test that Dynamo of torch 2.11 fails, with stock's own backend too, for the reason `what`."""
    is_old = torch.__version__.startswith("2.11.")
    return pytest.mark.xfail(is_old, reason=f"Dynamo of torch 2.11: {what}", strict=True)


def program(extra, model=None, **rest):
    """A step that calls `extra(loss)` between backward and the optimizer; what that returns is returned."""
    model = model or nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        result = extra(loss)
        opt.step()
        return loss.detach() if result is None else result

    return Program(step, batches(), [model], [opt], **rest)


def test_printing(capsys):
    def extra(loss):
        print("the loss is", loss.item())  # noqa: T201 - what the test is about

    step = run_twins(lambda: program(extra))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the loss")]
    assert len(printed) == 8
    assert printed[:4] == printed[4:]
    assert any("test_step_pieces.py" in graph.ended_by for graph in step.explain().pieces.graphs)


def test_the_report_names_the_line_of_the_user_and_leaves_backward_to_the_engine():
    made = program(lambda loss: None)
    step = retrograd.compile_step(made.step, backend="eager")
    for x, y in batches(3):
        step(x, y)
    (graph,) = [graph for graph in step.explain().pieces.graphs if graph.ended_by]
    line = made.step.__code__.co_firstlineno + 3
    assert graph.ended_by == f"backward(), which Dynamo leaves to the autograd engine ({__file__}:{line})"
    text = str(step.explain())
    assert text.startswith("step step: 2 calls compiled, 1 eager\n")
    assert "backward in 1 autograd node, " in text
    assert "  lowerings " in step.explain().details()


def test_a_break_in_torchs_own_code_is_told_with_the_line_that_led_there():
    stack = [FrameSummary("train.py", 7, "step"), FrameSummary(torch.optim.__file__, 3, "inner")]
    reason = SimpleNamespace(graph_break=True, reason="print\n  Explanation: no.", user_stack=stack)
    gm = SimpleNamespace(compile_subgraph_reason=reason)
    assert why_ended(gm) == f"print: no, in torch's own code at {torch.optim.__file__}:3 (train.py:7)"
    reason.user_stack = stack[:1]
    assert why_ended(gm) == "print: no (train.py:7)"


def test_a_break_is_told_in_words_without_a_gap() -> None:
    def told(reason: str) -> str:
        stack = [FrameSummary("train.py", 7, "step")]
        found = SimpleNamespace(graph_break=True, reason=reason, user_stack=stack)
        return why_ended(SimpleNamespace(compile_subgraph_reason=found))

    hooks = "Module-level backwards hooks require compiled autograd.\n  Explanation: \n  Hint: none"
    assert told(hooks) == "a module with backward hooks, which Dynamo leaves to Python (train.py:7)"
    assert told("Something else.\n  Explanation:") == "Something else (train.py:7)"


def test_dynamos_advice_about_item_is_not_logged_while_we_compile():
    log, found = logging.getLogger("torch._dynamo.variables.tensor"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.WARNING)  # gradparity's workers, and so its tests, silence Dynamo's logs
    try:
        for compiled in (
            torch.compile(lambda x: x.sum().item(), backend="eager"),
            retrograd.compile(lambda x: x.sum().item(), backend="eager"),
        ):
            TensorVariable._warn_capture_scalar_outputs.cache_clear()
            compiled(torch.ones(2))
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    assert len(found) == 1
    assert "Graph break from `Tensor.item()`" in found[0], "stock's own, of the first call"


def appends_to_a_list():
    events = []
    return program(lambda loss: events.append(loss.detach().sum()), events=events)


def appends_a_number():
    events = []
    return program(lambda loss: events.append(loss.item()), events=events)


def sets_an_attribute():
    model = nn.Linear(4, 3)
    return program(lambda loss: setattr(model, "last", loss.detach()), model)


def counts_in_a_global():
    def extra(loss):
        global COUNTER
        COUNTER += 1

    return program(extra)


def counts_in_a_cell():
    count = 0

    def extra(loss):
        nonlocal count
        count += 1

    return program(extra)


def fills_a_dictionary():
    log = {}
    return program(lambda loss: log.update(loss=loss.detach()))


def reads_a_clock():
    return program(lambda loss: time.perf_counter() > 0)


def draws_outside_of_torch():
    random.seed(0)
    return program(lambda loss: random.random())


def goes_on_with_a_generator():
    numbers = (n for n in range(100))
    return program(lambda loss: next(numbers))


def goes_on_with_an_iterator():
    numbers = iter(range(100))
    return program(lambda loss: next(numbers))


@pytest.mark.parametrize(
    "build",
    [
        appends_to_a_list,
        appends_a_number,
        sets_an_attribute,
        counts_in_a_global,
        counts_in_a_cell,
        fills_a_dictionary,
        reads_a_clock,
        draws_outside_of_torch,
    ],
)
def test_side_effects(build):
    assert_compiled(run_twins(build))


@pytest.mark.parametrize("build", [goes_on_with_a_generator, goes_on_with_an_iterator])
def test_iterators_are_not_advanced_by_a_trace(build):
    run_twins(build)


def test_a_decision_that_depends_on_a_value():
    assert_compiled(run_twins(lambda: program(lambda loss: "large" if loss > 1 else "small")))


def test_a_text_of_a_number():
    run_twins(lambda: program(lambda loss: f"{loss.item():.3f}"))


def test_numpy():
    run_twins(lambda: program(lambda loss: float(loss.detach().numpy())))


def test_a_step_that_raises():
    def extra(loss):
        raise ValueError("enough")

    run_twins(lambda: program(extra))


def test_a_step_that_raises_when_it_runs():
    def build():
        made = program(lambda loss: None)
        made.calls[2][1][0] = 99  # no such class
        return made

    run_twins(build)


def refuses(gm, example_inputs):
    raise ValueError("not today")


def test_strict():
    step = retrograd.compile_step(program(lambda loss: None).step, backend=refuses, strict=True)
    x, y = batches(1)[0]
    step(x, y)
    with pytest.raises((ValueError, retrograd.RetrogradError), match="not today"):
        step(x, y)


def test_a_backend_that_raises_costs_the_compilation_only():
    step = run_twins(lambda: program(lambda loss: None), backend=refuses)
    assert "not today" in str(step.explain())


def test_results_whose_graph_is_still_there():
    def build():
        model = nn.Linear(4, 3)

        def step(x, y):
            return F.cross_entropy(model(x), y)

        return Program(step, batches(), [model])

    run_twins(build)


def test_a_second_backward_raises_what_eager_raises():
    made = program(lambda loss: loss)
    step = retrograd.compile_step(made.step, backend="eager", strict=True)
    x, y = batches(1)[0]
    errors = []
    for loss in (step(x, y), step(x, y)):
        assert loss.requires_grad
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_views_of_arguments_are_not_copied():
    def build():
        model = nn.Linear(4, 3)

        def step(x, y):
            F.cross_entropy(model(x), y).backward()
            return x[1:]

        return Program(step, batches(), [model])

    run_twins(build)


def test_parameters_that_share_memory():
    def build():
        flat = torch.randn(16)
        a, b = (nn.Parameter(part) for part in flat.view(4, 4).split(2))
        opt = torch.optim.SGD([a, b], 0.1)

        def step(x, y):
            opt.zero_grad()
            loss = (x @ torch.cat([a, b])).square().sum()
            loss.backward()
            opt.step()
            return loss

        return Program(step, batches(), optimizers=[opt], tensors=[a, b, flat])

    run_twins(build)


def test_memory_that_becomes_shared():
    def build():
        a, b = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
        opt = torch.optim.SGD([a, b], 0.1)

        def step(x, y):
            opt.zero_grad()
            loss = (x @ a + x @ b).square().sum()
            loss.backward()
            opt.step()
            return loss

        def before(i):
            if i == 3:
                b.data = a.data

        return Program(step, batches(5), optimizers=[opt], tensors=[a, b], before=before)

    run_twins(build)


def test_an_argument_that_shares_memory_with_a_parameter():
    def build():
        w = nn.Parameter(torch.randn(4, 4))

        def step(x):
            w.grad = None
            (x @ w).sum().backward()
            with torch.no_grad():
                w.sub_(w.grad)
                return x.sum()

        calls = [(torch.randn(4, 4),), (torch.randn(4, 4),), (w.detach(),), (torch.randn(4, 4),)]
        return Program(step, calls, tensors=[w])

    run_twins(build)


def test_an_argument_that_gets_a_history():
    def build():
        w = torch.randn(4, 4, requires_grad=True)

        def step(x):
            x.square().sum().backward()

        calls = [(torch.randn(4, 4).requires_grad_(),) for _ in range(3)] + [(w * 2,)]
        return Program(step, calls, tensors=[w])

    run_twins(build)


def test_random_states_are_not_set_in_a_graph():
    def build():
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))

        def step(x, y):
            torch.manual_seed(3)
            F.cross_entropy(model(x), y).backward()

        return Program(step, batches(), [model])

    run_twins(build)


def test_a_checkpoint_with_dropout():
    from torch.utils.checkpoint import checkpoint

    def build():
        model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))

        def step(x, y):
            F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()

        return Program(step, batches(), [model])

    run_twins(build)


def test_under_saved_tensor_hooks():
    def build():
        made = program(lambda loss: None)
        inner = made.step

        def step(x, y):
            return inner(x, y)

        made.step = step
        return made

    made = build()
    step = retrograd.compile_step(made.step, backend="eager")
    x, y = made.calls[0]
    step(x, y)
    with (
        warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        warnings.simplefilter("ignore")
        step(x, y)
    assert [reason.code for reason in step.explain().pieces.fallbacks] == ["saved-tensor-hooks"]


def test_an_optimizer_with_a_closure():
    def build():
        model = nn.Linear(4, 3)
        opt = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

        def step(x, y):
            def closure():
                opt.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return opt.step(closure).detach()

        return Program(step, batches(), [model])

    assert_compiled(run_twins(build))


@of_dynamo_2_11("it does not notice that a frozen leaf takes gradients again")
def test_too_many_situations():
    def build():
        made = program(lambda loss: None)
        model = made.modules[0]

        def before(i):
            model.kind = i  # never read
            model.weight.grad = None
            model.bias.requires_grad_(i % 2 == 0)

        made.before = before
        return made

    step = run_twins(build, recompile_limit=1)
    assert len(step.explain().pieces.graphs) <= 4


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_nothing_is_kept_alive(caplog, level):
    caplog.set_level(level, "retrograd")  # the records are kept

    def build():
        model = nn.Linear(4, 3)
        opt = torch.optim.Adam(model.parameters(), 0.1)

        def step(x, y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        compiled = retrograd.compile_step(step, backend="eager", strict=True)
        batch = batches(1)[0]
        results = [compiled(*batch) for _ in range(3)]
        return weakref.ref(model.weight), weakref.ref(batch[0]), weakref.ref(results[-1]), compiled

    weight, x, result, compiled = build()
    gc.collect()
    assert x() is None
    assert result() is None
    del compiled
    gc.collect()
    assert weight() is None


def test_memory_does_not_grow():
    model = nn.Linear(4, 3)
    opt = torch.optim.Adam(model.parameters(), 0.1)

    def step(x, y):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    compiled = retrograd.compile_step(step, backend="eager", strict=True)
    batch = batches(1)[0]
    for _ in range(5):
        compiled(*batch)
    gc.collect()
    before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    for _ in range(50):
        compiled(*batch)
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= before


def test_modules_that_communicate():
    class Parallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    Parallel.__module__ = "torch.nn.parallel.distributed"
    run_twins(lambda: program(lambda loss: None, Parallel(nn.Linear(4, 3))))


def test_hooks_on_saved_tensors_that_print(capsys):
    def build():
        model = nn.Linear(4, 3)

        def pack(tensor):
            print("saved", tuple(tensor.shape))  # noqa: T201 - what the test is about
            return tensor

        def step(x, y):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = F.cross_entropy(model(x), y)
            loss.backward()

        return Program(step, batches(), [model])

    run_twins(build)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("saved")]
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :]


@of_dynamo_2_11("what it makes of `all_reduce` returns a tensor instead of None")
def test_collectives(tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:

        def build():
            model = nn.Linear(4, 3)
            return program(lambda loss: distributed.all_reduce(model.weight.grad), model)

        run_twins(build)
    finally:
        distributed.destroy_process_group()
