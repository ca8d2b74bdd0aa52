"""Trace one block of a repeated sequence of calls, such as a layer, and instantiate it for the other copies.

In: the joint graph of one copy, traced separately as a `TracedBlock`. While the full graph is traced, a
`BlockCopy` is called in place of each copy's calls. Out: the nodes that tracing those calls would have made,
and one autograd node that adds the backward's nodes when the engine calls it.

If the inputs of a copy differ from those of the traced block, the copy is traced as usual.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import _ProxyTensor, set_proxy_slot

from retrograd.errors import Refusal
from retrograd.graph.fx import KEPT_FOR, is_operator_overload
from retrograd.graph.joint import Region
from retrograd.runtime.modes import ThreadModes, torch_functions_off
from retrograd.runtime.tensor import storage_of
from retrograd.trace.activation_checkpoint import CALL_OF_BLOCK, HANDED_ON
from retrograd.trace.fakes import Form, fake_of_form, form_of
from retrograd.trace.functional import plain, to_functional
from retrograd.trace.graph_tracer import GraphTracer, tracer_here

#: ``meta`` keys whose values differ from copy to copy.
_OF_PLACE = {"val", "eager_input_vals", "region", "is_backward", "seq_nr", KEPT_FOR, *HANDED_ON}
_OF_PLACE -= {CALL_OF_BLOCK}


class OtherCotangent(Exception):
    """The cotangent of a copy has another layout than the traced block's. `form` is its layout."""

    def __init__(self, copy: BlockCopy, form: Form | None) -> None:
        super().__init__()
        self.copy, self.form = copy, form


@dataclass(frozen=True)
class BlockInput:
    """One input of a block."""

    form: Form | None
    requires_grad: bool
    is_leaf: bool


@dataclass(frozen=True, eq=False)
class TracedBlock:
    """A traced block of calls.

    Attributes:
        graph: the joint graph. It takes the inputs, then the cotangent if a result is differentiable.
        inputs: what the block was traced with. modes: the thread's modes at that time.
        outputs: nodes of the results. differentiable: position of the differentiable result; None if there is
            none.
        gradients: nodes of the contributions to the gradients of inputs, in the order in which they arrive;
            None if undefined.
        contributed: for each contribution, the position of its input.
        steps: for each of eager's autograd nodes, the positions of its contributions.
        region: describes its autograd nodes; None if there are none.
    """

    graph: fx.Graph
    inputs: tuple[BlockInput, ...]
    modes: ThreadModes
    outputs: tuple[fx.Node, ...]
    differentiable: int | None
    gradients: tuple[fx.Node | None, ...]
    contributed: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    region: Region | None

    @property
    def given(self) -> list[fx.Node]:
        """The placeholders: of the inputs, then of the cotangent."""
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def cotangent(self) -> Form | None:
        """The form of the cotangent."""
        return None if self.differentiable is None else form_of(self.given[-1].meta["val"])

    def calls(self, is_backward: bool) -> list[fx.Node]:
        """The calls of the forward, or of the backward."""
        calls = (node for node in self.graph.nodes if node.op == "call_function")
        return [node for node in calls if node.meta.get("is_backward", False) == is_backward]

    def fits(self, args: Sequence[Any]) -> bool:
        """True if `args` match the inputs with which the block was traced."""
        if not all(type(arg) is FunctionalTensor for arg in args):
            return False
        given = (BlockInput(form_of(plain(arg)), arg.requires_grad, arg.is_leaf) for arg in args)
        return all(one == known for one, known in zip(given, self.inputs, strict=True))


def refuse_block(graph: fx.Graph) -> None:
    """Check that a traced block can be instantiated for other copies.

    Raises:
        Refusal: a node is not an operator call, or a value is not fully described by its form.
    """
    given = Counter(storage_of(node.meta["val"]) for node in graph.find_nodes(op="placeholder"))
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        value = node.meta.get("val")
        made = value if isinstance(value, (tuple, list)) else (value,)
        is_operator = is_operator_overload(node.target) or node.target is operator.getitem
        # Attention on a GPU also returns plain numbers.
        tensors = [one for one in made if one is not None and type(one) is not int]
        is_known = all(form_of(one) and given[storage_of(one)] < 2 for one in tensors)
        if node.op != "call_function" or not is_operator or not is_known:
            raise Refusal("unnotable", "it has a value that stands for more than its form")


class BlockCopy:
    """One copy of a block, called in place of its calls.

    Args:
        block: the traced block to instantiate; None to trace this copy as usual.
        calls: the copy's calls in Dynamo's graph.
        otherwise: runs the calls themselves.
    """

    __name__ = __qualname__ = "block"

    def __init__(
        self,
        block: TracedBlock | None,
        calls: Sequence[fx.Node],
        otherwise: Callable[..., Any],
    ) -> None:
        self.block, self.calls, self._otherwise = block, calls, otherwise

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """Instantiate the block, or trace the copy as usual. Returns its outputs."""
        block, tracer = self.block, tracer_here()
        if block is not None and tracer is not None and ThreadModes.now() == block.modes:
            with torch_functions_off():
                if block.fits(args):
                    return Instance(self, block, tracer, args).outputs(args)
        outputs: tuple[Any, ...] = self._otherwise(*args)
        return outputs


class Instance:
    """A traced block instantiated in the graph of a trace: the forward at once, the backward on demand."""

    def __init__(self, copy: BlockCopy, block: TracedBlock, tracer: GraphTracer, args: Sequence[Any]) -> None:
        self.copy, self.block, self._tracer = copy, block, tracer
        #: `nodes` maps each node of the block to its node in this graph; `_values` maps inputs, outputs and
        #: gradients to their fakes; `_memory` maps storages of the block to storages in this graph.
        self.nodes, self._values = dict[fx.Node, fx.Node](), dict[fx.Node, Any]()
        self._memory: dict[int, torch.UntypedStorage] = {}
        fakes = [*map(plain, args)]
        self._mode = fakes[0].fake_mode
        for placeholder, fake in zip(block.given, fakes, strict=False):
            self._give(placeholder, fake)
        with tracer.noting(stack_trace=""):  # `_write` sets the stack trace of each call
            self._write(block.calls(is_backward=False))

    def outputs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """The results with their autograd history. `args` are the inputs of this copy."""
        made = [to_functional(self._values[node]) for node in self.block.outputs]
        if (place := self.block.differentiable) is not None:
            contributed = [args[number] for number in self.block.contributed]
            made[place] = RepeatedBlock.apply(self, (made[place], *args), *contributed)
        return tuple(made)

    def gradients(self, grad: torch.Tensor | None) -> list[Any]:
        """The contributions to the gradients of the inputs."""
        block = self.block
        if grad is None:
            if block.region is not None and block.region.has_functions:
                raise Refusal("unnotable", "Functions of a block would get an undefined gradient")
            return [None] * len(block.gradients)
        fake = plain(grad)
        if form_of(fake) != block.cotangent or self._tracer.node_of(fake) is None:
            raise OtherCotangent(self.copy, form_of(fake))
        self._give(block.given[-1], fake)
        self._write(block.calls(is_backward=True))
        return [None if node is None else to_functional(self._values[node]) for node in block.gradients]

    def _give(self, placeholder: fx.Node, fake: FakeTensor) -> None:
        """Bind a placeholder of the block, for an input or the cotangent, to a value of this trace."""
        node = self._tracer.node_of(fake)
        assert node is not None
        self.nodes[placeholder], self._values[placeholder] = node, fake
        self._memory[storage_of(placeholder.meta["val"])] = fake.untyped_storage()

    def _write(self, calls: Sequence[fx.Node]) -> None:
        tracer, results = self._tracer.tracer, {*self.block.outputs, *self.block.gradients}
        for call in calls:
            args, kwargs = (fx.map_arg(given, self.nodes.__getitem__) for given in (call.args, call.kwargs))
            name = None
            if is_operator_overload(call.target):
                name = call.graph._target_to_str(call.target.overloadpacket.__name__)
            node = tracer.create_node("call_function", call.target, args, kwargs, name)
            node.meta.update({key: value for key, value in call.meta.items() if key not in _OF_PLACE})
            node.meta["val"] = self._like(call.meta.get("val"))
            if (number := node.meta.pop(CALL_OF_BLOCK, None)) is not None:
                node.meta.pop("stack_trace")
                meta = self.copy.calls[number].meta
                node.meta.update({key: meta[key] for key in HANDED_ON if key in meta})
            if call in results:
                self._values[call] = value = self._like(call.meta["val"])
                set_proxy_slot(value, tracer, _ProxyTensor(tracer.proxy(node), None))
            self.nodes[call] = node

    def _like(self, value: Any) -> Any:
        """A fake with the same form as a value of the block."""
        if isinstance(value, (tuple, list)):
            return tuple(map(self._like, value))
        if (form := form_of(value)) is None:
            return value
        fake = fake_of_form(self._mode, form, self._memory.get(storage_of(value)))
        self._memory.setdefault(storage_of(value), fake.untyped_storage())
        return fake


class RepeatedBlock(torch.autograd.Function):
    """One autograd node in place of those of a copy."""

    @staticmethod
    def forward(
        ctx: Any, instance: Instance, seen: Sequence[torch.Tensor], *contributed: torch.Tensor
    ) -> Any:
        """Returns the first tensor of `seen`. `seen` are tensors visible outside that eager's nodes may have
        saved."""
        ctx.set_materialize_grads(False)
        ctx.instance = instance
        ctx.save_for_backward(*seen)
        return seen[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        """Instantiate the backward.

        Raises:
            RuntimeError: a saved tensor was modified in place.
        """
        _ = ctx.saved_tensors
        return None, None, *ctx.instance.gradients(grad)


def instance_of(node: Any) -> Instance | None:
    """The instance that the autograd node `node` represents; None if `node` is another node."""
    if getattr(node, "_forward_cls", None) is not RepeatedBlock:
        return None
    found: Instance = node.instance
    return found


# Thread state that calls of a graph switch

_ENTERS, _EXITS = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
_SETS_GRAD_MODE = torch._C._set_grad_enabled
#: Calls that return nothing and do not change what later calls do, apart from autocast and grad mode.
_KNOWN = (_ENTERS, _EXITS, _SETS_GRAD_MODE, torch._C._log_api_usage_once, operator.setitem)


def switched(calls: Sequence[fx.Node]) -> Iterator[int]:
    """Positions of the calls after which grad mode or autocast differ from their state before all calls."""
    depth, grad = 0, torch.is_grad_enabled()
    before = grad
    for i, node in enumerate(calls):
        depth += (node.target is _ENTERS) - (node.target is _EXITS)
        grad = bool(node.args[0]) if node.target is _SETS_GRAD_MODE else grad
        if depth or grad != before:
            yield i


def switches_more(node: fx.Node) -> bool:
    """True if the call switches thread state other than autocast and grad mode."""
    if "functorch" in (getattr(node.target, "__module__", "") or ""):
        return True
    return node.meta.get("example_value") is None and node.target not in _KNOWN
