"""Order, and what can be seen at what time, in the plain backward of functions compiled ahead.

In: a probe, whose `compile` is the identity for eager. Out: timelines of hooks on parameters, outputs and
nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gradparity.corpus.scenario import scenario
from gradparity.corpus.scenarios.walk import node_of
from gradparity.corpus.scenarios.watch import watch_parameters
from gradparity.probe import Probe

TAGS = ("compiled", "aot", "hooks", "order")


def _tower(p: Probe, depth: int = 3) -> nn.Sequential:
    """A registered network of linear layers with a Tanh after each."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(3, 3), nn.Tanh()]
    return p.module(nn.Sequential(*layers))


@scenario(tags=TAGS, issue="pytorch#138538")
def aot_post_accumulate_hooks(p: Probe) -> None:
    """Post-accumulate hooks run in eager's order in each of two steps, with sizes that change."""
    model = _tower(p)
    watch_parameters(p, model)
    run = p.compile(model)
    for rows in (2, 4):
        with p.backward():
            run(p.randn(rows, 3)).sum().backward()


@scenario(tags=TAGS, issue="pytorch#109774")
def aot_what_other_hooks_can_see(p: Probe) -> None:
    """When a parameter's hook runs, exactly the gradients of later layers are there."""
    model = _tower(p, 2)
    for key, param in model.named_parameters():

        def see(_: Tensor) -> None:
            p.event("there", *(name for name, other in model.named_parameters() if other.grad is not None))

        param.register_post_accumulate_grad_hook(p.hook(key, see, kind="post_acc"))
    with p.backward():
        p.compile(model)(p.randn(2, 3)).sum().backward()


@scenario(tags=(*TAGS, "training"), issue="pytorch#109774")
def aot_optimizer_in_the_backward(p: Probe) -> None:
    """Each parameter is stepped and its gradient freed in its hook: the next forward sees new values."""
    model = _tower(p, 2)

    def step(param: Tensor) -> None:
        with torch.no_grad():
            param.sub_(param.grad * 0.1)
        param.grad = None

    for key, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(p.hook(key, step, kind="post_acc"))
    run = p.compile(model)
    for number in range(3):
        loss = run(p.randn(2, 3)).square().sum()
        p.value(f"loss{number}", loss)
        with p.backward():
            loss.backward()


@scenario(tags=TAGS)
def aot_tied_weight(p: Probe) -> None:
    """A weight that is used first and last is accumulated once, when the first use is done."""

    class Tied(nn.Module):
        """Reads in and out with one matrix."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.middle = nn.Linear(3, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.middle(self.table(tokens)).tanh() @ self.table.weight.t()

    model = p.module(Tied())
    watch_parameters(p, model)
    for key, param in model.named_parameters():
        param.register_hook(p.hook(key))
    with p.backward():
        p.compile(model)(p.randint(5, 4)).logsumexp(-1).sum().backward()


@scenario(tags=TAGS)
def aot_shared_submodule(p: Probe) -> None:
    """One layer under two names, applied twice: one parameter, one hook call per backward."""

    class Shares(nn.Module):
        """The same layer as first and last."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.middle = nn.Linear(3, 3)
            self.last = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.middle(self.first(x)).relu())

    model = p.module(Shares())
    watch_parameters(p, model)
    with p.backward():
        p.compile(model)(p.randn(2, 3)).sum().backward()


@scenario(tags=(*TAGS, "branching"), issue="pytorch#138553")
def aot_two_interleaved_branches(p: Probe) -> None:
    """Two branches built in turn inside one function: leaves come as their nodes were numbered."""
    names = ("a0", "b0", "a1", "b1", "a2", "b2")
    leaves = [p.leaf(name, p.randn(3, requires_grad=True)) for name in names]
    for name, leaf in zip(names, leaves, strict=True):
        leaf.register_hook(p.hook(name))
        leaf.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))

    def run(a0: Tensor, b0: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
        left, right = a0.sin(), b0.cos()
        left, right = left * a1, right * b1
        right, left = right * b2, left * a2
        return (left.exp() + right).sum()

    with p.backward():
        p.compile(run)(*leaves).backward()


@scenario(tags=(*TAGS, "branching"))
def aot_two_outputs_with_hooks(p: Probe) -> None:
    """Hooks on two outputs of one function, and on its leaves: as the nodes below them were numbered."""
    x, y, z = (p.leaf(name, p.randn(3, requires_grad=True)) for name in "xyz")
    for name, leaf in (("x", x), ("y", y), ("z", z)):
        leaf.register_post_accumulate_grad_hook(p.hook(name, kind="post_acc"))

    def run(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        shared = a * b
        return shared.sin() * c, shared.cos()

    one, two = p.compile(run)(x, y, z)
    one.register_hook(p.hook("one"))
    two.register_hook(p.hook("two"))
    with p.backward():
        (two.exp() + one).sum().backward()


@scenario(tags=(*TAGS, "branching"))
def aot_output_that_feeds_another_output(p: Probe) -> None:
    """The hook of the lower output runs between the gradients of upper and lower layers."""
    lower, upper = p.module(nn.Linear(3, 3), "lower"), p.module(nn.Linear(3, 3), "upper")
    watch_parameters(p, lower, "lower")
    watch_parameters(p, upper, "upper")

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = lower(x).tanh()
        return hidden, upper(hidden)

    hidden, out = p.compile(run)(p.randn(2, 3))
    hidden.register_hook(p.hook("hidden", lambda g: g * 2))
    out.register_hook(p.hook("out"))
    with p.backward():
        (out.square().sum() + hidden.sum()).backward()


@scenario(tags=TAGS, issue="pytorch#138538")
def aot_hooks_on_accumulate_nodes(p: Probe) -> None:
    """Pre and post hooks of AccumulateGrad nodes, set before the function is compiled."""
    model = _tower(p, 2)
    kept = []
    for key, param in model.named_parameters():
        node = node_of(param)
        node.register_prehook(p.hook(key, kind="node_pre"))
        node.register_hook(p.hook(key, kind="node_post"))
        kept.append(node)
    with p.backward():
        p.compile(model)(p.randn(2, 3)).sum().backward()


@scenario(tags=TAGS)
def aot_leaf_hooks_change_gradients(p: Probe) -> None:
    """A tensor hook on a parameter used three times gets the sum once, and its result is accumulated."""
    w = p.leaf("w", p.randn(3, requires_grad=True))
    w.register_hook(p.hook("clip", lambda g: g.clamp(-0.5, 0.5)))
    w.register_post_accumulate_grad_hook(p.hook("w", kind="post_acc"))
    run = p.compile(lambda a, b: ((a * b).sin() * b + b.exp()).sum())
    for _ in range(2):
        with p.backward():
            run(p.randn(4, 3), w).backward()


@scenario(tags=TAGS)
def aot_hook_raises_half_way(p: Probe) -> None:
    """When a parameter's hook raises, later layers have their gradients, earlier ones do not."""
    model = _tower(p, 3)

    def fail(_: Tensor) -> None:
        raise ValueError("stop here")

    model[2].weight.register_post_accumulate_grad_hook(p.hook("fails", fail, kind="post_acc"))
    out = p.compile(model)(p.randn(2, 3))
    with p.backward():
        try:
            out.sum().backward()
        except ValueError as error:
            p.event("raised", str(error))


@scenario(tags=(*TAGS, "modules"))
def aot_full_backward_hooks_of_a_part(p: Probe) -> None:
    """Full backward hooks of a layer inside the compiled module run between its neighbours' gradients."""
    model = _tower(p, 3)
    watch_parameters(p, model)
    model[2].register_full_backward_hook(p.hook("layer 2", kind="module_full"))
    model[2].register_full_backward_pre_hook(p.hook("layer 2", kind="module_pre"))
    run = p.compile(model)
    for _ in range(2):
        with p.backward():
            run(p.randn(2, 3)).sum().backward()


@scenario(tags=TAGS)
def aot_hooks_set_inside_the_function(p: Probe) -> None:
    """A hook that the function itself sets on an intermediate runs in the backward, in every call."""
    x = p.leaf("x", p.randn(3, requires_grad=True))

    def run(a: Tensor) -> Tensor:
        hidden = a.sin()
        hidden.register_hook(lambda g: g * 3)
        return hidden.exp()

    call = p.compile(run)
    for step in range(2):
        with p.backward():
            call(x).sum().backward()
        p.value(f"grad{step}", x.grad)


@scenario(tags=(*TAGS, "multi-grad"))
def aot_grads_of_three_calls_in_one_backward(p: Probe) -> None:
    """Three calls of one compiled model in one loss: every parameter is accumulated once, last call first."""
    model = _tower(p, 2)
    watch_parameters(p, model)
    run = p.compile(model)
    outs = [run(p.randn(2, 3)) for _ in range(3)]
    for number, out in enumerate(outs):
        out.register_hook(p.hook(f"out{number}"))
    with p.backward():
        (outs[1] * outs[0] + outs[2]).sum().backward()


def _chain(*leaves: Tensor) -> Tensor:
    """Reads each leaf once."""
    total = leaves[0].sin()
    for leaf in leaves[1:]:
        total = (total * leaf).tanh()
    return total


def _ends_meet(*leaves: Tensor) -> Tensor:
    """Reads its leaves from the end, and the first and the last once more."""
    return _chain(*leaves[::-1]) * leaves[0] + leaves[-1].cos()


#: what is computed with a function of many leaves, and with leaves before it and after it.
BESIDE: dict[str, Callable[[Callable[..., Tensor], Sequence[Tensor]], Tensor]] = {
    "nothing": lambda run, leaves: run(*leaves).sum(),
    "a product before": lambda run, leaves: (leaves[3] * leaves[4] + run(*leaves)).sum(),
    "a product after": lambda run, leaves: (run(*leaves) + leaves[3] * leaves[4]).sum(),
    "the ends before": lambda run, leaves: ((leaves[-1] * leaves[0]).exp() * run(*leaves)).sum(),
    "other leaves": lambda run, leaves: (leaves[5].exp() + run(*leaves)).prod() * leaves[6].sum(),
    "a call before": lambda run, leaves: (run(*leaves[::-1]) - run(*leaves) * leaves[2]).sum(),
}


def _observe(p: Probe, leaves: Sequence[Tensor]) -> None:
    for number, leaf in enumerate(leaves):
        leaf.register_hook(p.hook(f"leaf {number}"))
        leaf.register_post_accumulate_grad_hook(p.hook(f"leaf {number}", kind="post_acc"))


@scenario(tags=(*TAGS, "between-steps"))
def aot_many_leaves_hooked_between_forward_and_backward(p: Probe) -> None:
    """Hooks that leaves get after the forward run in eager's order, with and without other uses of leaves."""
    for kind, function in (("chain", _chain), ("ends", _ends_meet)):
        run = p.compile(function)
        for name, beside in BESIDE.items():
            leaves = [p.leaf(f"{kind} {name} {i}", p.randn(3, requires_grad=True)) for i in range(11)]
            first, second = beside(run, leaves), beside(run, leaves)
            _observe(p, leaves)
            with p.backward():
                second.backward()
                (first + beside(run, leaves)).backward()


@scenario(tags=(*TAGS, "inputs", "retain-graph"))
def aot_many_leaves_of_which_some_are_asked_for(p: Probe) -> None:
    """Of eleven leaves, gradients of some are wanted, of others the next time, and then of all."""
    leaves = [p.leaf(f"leaf {i}", p.randn(3, requires_grad=True)) for i in range(11)]
    run = p.compile(_chain)
    run(*leaves)
    out = run(*leaves)
    _observe(p, leaves)
    with p.backward():
        for name, wanted in (("even", leaves[::2]), ("last", leaves[-4:]), ("first", leaves[:4])):
            p.value(name, torch.autograd.grad(out.sum(), wanted, retain_graph=True))
            out.sum().backward(inputs=wanted[::-1], retain_graph=True)
        out.sum().backward()
        # A node with many leaves of its own, which come as the engine's heap gives them.
        torch.stack(leaves).cumsum(0).sum().backward()


@scenario(tags=(*TAGS, "errors-in-hooks"))
def aot_many_leaves_and_a_hook_that_raises(p: Probe) -> None:
    """After a hook has raised in the middle, the next backwards go on in eager's order."""
    leaves = [p.leaf(f"leaf {i}", p.randn(3, requires_grad=True)) for i in range(11)]
    nodes = [node_of(leaf) for leaf in leaves]
    run = p.compile(_chain)

    def fail(_: Tensor) -> None:
        raise ValueError("stop here")

    out = run(*leaves)
    _observe(p, leaves)
    handle = leaves[5].register_hook(p.hook("fails", fail))
    with p.backward():
        try:
            out.sum().backward(retain_graph=True)
        except ValueError as error:
            p.event("raised", str(error))
        handle.remove()
        (leaves[6] * leaves[7]).sum().backward()
        (leaves[7] * leaves[6]).sum().backward()
        out.sum().backward()
    p.value("nodes", len(nodes))


@scenario(tags=(*TAGS, "late-hooks"))
def aot_many_leaves_hooked_by_a_hook(p: Probe) -> None:
    """A hook in the middle of the backward sets hooks on leaves that come later and on ones that came."""
    leaves = [p.leaf(f"leaf {i}", p.randn(3, requires_grad=True)) for i in range(11)]
    run = p.compile(_chain)
    for _ in range(3):
        run(*leaves).sum().backward()
    out = run(*leaves)
    leaves[6].register_hook(p.hook("sets", lambda grad: _observe(p, leaves)))
    with p.backward():
        out.sum().backward()


@scenario(tags=(*TAGS, "higher-order"))
def aot_leaves_of_a_second_derivative(p: Probe) -> None:
    """Gradients of a second derivative accumulate in eager's order, however the function takes its inputs."""
    for count in (2, 3, 5):
        for order in (1, -1):

            def run(*leaves: Tensor, order: int = order) -> Tensor:
                made = leaves[0].sin()
                for leaf in leaves[::order]:
                    made = (made * leaf).exp()
                return made

            leaves = [p.leaf(f"{count} {order} {i}", p.rand(3, requires_grad=True)) for i in range(count)]
            out = p.compile(run)(*leaves).sum()
            for i, leaf in enumerate(leaves):
                hook = p.hook(f"{count} {order} {i}", kind="post_accumulate")
                leaf.register_post_accumulate_grad_hook(hook)
            for wanted in (leaves[:1], leaves[1:]):
                with p.backward():
                    slopes = torch.autograd.grad(out, wanted, create_graph=True)
                    sum(slope.pow(2).sum() for slope in slopes).backward(retain_graph=True)
