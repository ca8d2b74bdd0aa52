"""Operators that write to tensors which their schemas say they only read: running statistics.

In: a call, as functionalisation gets it. Out: one that does the same, whose schema says what it writes; or
why there is none.

Functionalisation goes by schemas. A call that writes without saying so would stay in the graph as it is, and
write each time that the graph, a part of it or the function is run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from retrograd._torch.fx import schema_of
from retrograd.errors import not_representable

_aten = torch.ops.aten
#: by operator: the places of the statistics among the arguments, and of what says whether they are updated
#: (None: they always are). Source: the kernels in ``aten/src/ATen/native`` (``cudnn/BatchNorm.cpp``,
#: ``miopen/BatchNorm_miopen.cpp``, ``Normalization.cpp``, ``cuda/Normalization.cu``). Torch itself writes
#: ``native_batch_norm`` anew, by a form for the Python dispatcher.
_STATISTICS: Mapping[Any, tuple[tuple[int, ...], int | None]] = {
    _aten.cudnn_batch_norm.default: ((3, 4), 5),
    _aten.miopen_batch_norm.default: ((3, 4), 5),
    _aten.batch_norm_update_stats.default: ((1, 2), None),
    _aten.batch_norm_gather_stats.default: ((3, 4), None),
    _aten.batch_norm_gather_stats_with_counts.default: ((3, 4), None),
}
#: of these, the ones that `_UPDATE` calls, where they are what batch norm is made of on the device.
_CALLED_BY_UPDATE = (_aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
#: the same without the argument that says whether it is training; its schema says that it writes.
_UPDATE = _aten._batch_norm_with_update.default


class Instead(NamedTuple):
    """A call in place of another; the first `results` of what it gives are those of the other."""

    operator: Any
    args: tuple[Any, ...]
    results: int


def saying_its_writes(operator: Any, args: Sequence[Any]) -> Instead | None:
    """What to call instead; None if the call writes nothing that its schema does not mention.

    Raises:
        Refusal: it does, and no operator does the same and says so.
    """
    if operator not in _STATISTICS:
        return None
    places, training = _STATISTICS[operator]
    given = [place for place in places if args[place] is not None]
    if not given or (training is not None and not args[training]):
        return None
    if operator not in _CALLED_BY_UPDATE or len(given) < len(places):
        raise not_representable(f"it calls {operator}, which writes running statistics without saying so")
    return Instead(_UPDATE, (*args[:5], *args[6:]), len(schema_of(operator).returns))
