"""The interface to torch's autograd engine: requests, compiler protocol, live graphs, nodes and hooks.

In: arguments of a backward, autograd nodes and hooks. Out: what the engine collected or ran, as plain values.
"""

from retrograd.engine.by_value import results_by_value
from retrograd.engine.collection import (
    GATEWAYS,
    CacheEntry,
    Collected,
    collect,
    installed_compiler,
    leave_engine_cache_to_stock,
    run_stock,
    stock_compiler_off,
)
from retrograd.engine.ddp_hooks import DDP, replace_cpp_hooks
from retrograd.engine.function_code import (
    PurityAnalysis,
    methods_of,
    why_backward_has_effects,
    writes_in_place,
)
from retrograd.engine.graph_task import (
    HookChanges,
    LateHook,
    RemovedHook,
    call_cpp_tensor_pre_hooks,
    counts_other_hooks,
    has_waiting_hooks,
    hooks_on,
    outside_of_graph_task,
    run_in_graph_task,
    watch_hooks,
    watching,
)
from retrograd.engine.leaf_order import (
    OrderedLeaves,
    beginning_of,
    is_mostly_compiled,
    last_turn,
    leads_to_parameter,
    steps_in_turns,
    take_turns,
)
from retrograd.engine.nodes import (
    States,
    backward_number,
    call_node,
    checkpoint_is_valid,
    entry_of,
    fitted,
    materializes_grads,
    modified_error,
    raise_modified,
    refuse_nan,
    refuse_reentry,
    request_to_release,
    states_of,
    versions_of,
    will_execute,
    will_run,
)
from retrograd.engine.protocol import EngineProtocol
from retrograd.engine.request import (
    EngineRequest,
    LiveBackward,
    accumulating_only_into,
    edge_of,
    forward_line,
    graph_below,
    idle_nodes,
    is_traced,
    is_transformed,
    leads_to,
    leaf_of,
    names_of_nodes,
    nodes_below,
    passes_through_function,
    read_ranks,
    streams_of,
    why_not_collectable,
)
from retrograd.engine.saved import (
    AsSaved,
    kept_by,
    put_in_place,
    saved_name,
    saved_tensors_of,
    saves_tensors,
)
from retrograd.engine.stock_aot import is_aot_node, tensors_on_context
from retrograd.engine.stock_entry import window
from retrograd.engine.under_way import (
    answer_queries,
    answering,
    is_small,
    node_under_way,
    note_reentry,
    plans_under_way,
)
from retrograd.engine.visible_order import hooks_may_see_order, order_is_visible
