"""The door to tracing: fake tensors, functionalisation, the tracer, symbolic sizes, and their guards.

In: functions and the tensors they are called with. Out: ATen graphs, and what they assume.
"""

from retrograd._torch.trace.checkpointing import checkpoints_marked
from retrograd._torch.trace.effects import without_tokens
from retrograd._torch.trace.expressions import (
    Symbol,
    Tree,
    encoded,
    guards_of,
    holds,
    shown,
    size_of,
    symbolic_mode,
    symbols_of,
    value_of,
)
from retrograd._torch.trace.fakes import (
    alias_of_fake,
    fake_mode_of,
    fake_of,
    fake_results,
    guard_count,
    is_fake,
    laid_out_like,
    new_fake_mode,
    retraced,
    strided_fake,
    why_not_fakeable,
)
from retrograd._torch.trace.free_tensors import FreeTensors
from retrograd._torch.trace.functional import (
    functional_mode,
    inner_tensors,
    is_traced,
    mutations_of,
    plain,
    storage_key,
    to_functional,
    was_data_mutated,
    was_metadata_mutated,
    was_mutated_unseen_by_autograd,
    was_storage_changed,
)
from retrograd._torch.trace.graph_tracer import JointTracer, is_tracing_here, make_graph, noted
from retrograd._torch.trace.history import History, Part, saved_tensors_unseen
from retrograd._torch.trace.input_guards import InputGuard, changed_sizes
from retrograd._torch.trace.interpret import run_graph
from retrograd._torch.trace.segment_tracer import (
    Traced,
    arguments_read,
    decomposed,
    is_batched,
    is_operator,
    trace,
)
from retrograd._torch.trace.symbols import bytes_of, places_of_symbols, symbols_in
from retrograd._torch.trace.views import (
    add_each,
    common_base,
    copy_each,
    groups_sharing_memory,
    lies_within,
    view_origin,
    with_view_origin,
)
