"""Give one half of a partition to a backend.

In: a functional ATen graph whose placeholders have example values. Out: a boxed callable, in parts at first
if that is quicker to compile; `LateCode` if compiling takes longer than the user wants to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from retrograd._torch.fx import has_effect, is_random
from retrograd._torch.state import autocast_off
from retrograd._torch.trace import decomposed, guard_count
from retrograd.backends.background import Later, begin, is_taken
from retrograd.backends.base import Backend, Boxed, Half
from retrograd.backends.fallible import compile_fallible
from retrograd.backends.whole import WholeLater
from retrograd.config import Config
from retrograd.errors import Reason
from retrograd.events import counters
from retrograd.graph.joint_graph import CaptureState
from retrograd.repeats.compile import CALLS_PER_NODE, Division


@autocast_off()
def lower(
    backend: Backend,
    gm: fx.GraphModule,
    state: CaptureState,
    half: Half,
    config: Config,
    given: Sequence[Any] | Division | None = None,
) -> Boxed:
    """Compile `gm`, after the decompositions that the backend asks for unless `capture` applied them.
    Repeated structure is compiled once, where `config` says so and the backend takes parts of graphs.
    `given` are example inputs, or what `announce` gave for the same."""
    division = given if isinstance(given, Division) else None
    inputs = given.inputs if isinstance(given, Division) else given or _examples(gm)
    table = backend.decompositions()
    if table and not state.decompositions:
        gm = decomposed(gm, inputs, state.fake_mode, table)
    counters["aot_compiles"] += 1
    for_parts = backend.for_parts_of(gm, half)

    def compile_part(part: fx.GraphModule, examples: Sequence[Any], visible: int | None) -> Boxed:
        how = backend if part is gm else for_parts
        return compile_fallible(how, part, examples, replace(half, visible=visible), strict=config.strict)

    def compile_graph() -> Boxed:
        found = division or _divided(backend, gm, inputs, half, config)
        code = found.code(compile_part)
        effects = [node for node in gm.graph.nodes if has_effect(node) and not is_random(node)]
        may_change = found.is_divided and not found.is_symbolic and not effects
        return _whole_later(code, backend, gm, inputs, half, config) if may_change else code

    if config.patience is None:
        return compile_graph()
    later = begin(compile_graph, config.patience)
    return later.result() if is_taken(later) else LateCode(later, lambda: guard_count(state.fake_mode))


def announce(
    backend: Backend, gm: fx.GraphModule, state: CaptureState, half: Half, config: Config
) -> Division | None:
    """Tell the backend of the graphs that `lower` will have it compile, and give them; None if decompositions
    come before."""
    if backend.decompositions() and not state.decompositions:
        return None
    for_parts = backend.for_parts_of(gm, half)
    division = _divided(backend, gm, _examples(gm), half, config)
    for part, examples, visible in division.graphs.values():
        how = backend if part is gm else for_parts
        how.announce(part, examples, replace(half, visible=visible))
    return division


def _whole_later(
    parts: Boxed, backend: Backend, gm: fx.GraphModule, inputs: Sequence[Any], half: Half, config: Config
) -> Boxed:
    """`parts`, and later the whole of `gm`, if others compile it. What is recorded does not change, and
    nobody waits who has chosen not to."""
    if config.whole_after is None or config.cudagraphs or config.patience is not None:
        return parts
    elsewhere = backend.elsewhere(gm, inputs, half)
    if elsewhere is None:
        return parts

    @autocast_off()
    def compile_whole() -> Boxed:
        return compile_fallible(backend, gm, inputs, half, strict=config.strict, is_proven=True)

    return WholeLater(parts, config.whole_after, elsewhere, compile_whole)


def _examples(gm: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _divided(
    backend: Backend, gm: fx.GraphModule, inputs: Sequence[Any], half: Half, config: Config
) -> Division:
    least = config.smallest_repeat * CALLS_PER_NODE if backend.takes_parts else 0
    return Division(gm, inputs, least, half.visible, config.fewest_copies)


class LateCode:
    """Code that is being compiled on another thread.

    Args:
        later: becomes the code.
        guards: how many guards the sizes of the graph have by now. Code that adds guards when nobody installs
            them any more is not used.
    """

    def __init__(self, later: Later, guards: Callable[[], int]) -> None:
        self._later, self._guards, self._guards_then = later, guards, guards()

    @property
    def is_ready(self) -> bool:
        """Whether it may be called, if only to say why it cannot run."""
        return self._later.done() and self._guards() == self._guards_then

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run it."""
        return self._later.result()(args)


def is_ready(code: Boxed) -> bool:
    """Whether the code may be called."""
    return code.is_ready if isinstance(code, LateCode) else True


def still_compiling(name: str) -> Reason:
    """Why something runs as eager runs it meanwhile."""
    return Reason(
        "compile-timeout",
        f"{name} takes longer to compile than compile_timeout allows; it is compiled in the background",
        "aot.compile",
        way_out="nothing to do, or a larger compile_timeout",
    )
