"""The door to Inductor and torch's partitioners. Inductor is called below AOTAutograd.

In: an ATen graph. Out: a boxed callable. Inductor itself is imported when it is used: that takes a second.
The passes that stock runs before it partitions a joint graph run as the first of those on the graph that is
lowered. So a graph that is found in Inductor's cache on disk is not searched for patterns, and these are not
even loaded. The cache holds pickles, and reading a pickle runs what it says: whoever can write to its folder
can run code in this process.

In: the state of torch in this process. Out: a key that is the same in two processes exactly if Inductor would
take code from one for the other, the folder of its cache, and settings and switches as data, which another
process can take; or a `Refusal` if nothing is kept on disk here.

In: a joint graph and which of its placeholders are cotangents. Out: the names of the nodes that the backward
reads, as torch's partitioners choose them.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import pickle
import stat
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config, list_options
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomGraphPassType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy

from retrograd._torch.fx import copied, lazily, lazy_graph_module, with_strides
from retrograd._torch.patches import handled_here
from retrograd._torch.trace.fakes import know_values
from retrograd.errors import Escape, FallbackWarning, Refusal
from retrograd.graph.reach import reached
from retrograd.process import compiling


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions that Inductor expects to have been applied."""
    # Some decompositions read ``torch._inductor.lowering``, which nothing may have imported yet.
    from torch._inductor import lowering  # noqa: F401
    from torch._inductor.decomposition import select_decomp_table

    return {**select_decomp_table(), torch.ops.aten.bernoulli.p: _bernoulli}


def _bernoulli(value: torch.Tensor, p: float = 0.5, *, generator: Any = None) -> Any:
    """As the mask of a dropout. Inductor's own lowering for CPU draws in place, and a kernel that reads the
    numbers may run before they are drawn, fused with others."""
    if generator is not None:
        return NotImplemented
    return torch.native_dropout(torch.ones_like(value), 1 - p, True)[1].to(value.dtype)


def warm_workers() -> None:
    """Have Inductor start the processes that compile for GPUs, as the stock backend does before it traces.
    Until they run, kernels are compiled here, one after the other. In a process that has used no GPU yet,
    nothing happens."""
    if torch.cuda.is_initialized():
        _warm_workers()


@functools.cache
def _warm_workers() -> None:
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()


def settings() -> list[str]:
    """The names of Inductor's settings."""
    return list_options()


def patched(values: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inside, Inductor's settings have these `values`."""
    return config.patch(dict(values)) if values else nullcontext()


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    visible: int | None = None,
    is_backward: bool = False,
    is_inference: bool = False,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile `gm` (functional, decomposed, returning a tuple), which stays as it is.

    Args:
        gm: the graph.
        example_inputs: fakes of its inputs.
        visible: how many outputs, from the first, must have the strides that they were traced with. Others,
            as saved values are, may get strides that are quicker to make.
        is_backward, is_inference: as ``compile_fx_inner`` takes them.

    No input is called static (``static_input_idxs``): that would make Inductor rely on the alignment of
    memory, which no guard checks, and it saves no more than that check.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    gm = fx.GraphModule(gm, copied(gm.graph))
    output = gm.graph.output_node()
    fakes: list[Any] = []
    if visible is not None:
        results: Sequence[Any] = output.args[0]  # type: ignore[assignment]
        fakes = [r.meta.get("val") if isinstance(r, fx.Node) else None for r in results[:visible]]
        seen = [i for i, result in enumerate(results[:visible]) if isinstance(result, fx.Node)]
        output.meta["user_visible_output_idxs"] = seen
    fake_mode = detect_fake_mode(example_inputs)
    with (
        compiling,
        torch.no_grad(),
        _with_shape_env(fake_mode),
        config.patch(force_disable_caches=config.force_disable_caches or not _is_cache_trusted()),
        tracing(TracingContext(fake_mode)),
        V.set_fake_mode(fake_mode),
        with_joint_passes(),
    ):
        compiled = compile_fx_inner(
            gm, list(example_inputs), is_backward=is_backward, is_inference=is_inference
        )
    run = compiled if getattr(compiled, "_boxed_call", False) else lambda args: compiled(*args)
    return with_strides(run, fakes) if fakes else run


def chooses_layouts(gm: fx.GraphModule, is_inference: bool) -> bool:
    """Whether Inductor, given the whole of `gm`, chooses the memory format of its convolutions. It does not
    where they are few. Another format is another kernel of cuDNN, perhaps one that rounds to TF32."""
    if not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        return True
    from torch._inductor.graph import GraphLowering

    return GraphLowering.decide_layout_opt(gm, is_inference=is_inference)


def _is_cache_trusted() -> bool:
    """Whether Inductor's folder is safe to read; if not, that is said once."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = cache_dir()
    why = why_not_trusted(folder)
    if why is not None:
        _say_untrusted(folder, why)
    return why is None


@functools.cache
def _say_untrusted(folder: str, why: str) -> None:
    warnings.warn(
        f"compiled graphs are not read from {folder}: {why}\n"
        "  try    TORCHINDUCTOR_CACHE_DIR, with a folder that only you can write to",
        FallbackWarning,
        stacklevel=2,
    )


@contextmanager
def _with_shape_env(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Inside, a mode of static sizes has a shape environment too.

    Inductor looks a graph up in its cache on disk only if the mode has one, to keep its guards with the code.
    """
    if fake_mode is None or fake_mode.shape_env is not None:
        yield
        return
    fake_mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        fake_mode.shape_env = None


def why_not_trusted(folder: str) -> str | None:
    """Why nothing that is pickled should be read from `folder`; None if it is this user's own (or root's)."""
    if not hasattr(os, "geteuid"):
        return None
    try:
        found = os.stat(folder)
    except OSError as error:
        return f"it cannot be examined: {error.strerror}"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, not to this one ({os.geteuid()})"
    if found.st_mode & stat.S_IWOTH:
        return "everybody may write to it"
    return None


class _JointPasses(CustomGraphPass):
    """The joint passes, then the pass that the user has set in this place.

    Later passes read from example values which nodes share memory. Stock computes all of them again between
    the joint passes and these; what those leave behind on the way here is computed again as well.
    """

    def __init__(self, then: Any) -> None:
        self._then: Sequence[Any] = then if isinstance(then, (list, tuple)) else [then] if then else []

    def __call__(self, graph: fx.Graph) -> None:
        from torch._inductor.fx_passes.joint_graph import joint_graph_passes

        gm = graph.owning_module
        assert gm is not None
        held = {node: (node.args, node.kwargs) for node in graph.nodes}
        joint_graph_passes(gm)
        stale = {
            node
            for node in graph.nodes
            if node not in held or node.args is not held[node][0] or node.kwargs is not held[node][1]
        }
        if stale:
            know_values(gm, [node.meta["val"] for node in graph.find_nodes(op="placeholder")], stale)
        for each in self._then:
            each(graph)

    def uuid(self) -> Any | None:
        """Tells Inductor's cache what runs here; None (nothing is cached) if the user's pass cannot."""
        theirs = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self._then]
        return None if None in theirs else ("retrograd-joint-passes-2", torch.__version__, *map(repr, theirs))


def with_joint_passes() -> AbstractContextManager[Any]:
    """Inside, Inductor runs the joint passes on every graph that it lowers and does not find in its cache."""
    before: CustomGraphPassType = config.post_grad_custom_pre_pass
    return config.patch(post_grad_custom_pre_pass=_JointPasses(before))


# the cache on disk

#: what a trace depends on and Inductor's key does not say.
_SWITCHES: tuple[Any, ...] = (
    torch.is_inference_mode_enabled,
    torch.is_anomaly_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    lambda: torch.backends.cudnn.enabled,
    lambda: torch.backends.mkldnn.enabled,
)


def cache_folder() -> str:
    """The folder of Inductor's cache.

    Raises:
        Refusal: nothing is kept on disk, or others may write there.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if config.force_disable_caches or not config.fx_graph_cache:
        raise Refusal("cache-off", "Inductor keeps nothing on disk")
    folder = cache_dir()
    if why := why_not_trusted(folder):
        raise Refusal("cache-untrusted", why)
    return folder


def environment() -> list[Any]:
    """All that code depends on besides its graph: releases, hardware, settings of Inductor and of torch's
    partitioners, switches of torch, names of operators' implementations in Python.

    Raises:
        Refusal: a mode or a hook of the user's is on, which cannot be named.
        Exception: whatever Inductor says against keeping something.
    """
    from torch._inductor.codecache import compiled_fx_graph_hash

    if _get_current_dispatch_mode_stack() or torch._C._autograd._top_saved_tensors_default_hooks(True):
        raise Refusal("modes", "a dispatch mode or hooks for saved tensors are on")
    nothing: Any = fx.Graph()
    nothing.output(())
    options: Any = {}
    key, _ = compiled_fx_graph_hash(fx.GraphModule({}, nothing), [], options, [])
    settings = functorch_config.save_config_portable(ignore_private_configs=False)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    cards = [torch.cuda.get_device_name(device) for device in devices]
    python_kernels = sorted(name for name in torch.library._impls if name.startswith(("aten/", "prims/")))
    return [key, settings, [is_on() for is_on in _SWITCHES], cards, python_kernels]


#: settings and switches of one process, for another one.
Portable = dict[str, Any]


def portable_settings() -> Portable:
    """What compiled code depends on besides its graph, and what `take_settings` needs.

    Raises:
        Exception: as `environment` and `cache_folder`.
    """
    *known, kernels = environment()
    # torch registers rules of vmap when they are first needed; what is compiled is traced already
    kernels = [name for name in kernels if "/FuncTorch" not in name]
    return {
        "inductor": config.save_config_portable(ignore_private_configs=False),
        "functorch": functorch_config.save_config_portable(ignore_private_configs=False),
        "precision": torch.get_float32_matmul_precision(),
        "device": torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        "environment": repr([*known, kernels]),
        "formats_in": _formats_in(),
        "folder": cache_folder(),
    }


def _formats_in() -> str:
    """Inductor's keys are made by pickling, and pickle names a memory format by the first module that has an
    attribute ``torch``: it depends on what was imported first."""
    found: str = pickle.whichmodule(torch.contiguous_format, "torch.contiguous_format")  # type: ignore[attr-defined]
    return found


def _have_formats_in(name: str) -> None:
    """Have `_formats_in` return `name`, a module of another process, which need not exist here."""
    if _formats_in() == name:
        return
    first = sys.modules.get(name) or types.ModuleType(name)
    vars(first).setdefault("torch", torch)
    others = {**sys.modules}
    for package in itertools.accumulate(name.split("."), "{}.{}".format):
        others.setdefault(package, types.ModuleType(package))
    del others[name]
    sys.modules.clear()
    sys.modules.update({name: first, **others})


def take_settings(portable: Portable) -> None:
    """Have the settings of the process from which they came, and what this one needs to compile."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = portable["folder"]
    _warm_workers()  # before there is a context on a device, which they would inherit
    config.load_config(portable["inductor"])
    functorch_config.load_config(portable["functorch"])
    if torch.get_float32_matmul_precision() != portable["precision"]:
        torch.set_float32_matmul_precision(portable["precision"])
    _have_formats_in(portable["formats_in"])
    if portable["device"] is not None:
        torch.cuda.set_device(portable["device"])
        torch.cuda.init()


def import_everything() -> None:
    """Import what compiling needs, and compute what all keys contain, without the use of a device."""
    from torch._inductor import compile_fx, lowering  # noqa: F401
    from torch._inductor.codecache import torch_key

    torch_key()


def compile_threads() -> int:
    """How many processes of its own Inductor compiles kernels with; 1: none."""
    return config.compile_threads or 1


# partitioners

#: what torch's partitioner gives a backward besides values of the joint graph: cotangents, and states of
#: generators from which numbers are drawn again.
_NO_VALUES = ("tangents_", "rng_state_output_", "bwd_rng_state_")


def memory_budget(gm: fx.GraphModule) -> float:
    """The share of what torch's minimum cut would save that the user lets it save: 1, or
    ``torch._functorch.config.activation_memory_budget``, or what is said of a region of the program."""
    marks = (value for node in gm.graph.nodes for value in _budgets_of(node))
    return min(marks, default=functorch_config.activation_memory_budget)


def _budgets_of(node: fx.Node) -> list[float]:
    notes = node.meta.get("custom") or {}
    said = (node.meta.get("memory_budget"), notes.get("_region_activation_memory_budget"))
    return [value for value in said if isinstance(value, float)]


def cut_by(
    partitioner: Callable[..., Any] | None,
    gm: fx.GraphModule,
    cotangents: frozenset[str],
    forward_count: int,
    pinned: frozenset[str],
) -> list[str]:
    """What `partitioner` (None: torch's minimum cut) saves.

    Args:
        gm: the joint graph; stays as it is.
        cotangents: names of placeholders.
        forward_count: how many outputs belong to the forward.
        pinned: calls that must not be made again; if one gives several values, each is kept, whatever its
            mark says.
    """
    graph = copied(gm.graph)
    for node in graph.nodes:
        if node.name in cotangents:
            node.target = f"tangents_{node.name}"  # how torch tells them from primals
        if node.name in pinned or (node.target is operator.getitem and node.args[0].name in pinned):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta.setdefault("ac_graph_id", 0)
        if node.meta.get("is_backward"):
            node.meta["partitioner_tag"] = "is_backward"
    inputs = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    context = tracing(TracingContext(detect_fake_mode(inputs)))  # for states of generators
    module = lazy_graph_module(gm, graph)
    with functorch_config.patch(cse=False), lazily(), context:
        if partitioner is None:
            chosen = [node.name for node in _minimum_cut(module, inputs, forward_count)]
        else:
            _, backward = partitioner(module, inputs, num_fwd_outputs=forward_count)
            inputs = backward.graph.find_nodes(op="placeholder")
            chosen = [node.name for node in inputs if not str(node.target).startswith(_NO_VALUES)]
    return [name for name in chosen if name not in cotangents]


def _minimum_cut(module: fx.GraphModule, inputs: Sequence[Any], forward_count: int) -> Sequence[fx.Node]:
    """What torch's minimum cut saves, of that what the backward reads.

    From what is chosen torch goes on to make two graphs, which takes as long again; ours are made elsewhere.
    """

    def stop(original: Any, joint: Any, values: Any, saved_sym_nodes: Any, *args: Any, **kwargs: Any) -> Any:
        raise Escape(_read_of(joint.graph, forward_count, {*values, *saved_sym_nodes}))

    with handled_here("torch._functorch.partitioners:_extract_fwd_bwd_modules", stop):
        try:
            partitioners.min_cut_rematerialization_partition(module, inputs, num_fwd_outputs=forward_count)
        except Escape as chosen:
            saved: Sequence[fx.Node] = chosen.value
            return saved
    raise AssertionError("torch's partitioner has made no halves")


def _read_of(graph: fx.Graph, forward_count: int, saved: set[fx.Node]) -> list[fx.Node]:
    """Those of `saved` that results behind the first `forward_count` are computed of."""
    results: Any = graph.output_node().args[0]
    wanted = (node for node in results[forward_count:] if isinstance(node, fx.Node))
    seen = reached(wanted, lambda node: () if node in saved else node.all_input_nodes)
    return [node for node in graph.nodes if node in saved and node in seen]
