"""Hand-written scenarios: small plain PyTorch programs, each about one thing that eager does in its backward.

In: nothing; importing this package registers every scenario. Out: `TOPICS`, its modules.

Which scenarios show the known differences between eager and stock PyTorch, 2.13 to 2.15. AOT: with a
forward under `torch.compile`; CA: with stock compiled autograd around the backward.

    output not used in the loss (AOT)   output_outside_the_loss, output_outside_the_loss_and_adamw,
                                        hook_on_an_unused_output, expert_left_out_and_momentum,
                                        unused_input_of_a_compiled_function,
                                        multi_grad_hook_on_parameters_outside_the_loss,
                                        aot_every_subset_of_outputs, aot_unused_input_*,
                                        aot_no_gradient_arrives
    returned intermediates (AOT)        retain_grad_on_a_compiled_output,
                                        gradient_of_a_returned_intermediate, grad_cam,
                                        hook_on_a_returned_intermediate,
                                        aot_gradients_of_all_returned_intermediates,
                                        aot_retain_grad_on_all_outputs, aot_output_that_feeds_another_output
    Function options (AOT)              compiled_mark_non_differentiable,
                                        compiled_without_materialized_grads, compiled_function_*,
                                        func_grad_over_a_function, aot_transforms_inside,
                                        aot_function_with_two_outputs_in_every_use,
                                        kept_whole_*
    Function on the live path (CA)      function_returns_too_few_gradients, function_keeps_tensors_on_ctx
    undefined gradients (CA)            [compiled_]same_tensor_twice_with_one_none, undefined_meets_defined,
                                        none_gradient_to_a_hooked_leaf, compiled_none_to_a_hooked_leaf,
                                        [compiled_]normalize_with_p_zero
    when leaves are accumulated (AOT)   accumulate_hooks_*, accumulate_node_hooks_*, gradients_visible_*,
                                        optimizer_in_backward_* (…_after_a_compiled_forward),
                                        aot_post_accumulate_hooks, aot_what_other_hooks_can_see,
                                        aot_hooks_on_accumulate_nodes, aot_tied_weight,
                                        aot_two_interleaved_branches, aot_optimizer_in_the_backward
    hook order over branches (CA)       two_branches_every_hook_kind, and
                                        two_branches_{tensor,node,accumulate}_hooks; after compiled parts:
                                        compiled_branches_with_every_hook_kind, compiled_branches_that_meet
    unpack hooks (AOT, CA)              unpack_hooks_between_*, unpack_only_where_the_backward_goes,
                                        function_reads_saved_tensors_*,
                                        saved_tensor_hooks_around_a_compiled_forward,
                                        unpack_hooks_around_a_compiled_part
    module hooks added later (AOT)      module_hooks_added_after_the_first_call,
                                        aot_forward_hook_that_*, aot_full_backward_hook*,
                                        hook_set_later_*
    queue_callback (AOT, CA)            queued_callback_runs_at_the_end and others in callbacks,
                                        callback_after_a_compiled_forward
    double backward (AOT)               double_backward_of_a_compiled_function, compiled_gradient_penalty,
                                        forces_model, hessian_vector_product_of_a_compiled_function,
                                        aot_third_derivative, aot_hessian_row_by_row,
                                        aot_backward_inside_the_compiled_function
    graphs used again (AOT)             two_outputs_two_backwards, unbound_outputs_one_by_one,
                                        retained_after_ordinary_steps, aot_graph_kept_by_part,
                                        aot_independent_outputs_one_after_the_other
    changed in place (AOT, CA)          input_buffer_reused_before_backward, in_place_after_interpolate,
                                        constant_changed_between_forward_and_backward,
                                        input_changed_after_it_was_copied, aot_saved.py
    views and aliases (AOT)             detached_output_beside_a_view, detached_and_viewed_outputs,
                                        aliased_inputs_and_a_view_output, aot_aliased_inputs.py,
                                        aot_aliased_outputs.py
    dropout, recompute budget (AOT)     dropout_under_a_memory_budget, aot_dropout_in_a_*
    autocast (AOT)                      autocast_off_for_an_inner_part, autocast_around_backward,
                                        aot_autocast_*
    interpolation (CA)                  interpolate_{bilinear,nearest,bicubic,area},
                                        compiled_parts_around_an_interpolation
    sparse, grad_dtype, jagged (CA)     sparse_embedding, grad_of_another_dtype_by_choice,
                                        jagged_nested_tensor, compiled_sparse_embedding
    plain gradient of a subclass (AOT)  plain_gradient_for_a_subclass_output,
                                        aot_plain_cotangent_then_one_of_two_parts,
                                        aot_plain_output_with_a_cotangent_of_two_parts
    wrong hook results (CA)             hook_returns_another_shape, hook_returns_another_dtype
    engine state in hooks (CA)          graph_task_is_set_in_hooks, current_node_in_hooks,
                                        grad_mode_inside_hooks
    anomaly mode (AOT, CA)              anomaly_mode_finds_nan, anomaly_in_a_compiled_function,
                                        aot_anomaly_mode_names_the_node
    threads (CA)                        two_threads_training, four_threads_in_one_context
    freed as the backward goes (CA)     saved_activations_are_freed_on_the_way,
                                        packed_tensors_are_freed_on_the_way
    checkpoints of both kinds (CA)      checkpoints_of_both_kinds

The modules aot_* go through the rest of what a function compiled ahead can meet: mutation of data, sizes and
storages; aliases among inputs and outputs; structures; subclasses; random numbers; sizes; numbers; order;
uses of the graph; modes; modules; what was saved; Functions; cotangents; checkpoints.

The module outside_reports has what others reported. The module replayed_steps repeats steps of one
shape, for what records and replays them.

Not here, because they need several processes: data parallelism with the C++ reducer, FSDP2.
"""

from gradparity.corpus.scenarios import (
    accumulate_hooks,
    accumulation,
    accumulation_forms,
    accumulation_kinds,
    accumulation_moments,
    aliasing,
    aot_aliased_inputs,
    aot_aliased_outputs,
    aot_autocast_cache,
    aot_checkpoints,
    aot_cotangent_layouts,
    aot_cotangents,
    aot_draws,
    aot_functions,
    aot_graph_uses,
    aot_identity,
    aot_kinds_of_tensors,
    aot_layouts_in_place,
    aot_memory_beside,
    aot_metadata,
    aot_modes,
    aot_modules,
    aot_mutation,
    aot_numbers,
    aot_order,
    aot_random,
    aot_saved,
    aot_sizes,
    aot_structures,
    aot_subclasses,
    aot_sums,
    aot_viewed,
    aot_views_of_views,
    between_steps,
    branching,
    callbacks,
    changed_afterwards,
    checkpointing,
    compiled_functions,
    compiled_graphs,
    compiled_hooks,
    compiled_kinds,
    compiled_outputs,
    compiled_reuse,
    custom_functions,
    dynamic_steps,
    function_edges,
    function_forms,
    function_operators,
    function_results,
    functions_kept_whole,
    graph_lifetime,
    higher_order,
    hook_results,
    hooks_elsewhere,
    hooks_in_training,
    islands,
    kept_graphs,
    memory,
    mode_switches,
    modes,
    module_hooks,
    multi_grad_hooks,
    nested_backwards,
    node_hook_results,
    node_hooks,
    outside_reports,
    repeated_effects,
    replayed_steps,
    roots_inputs,
    saved_in_functions,
    saved_tensor_hooks,
    second_order,
    shapes,
    side_effects,
    subclass_kinds,
    subclass_meetings,
    subclasses,
    tensor_hooks,
    training_loops,
    training_models,
    transforms,
    views_inplace,
)

TOPICS = (
    branching,
    tensor_hooks,
    hook_results,
    node_hooks,
    node_hook_results,
    accumulate_hooks,
    module_hooks,
    multi_grad_hooks,
    saved_tensor_hooks,
    saved_in_functions,
    custom_functions,
    function_edges,
    function_forms,
    function_operators,
    function_results,
    functions_kept_whole,
    views_inplace,
    accumulation,
    accumulation_forms,
    accumulation_moments,
    aliasing,
    side_effects,
    roots_inputs,
    graph_lifetime,
    islands,
    checkpointing,
    kept_graphs,
    nested_backwards,
    higher_order,
    second_order,
    transforms,
    callbacks,
    mode_switches,
    modes,
    between_steps,
    shapes,
    subclass_kinds,
    subclass_meetings,
    subclasses,
    memory,
    compiled_outputs,
    compiled_hooks,
    compiled_functions,
    compiled_reuse,
    changed_afterwards,
    accumulation_kinds,
    compiled_graphs,
    compiled_kinds,
    dynamic_steps,
    hooks_in_training,
    hooks_elsewhere,
    training_loops,
    training_models,
    aot_mutation,
    aot_layouts_in_place,
    aot_memory_beside,
    aot_metadata,
    aot_aliased_inputs,
    aot_aliased_outputs,
    aot_autocast_cache,
    aot_structures,
    aot_sums,
    aot_viewed,
    aot_views_of_views,
    aot_identity,
    aot_kinds_of_tensors,
    aot_subclasses,
    aot_random,
    aot_sizes,
    aot_numbers,
    aot_order,
    aot_graph_uses,
    aot_modes,
    aot_modules,
    aot_saved,
    aot_draws,
    aot_functions,
    aot_cotangent_layouts,
    aot_cotangents,
    aot_checkpoints,
    repeated_effects,
    replayed_steps,
    outside_reports,
)
"""Every topic, one module each."""
