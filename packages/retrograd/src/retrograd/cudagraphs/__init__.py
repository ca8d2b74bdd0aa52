"""CUDA graphs: what a compiled function does on a device, recorded once and replayed.

In: compiled code and the graphs that it was compiled from. Out: the same code, replayed where that is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import fx

from retrograd._torch.cuda import CudaRecorder
from retrograd.cudagraphs.graphed_call import GraphedCall
from retrograd.cudagraphs.recorded import Boxed
from retrograd.cudagraphs.refusals import device_of, why_not_recorded
from retrograd.errors import Reason

__all__ = ["GraphedCall", "graphed"]

_recorder = CudaRecorder()


def graphed(
    code: Boxed,
    *graphs: fx.Graph,
    kept: Collection[int] = (),
    loose: Sequence[int] = (),
    tell: Callable[[Reason], None],
    recorder: CudaRecorder | None = None,
) -> Boxed:
    """`code`, replayed where that is safe.

    Args:
        code: takes a list of inputs, to none of which it writes.
        graphs: all that it was compiled from, with the fakes of their values.
        kept, loose: as `GraphedCall` takes them.
        tell: told, once each, why a call is not replayed.
        recorder: makes recordings; on CUDA devices if not given.

    Returns:
        `code` itself if it is never to be recorded.
    """
    recorder = recorder or _recorder
    if (reason := why_not_recorded(graphs, recorder.device_type)) is not None:
        tell(reason)
        return code
    return GraphedCall(code, recorder, device_of(graphs), kept=kept, loose=loose, tell=tell)
