"""retrograd.compile: which backwards are compiled, and for how long."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import retrograd
from retrograd import counters
from retrograd.errors import CaptureError, OptionError
from retrograd.live import contexts
from retrograd.live.contexts import living

STRICT = {"strict": True}


@pytest.fixture(autouse=True)
def forget():
    """What a test has compiled owns no backwards of the next one."""
    yield
    gc.collect()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def grads(module):
    return [parameter.grad for parameter in module.parameters()]


def test_forward_and_backward_are_compiled_and_equal_eager():
    plain, other = model(), model()
    fast = retrograd.compile(other, backend="eager", options=STRICT)
    x = torch.ones(3, 4)
    for step in (plain, fast):
        torch.nn.functional.cross_entropy(step(x), torch.tensor([0, 1, 0])).backward()
    assert all(map(torch.equal, grads(plain), grads(other)))
    assert len(retrograd.explain().graphs) == 1
    assert counters["runs"] == 1
    assert not retrograd.explain().fallbacks


def test_a_module_stays_a_module_and_a_function_a_function():
    fast = retrograd.compile(model(), backend="eager")
    assert isinstance(fast, nn.Module)
    assert [name.removeprefix("_orig_mod.") for name in fast.state_dict()] == [*model().state_dict()]

    @retrograd.compile(backend="eager", fullgraph=True)
    def doubled(x):
        """Two of it."""
        return x * 2

    assert doubled.__name__ == "doubled"
    assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))


def test_what_else_hangs_from_the_loss_belongs_to_it_and_other_backwards_do_not():
    fast = retrograd.compile(lambda x: x.sin(), backend="eager", options=STRICT)
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    (y * 2).sum().backward()
    assert counters["runs"] == 0
    loss = (fast(x) * y.exp()).sum()
    loss.backward()
    assert counters["runs"] == 1
    assert torch.equal(x.grad, torch.ones(3).exp() * torch.ones(3).cos())


def test_a_backward_on_another_thread_belongs_to_it():
    fast = retrograd.compile(lambda x: x.sin(), backend="eager", options=STRICT)
    x = torch.ones(3, requires_grad=True)
    loss = fast(x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert counters["runs"] == 1
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_autograd_grad_belongs_to_it():
    fast = retrograd.compile(lambda x: x.sin(), backend="eager", options=STRICT)
    x = torch.ones(3, requires_grad=True)
    (grad,) = torch.autograd.grad(fast(x).sum(), x)
    assert torch.equal(grad, torch.ones(3).cos())
    assert counters["runs"] == 1


def test_an_open_context_wins():
    fast = retrograd.compile(lambda x: x.sin(), backend="eager")
    x = torch.ones(3, requires_grad=True)
    with retrograd.compiled_autograd(backend="aten") as context:
        fast(x).sum().backward()
    assert [backward.backend for backward in context.explain().backwards] == ["aten"]


def test_the_hold_on_backwards_ends_with_the_callable():
    assert not living
    fast = retrograd.compile(lambda x: x.sin(), backend="eager")
    x = torch.ones(3, requires_grad=True)
    loss = fast(x).sum()
    assert living
    del fast
    gc.collect()
    assert not living
    loss.backward()
    assert counters["runs"] == 0
    assert torch.equal(x.grad, torch.ones(3).cos())


def test_graphs_of_others_are_not_searched_while_no_output_is_alive(monkeypatch):
    def searched(*args):
        raise AssertionError("a graph was searched")

    fast = retrograd.compile(lambda x: x.sin(), backend="eager")
    x = torch.ones(3, requires_grad=True)
    fast(x).sum().backward()
    gc.collect()
    monkeypatch.setattr(contexts, "nodes_below", searched)
    x.cos().sum().backward()
    with pytest.raises(AssertionError, match="searched"):
        fast(x).sum().backward()


def test_two_callables_have_each_their_own_session():
    first = retrograd.compile(lambda x: x.sin(), backend="eager")
    second = retrograd.compile(lambda x: x.cos(), backend="aten")
    for call in (first, second):
        call(torch.ones(3, requires_grad=True)).sum().backward()
    assert [backward.backend for backward in retrograd.explain().backwards] == ["eager", "aten"]


def test_hooks_run_in_eagers_order():
    def run(step, module):
        order = []
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        step(torch.ones(3, 4)).sum().backward()
        return order

    plain, other = model(), model()
    assert run(retrograd.compile(other, backend="eager"), other) == run(plain, plain)


@pytest.mark.parametrize(
    ("choices", "error"),
    [
        ({"backend": "nvcc"}, OptionError),
        ({"options": {"partitoner": "min_cut"}}, OptionError),
        ({"mode": "fastest"}, OptionError),
    ],
)
def test_wrong_choices_are_refused_at_once(choices, error):
    with pytest.raises(error):
        retrograd.compile(model(), **choices)
    assert not living


def test_inductor():
    plain, other = model(), model()
    fast = retrograd.compile(other)
    x = torch.ones(3, 4)
    for step in (plain, fast):
        step(x).square().sum().backward()
    torch.testing.assert_close(grads(other), grads(plain))


def test_parameters_can_be_swapped_after_a_call() -> None:
    """`torch.utils.swap_tensors` refuses a tensor to which there are weak references."""
    layer = torch.nn.Linear(3, 2)
    compiled = retrograd.compile(layer, backend="eager")
    for _ in range(2):
        compiled(torch.ones(1, 3)).sum().backward()
    layer.zero_grad()
    gc.collect()  # cycles of the compilation
    torch.utils.swap_tensors(layer.bias, torch.nn.Parameter(torch.full((2,), 5.0)))
    assert torch.equal(compiled(torch.zeros(1, 3)), torch.full((1, 2), 5.0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x).tanh()


def run_blocks(**choices):
    """Compile twelve blocks one by one, and run them twice."""
    blocks = [retrograd.compile(Block(), backend="eager", **choices) for _ in range(12)]
    for _ in range(2):
        nn.Sequential(*blocks)(torch.ones(2, 4)).sum().backward()
    return len(retrograd.explain().graphs)


def test_equal_blocks_share_one_code():
    graphs = run_blocks(options={"regions": False})
    assert graphs == run_blocks(options={"regions": False})  # nothing new
    assert graphs <= 2  # the first block's input has no history
    assert run_blocks(dynamic=False) > graphs  # another choice, other code
    assert not retrograd.explain().fallbacks


def test_copies_share_the_code_of_what_they_were_copied_from():
    block = retrograd.compile(Block(), backend="eager")
    block(torch.ones(2, 4)).sum().backward()
    graphs = len(retrograd.explain().graphs)
    copy.deepcopy(block)(torch.ones(2, 4)).sum().backward()
    assert len(retrograd.explain().graphs) == graphs


@pytest.mark.filterwarnings("ignore::retrograd.FallbackWarning")
def test_a_limit_of_dynamos_is_in_the_report():
    fast = retrograd.compile(lambda x, text: x * len(text), backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for text in ("a", "ab", "abc"):
            assert torch.equal(fast(torch.ones(2), text), torch.full((2,), float(len(text))))
    assert [reason.code for reason in retrograd.explain().fallbacks] == ["recompile-limit"]


def test_a_limit_of_dynamos_is_an_error_if_strict():
    fast = retrograd.compile(lambda x, text: x * len(text), backend="eager", options=STRICT)
    with torch._dynamo.config.patch(recompile_limit=1):
        fast(torch.ones(2), "a")
        with pytest.raises(CaptureError, match="recompile_limit"):
            fast(torch.ones(2), "ab")


def test_under_saved_tensor_hooks_nothing_is_compiled() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    fast = retrograd.compile(model, backend="eager")
    x, packed = torch.ones(4, 3), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t)
    with hooks:
        model(x)
    expected, packed[:] = list(packed), []
    with hooks, pytest.warns(retrograd.FallbackWarning, match=r"retrograd\.compiled_autograd\(\)"):
        fast(x)
    report = retrograd.explain(fast)
    assert (packed, len(report.graphs)) == (expected, 0)
    assert [reason.code for reason in report.fallbacks] == ["saved-tensor-hooks"]
    fast(x).sum().backward()
    assert len(report.graphs) == 1


def test_no_other_thread_is_told_that_the_exact_backend_compiles() -> None:
    model, seen, is_over = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh()), set(), []

    def watch() -> None:
        while not is_over:
            seen.add(torch.compiler.is_compiling())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        retrograd.compile(model, backend="eager")(torch.ones(4, 3)).sum().backward()
    finally:
        is_over.append(True)
        watcher.join()
    assert seen == {False}
