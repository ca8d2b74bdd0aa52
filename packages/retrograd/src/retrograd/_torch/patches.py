"""Every attribute of torch that this package replaces: one table, one mechanism.

In: a name of the table and a handler for it. Out: from then on torch's attribute is a dispatcher, for good;
it calls the handler of this thread, else the handler of the process, else the original. Nothing is ever put
back, so that nobody can put back too much, or at the wrong time, while another thread is inside. Whatever a
handler does for one thread only, it decides by state of that thread.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from retrograd._torch.releases import CHECKPOINT
from retrograd.process import ForkSafeLock, restore_after_errors

#: is given the original and the arguments of a call, and answers it.
Handler = Callable[..., Any]

#: where a process group begins to collect what is started; of builds with ``torch.distributed``.
COLLECTING = "torch._C._distributed_c10d:ProcessGroup._start_coalescing"

#: what is replaced (``module:attribute``), and why there is no other way.
TABLE: Mapping[str, str] = {
    "torch.autograd.graph:_engine_run_backward": "the only Python entrance of a backward into the engine",
    "torch.autograd:_engine_run_backward": "the same, imported by name",
    "torch._C:_current_autograd_node": "hooks ask which node runs; the engine knows the plan's node only",
    "torch._C:_will_engine_execute_node": "the same",
    "torch._C:_current_graph_task_execution_order": "the same",
    "torch:Tensor.register_hook": "a hook that is registered in a running backward must run in it",
    "torch:Tensor.register_post_accumulate_grad_hook": "the same",
    "torch.autograd.function:_HookMixin._register_hook": "the same, for hooks of nodes",
    "torch.utils.hooks:RemovableHandle.remove": "a hook that is removed in a running backward must not run",
    "torch.utils.hooks:RemovableHandle.__init__": "Dynamo does not look whether modules have got hooks since",
    "torch.cuda:set_stream": "nobody tells which streams a program uses, and a plan must wait for them",
    CHECKPOINT: ("a trace marks what is to be recomputed; saved-tensor hooks would compute it at once"),
    "torch.utils.checkpoint:CheckpointFunction.apply": "the same",
    COLLECTING: (
        "no trace sees that a process group collects what is started from here on, and an error of the trace "
        "would leave it collecting"
    ),
    "torch._functorch.utils:unwrap_dead_wrappers": (
        "a Function asks no mode what to do with a real tensor, and a trace has another one for it"
    ),
    "torch._functorch.partitioners:_extract_fwd_bwd_modules": (
        "the minimum cut is wanted, not the two graphs made of it, which take as long again"
    ),
    "torch._inductor.codegen.cpp:OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr": (
        "rows of a transposed tensor are mixed, forward and backward, and no setting prevents it (until 2.15)"
    ),
    "torch._inductor.codegen.cpp:TilingSelect._select_tiling_indices": (
        "sums in tiles of two directions write past the ends of uneven rows, and no setting prevents it"
    ),
    "torch._inductor.ir:FallbackKernel.process_kernel": (
        "generated code asserts strides of what fake kernels give, which are wrong for some operators"
    ),
    "torch._dynamo.output_graph:OutputGraph.call_user_compiler": (
        "the graph that a stock backend was given, to differentiate its backward"
    ),
    "torch.autograd.function:FunctionMeta.__init__": "the Function that AOTAutograd makes of that graph",
    "torch._dynamo.variables.misc:AutogradFunctionVariable.call_apply": (
        "Dynamo takes Functions apart before it calls a backend, and loses what they say to autograd"
    ),
    "torch._dynamo.variables.higher_order_ops:CheckpointHigherOrderVariable._call_function": (
        "a checkpoint that changes a tensor changes it again when it is computed once more; a graph does not"
    ),
    "torch._dynamo.variables.torch:TorchInGraphFunctionVariable._get_handlers": (
        "Dynamo takes operators apart, which round otherwise in pieces"
    ),
    "torch._dynamo.variables.tensor:TensorVariable.call_method": "the same; and hooks",
    "torch._dynamo.eval_frame:OptimizedModule.__setattr__": (
        "the flag for a wrapper's full backward hooks goes to the inner module, so they are never called"
    ),
    "torch._dynamo.eval_frame:OptimizedModule.__reduce__": "copies and pickles of a wrapper lose its hooks",
    "torch._dynamo.variables.builder:VariableBuilder.wrap_module": (
        "Dynamo traces the module inside a wrapper, without the hooks of the wrapper"
    ),
    "torch._dynamo.utils:_get_fake_value_impl": (
        "what raises on fake tensors must raise where eager raises, after all that eager does before"
    ),
    "torch._dynamo.symbolic_convert:_detect_and_normalize_assert_statement": (
        "an assertion about a tensor must raise an AssertionError where it stands; Dynamo puts another error "
        "into its graph"
    ),
    "torch._dynamo.variables.builder:VariableBuilder.wrap_tensor": (
        "a parameter of an optimizer loses its class, by which the optimizer may tell what to do with it"
    ),
}


class _ThreadHandlers(threading.local):
    """The handlers of this thread by name, innermost last."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[Handler]] = {}


_here = _ThreadHandlers()


def _put_handlers_back(before: dict[str, int]) -> None:
    for name, stack in _here.stacks.copy().items():
        del stack[before.get(name, 0) :]


restore_after_errors(
    lambda: {name: len(stack) for name, stack in _here.stacks.copy().items() if stack}, _put_handlers_back
)
_everywhere: dict[str, Handler] = {}
_replaced: set[str] = set()
_lock = ForkSafeLock()


def handle(name: str, handler: Handler) -> None:
    """From here on `handler` answers calls of `name`, on every thread."""
    _replace(name)
    _everywhere[name] = handler


@contextmanager
def handled_here(name: str, handler: Handler) -> Iterator[None]:
    """Inside, `handler` answers calls of `name` on this thread."""
    _replace(name)
    stack = _here.stacks.setdefault(name, [])
    stack.append(handler)
    try:
        yield
    finally:
        if handler in stack:  # an error may have come between
            stack.remove(handler)


def owner_and_attribute(name: str) -> tuple[Any, str]:
    """The object whose attribute is replaced, and the name of the attribute.

    Raises:
        ImportError, AttributeError: this torch has no such thing.
    """
    module, _, path = name.partition(":")
    *owners, attribute = path.split(".")
    owner = importlib.import_module(module)
    if owners:
        owner = operator.attrgetter(".".join(owners))(owner)
    inspect.getattr_static(owner, attribute)
    return owner, attribute


def _replace(name: str) -> None:
    if name in _replaced:
        return
    assert name in TABLE, f"{name} is replaced, but does not stand in the table of patches"
    with _lock:
        if name not in _replaced:
            owner, attribute = owner_and_attribute(name)
            setattr(owner, attribute, _dispatcher_like(name, owner, attribute))
            _replaced.add(name)


def _dispatcher_like(name: str, owner: Any, attribute: str) -> Any:
    """A dispatcher that is a plain function, a static method or a class method, as the original is."""
    found = inspect.getattr_static(owner, attribute)
    if isinstance(found, staticmethod):
        return staticmethod(_dispatcher(name, found.__func__))
    bound = getattr(owner, attribute)
    if inspect.ismethod(bound) and bound.__self__ is owner:  # a class method, perhaps inherited
        return staticmethod(_dispatcher(name, bound))
    return _dispatcher(name, bound)


def _dispatcher(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    stacks = _here

    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        stack = stacks.stacks.get(name)
        handler = stack[-1] if stack else _everywhere.get(name)
        return original(*args, **kwargs) if handler is None else handler(original, *args, **kwargs)

    return hidden_from_dynamo(dispatch)


def hidden_from_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which Dynamo does not compile, nor what it calls, where compiled code calls it after a break."""
    strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(fn.__code__, strategy)
    return fn
