"""Calls Inductor below AOTAutograd.

In: an ATen graph. Out: a boxed callable. We import Inductor only when it is used, because that takes a
second. Stock runs its joint passes before it partitions a joint graph. We run them as the first passes on
each graph that is lowered. So if Inductor's cache on disk has the code, no graph is searched for patterns,
and the patterns are not even loaded.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomGraphPassType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from retrograd.backends.inductor.alignment import aligned
from retrograd.backends.inductor.damage import removed, sweep
from retrograd.backends.inductor.decomposition_table import call_whole_operators
from retrograd.backends.inductor.disk_cache import is_cache_trusted
from retrograd.backends.inductor.no_compiler import refuse_without_compiler
from retrograd.backends.inductor.notes import Note, code_of
from retrograd.backends.inductor.overlaps import part_overlaps
from retrograd.backends.inductor.own_memory import memory_shown, part_results
from retrograd.backends.inductor.padding import close_gaps, read_padded
from retrograd.facts import fact
from retrograd.facts.patches import handled_here
from retrograd.graph.fx import copied, is_write_to_input, with_strides
from retrograd.graph.joint import output_examples, output_values
from retrograd.graph.lazy import LazyGraph
from retrograd.process import compiling
from retrograd.runtime.cache_folder import folder_in_use
from retrograd.trace.fakes import know_values
from retrograd.trace.layouts import laid_out_like_real


def get_ready() -> None:
    """Have Inductor start what it would otherwise wait for when it compiles.

    In a process that has used a GPU, Inductor starts its compile workers. The stock backend does so before it
    traces. Until the workers run, this process compiles kernels itself, one at a time. Without a GPU,
    Inductor probes the processor.
    """
    folder_in_use()
    with warnings.catch_warnings():  # Inductor imports this module, which warns of how it is written itself
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch.utils.mkldnn
    if torch.cuda.is_initialized():
        start_workers()
    else:
        _probe_processor()


@functools.cache
def start_workers() -> None:
    """Have Inductor start its compile workers, once."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


@functools.cache
def _probe_processor() -> threading.Thread | None:
    """If there is no GPU, a thread that probes which vector instructions the processor has. Inductor caches
    the answer. The probe compiles and loads a program for each kind; that takes seconds, most of them where
    the processor has that kind."""
    if torch.cuda.is_available():
        return None
    # We import what the probe imports: another thread could import it at the same time in another order.
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa
    from torch.utils import _filelock

    del codecache, cpp_builder, _filelock

    def probe() -> None:
        with suppress(Exception):  # Inductor will probe again, and raise the error where the user sees it
            sweep()
            cpu_vec_isa.valid_vec_isa_list()

    thread = threading.Thread(target=probe, name="retrograd-probe", daemon=True)
    thread.start()
    return thread


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    visible: int | None = None,
    is_backward: bool = False,
    is_inference: bool = False,
    known_as: str | None = None,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile `gm` (functional, decomposed, returning a tuple). `gm` is not changed.

    Args:
        gm: the graph.
        example_inputs: fakes of its inputs.
        visible: how many of the first outputs must have their traced strides. Other outputs, such as saved
            values, may get strides that are faster to produce.
        is_backward, is_inference: as ``compile_fx_inner`` takes them.
        known_as: the graph's cache key on disk, which determines it and its inputs; None if it has none.

    We declare inputs on a GPU static (``static_input_idxs``), as stock does with parameters. Inductor then
    assumes that their memory is aligned, and does not check it. `aligned` checks it instead, faster.
    """
    from torch._inductor.compile_fx import compile_fx_inner, get_input_idxs_to_check
    from torch._inductor.virtualized import V

    folder_in_use()
    call_whole_operators()
    if (probing := _probe_processor()) is not None:
        probing.join()
    fake_mode = detect_fake_mode(example_inputs)
    with (
        compiling,
        torch.no_grad(),
        _with_shape_env(fake_mode),
        config.patch(force_disable_caches=config.force_disable_caches or not is_cache_trusted()),
        tracing(TracingContext(fake_mode)),
        V.set_fake_mode(fake_mode),
        with_joint_passes(),
        handled_here("torch._inductor.codegen.cpp:" + _FUSES, _one_row_at_a_time),
        handled_here("torch._inductor.codegen.cpp:" + _TILES, _in_one_direction),
        handled_here("torch._inductor.codegen.cpp:stride_at_vec_range", _stride_at),
        handled_here("torch._inductor.ir:FallbackKernel.process_kernel", _called_as_real),
    ):
        places = () if config.triton.cudagraphs else get_input_idxs_to_check(example_inputs, ())
        note = Note(known_as, visible, is_backward, is_inference)
        compiled = code_of(note.read(), example_inputs, is_backward)
        if compiled is None:
            how: Any = {"static_input_idxs": places, "is_backward": is_backward, "is_inference": is_inference}
            try:
                compiled = compile_fx_inner(_prepared(gm, visible), list(example_inputs), **how)
            except Exception as error:
                refuse_without_compiler(error)
                if not removed(error):
                    raise
                compiled = compile_fx_inner(_prepared(gm, visible), list(example_inputs), **how)
            note.write(getattr(compiled, "_fx_graph_cache_key", None))
    is_boxed = getattr(compiled, "_boxed_call", False)
    run = aligned(compiled, places) if is_boxed else lambda args: compiled(*args)
    return with_strides(run, output_examples(gm.graph)[:visible]) if visible else run


def _prepared(gm: fx.GraphModule, visible: int | None) -> fx.GraphModule:
    """A copy of `gm` in the form that Inductor expects."""
    gm = fx.GraphModule(gm, copied(gm.graph))
    output = gm.graph.output_node()
    for write in list(filter(is_write_to_input, gm.graph.nodes)):
        output.prepend(write)  # Inductor's passes expect them there
    if visible is not None:
        seen = enumerate(output_values(gm.graph)[:visible])
        output.meta["user_visible_output_idxs"] = [i for i, one in seen if isinstance(one, fx.Node)]
    return gm


_FUSES = "OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr"


def _one_row_at_a_time(may_fuse: Callable[..., bool], node: Any, kernels: Sequence[Any], depth: int) -> bool:
    """Whether Inductor's C++ backend may fuse the `depth` outer loops of `kernels`.

    Fused kernels pass values through a buffer for one row. If one of them reads a transposed tensor, it
    processes several rows at a time. All of them use that buffer, which mixes up their values. Since 2.15,
    torch does not fuse such kernels (https://github.com/pytorch/pytorch/pull/185855).
    """
    steps = [loop.steps for kernel in kernels for loop in kernel.loop_nest.loops[:depth]]
    return all(step == 1 for step in steps) and may_fuse(node, kernels, depth)


_TILES = "TilingSelect._select_tiling_indices"


def _in_one_direction(
    select: Callable[..., list[int]], chooser: Any, functions: Any, sizes: Sequence[Any], factor: int
) -> list[int]:
    """The loops that Inductor's C++ backend vectorises by `factor` elements. We allow only one loop if there
    is a reduction and the number of elements in the other loops is not a multiple of `factor`.

    If it vectorises two loops, it stores whole vectors at the end of a row, even if fewer elements are left.
    These overwrite the next row, or the memory after the tensor
    (https://github.com/pytorch/pytorch/issues/196681).
    """
    indices = select(chooser, functions, sizes, factor)
    rows, reduced = max(sizes, key=lambda one: len(one[1]))
    is_even = all(rows[i] % factor == 0 for i in indices if i < len(rows))
    return indices[-1:] if reduced and not is_even else indices


def _stride_at(stride_at: Callable[..., Any], index: Any, var: Any, *length: Any) -> Any:
    """By how much `index` grows with `var`, inside a vector of the given `length`.

    Inductor's C++ backend asks this for each variable of each index, and has sympy simplify the index first,
    which takes some 15 ms. Only floor divisions, remainders and the like can become simpler there. If an
    index contains no such function and is linear in `var`, the answer is its derivative.
    """
    if isinstance(index, sympy.Expr) and var.is_Symbol and not index.has(sympy.core.function.Application):
        stride = index.diff(var)
        if var not in stride.free_symbols:
            return stride
    return stride_at(index, var, *length)


def _called_as_real(process: Callable[..., Any], kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """What Inductor knows about a kernel call, with corrected metadata of the result. Generated code asserts
    the result's layout, and the fake kernels of some operators predict a wrong one."""
    from torch._inductor.ir import IRNode, ir_node_to_tensor

    fake, tensors, *others = process(kernel, *args, **kwargs)
    if fact("layout", kernel) is not None:
        given = iter(tensors)
        fakes = [ir_node_to_tensor(next(given)) if isinstance(one, IRNode) else one for one in args]
        fake = laid_out_like_real(kernel, fake, fakes)
    return fake, tensors, *others


def chooses_layouts(graph: LazyGraph, is_inference: bool) -> bool:
    """Whether Inductor would choose the memory format of convolutions for the whole of `graph`. It does not
    if there are few. Another format means another cuDNN kernel, perhaps one that rounds to TF32."""
    if str(torch.ops.aten.convolution.default) not in graph.summary.targets:
        return True
    note = Note(graph.known_as, "chooses layouts", is_inference)
    if (text := note.read()) is None:
        from torch._inductor.graph import GraphLowering

        text = str(GraphLowering.decide_layout_opt(graph.gm, is_inference=is_inference))
        note.write(text)
    return text == str(True)


@contextmanager
def _with_shape_env(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Give a fake mode with static sizes a shape environment inside the block.

    Inductor uses its cache on disk only if the mode has one: it stores that one's guards with the code.
    """
    if fake_mode is None or fake_mode.shape_env is not None:
        yield
        return
    fake_mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        fake_mode.shape_env = None


class _JointPasses(CustomGraphPass):
    """Runs the joint passes, our repairs after them, and then the user's pass for this hook.

    Later passes use example values to find which nodes share memory. Stock recomputes all example values
    between the joint passes and the later ones. We recompute those that the joint passes leave stale.
    """

    def __init__(self, then: Any) -> None:
        self._then: Sequence[Any] = then if isinstance(then, (list, tuple)) else [then] if then else []

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        gm = graph.owning_module
        assert gm is not None
        held = {node: (node.args, node.kwargs, node.meta.get("val")) for node in graph.nodes}
        shown = memory_shown(graph)
        joint_graph_passes(gm)
        read_padded(graph)
        stale = set()
        for node in graph.nodes:
            args, kwargs, value = held.get(node, (None, None, None))
            if node.args is not args or node.kwargs is not kwargs:
                stale.add(node)
            if value is not None:  # a pass may copy it from the replaced node, which lives in other memory
                node.meta["val"] = value
        examples = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        if stale:
            know_values(gm, examples, stale)
        if copies := [*part_results(graph, shown), *part_overlaps(graph), *close_gaps(graph)]:
            know_values(gm, examples, copies)
        for each in self._then:
            each(graph)

    def uuid(self) -> Any | None:
        """The cache key of these passes. None, which disables the cache, if the user's pass has no key."""
        theirs = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._then]
        return None if None in theirs else ("retrograd-joint-passes-9", torch.__version__, *map(repr, theirs))


def with_joint_passes() -> AbstractContextManager[Any]:
    """Inside, Inductor runs the joint passes on each graph that it lowers, unless its cache has the code."""
    before: CustomGraphPassType = config.post_grad_custom_pre_pass
    return config.patch(post_grad_custom_pre_pass=_JointPasses(before))
