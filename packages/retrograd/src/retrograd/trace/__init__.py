"""Tracing: fake tensors, functionalisation, the tracer, symbolic sizes and their guards.

In: functions and the tensors they are called with. Out: ATen graphs, and the assumptions under which they are
valid.
"""

from retrograd.trace.activation_checkpoint import (
    CALL_OF_BLOCK,
    checkpoints_inlined,
    checkpoints_marked,
    draws_repeated,
    is_reentrant,
    run_graph,
)
from retrograd.trace.blocks import (
    BlockCopy,
    BlockInput,
    OtherCotangent,
    TracedBlock,
    instance_of,
    refuse_block,
    switched,
    switches_more,
)
from retrograd.trace.closure_tensors import ClosureTensors
from retrograd.trace.fakes import (
    Form,
    alias_of_fake,
    bytes_of,
    checks_known,
    fake_mode_of,
    fake_of,
    fake_of_form,
    forget_real_tensors,
    form_of,
    guard_count,
    hint_of,
    is_fake,
    know_values,
    laid_out_like,
    mode_among,
    new_fake_mode,
    places_of_symbols,
    read_anew,
    refuse_lost_checks,
    symbols_in,
    why_not_fakeable,
)
from retrograd.trace.first_run import Abandoned, FirstRun
from retrograd.trace.functional import (
    Changes,
    any_changed,
    functional_mode,
    is_traced,
    lost_layout,
    mutations_of,
    plain,
    storage_key,
    to_functional,
)
from retrograd.trace.graph_tracer import (
    JointTracer,
    Traced,
    decomposed,
    make_graph,
    python_forms,
    recorded,
    trace,
    tracer_here,
)
from retrograd.trace.input_guards import InputGuard, changed_sizes
from retrograd.trace.view_calls import calls_between
from retrograd.trace.watched import Watched, errors_uncaught
