# SPDX-License-Identifier: BSD-3-Clause
"""Function casts: O1, ``amp.init`` and the user's own functions."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

HANDLE = "compat/test_handle"
REGISTRY = "casting/test_registry"
LISTS = tests("casting/test_apex_lists", "test_functions_have_the_rule_of_apex")
TABLE = "casting/test_op_table"
RESULTS = tests(
    TABLE,
    "test_result_has_the_dtype_of_the_rule",
    "test_float_functions_compute_in_float32_throughout",
    "test_promoted_functions_compute_in_float32_throughout",
)

lists = Section("4.2")
calls = Section("4.1")

LIST_ROWS = (
    *(
        lists.supported(name, LISTS + RESULTS, why)
        for name, why in (
            ("low precision, `torch.nn.functional`", ""),
            ("low precision, `torch`", "The bmm family on every device."),
            ("low precision, `torch.Tensor`", ""),
            ("fp32, `torch.nn.functional`", ""),
            ("fp32, `torch`", ""),
            ("fp32, `torch.Tensor`", "`x.cpu()` included."),
            ("promote, `torch`", ""),
            ("sequence promote, `torch`", ""),
        )
    ),
    lists.differs(
        "promote, `torch.Tensor`",
        LISTS + RESULTS,
        "One divided by a half tensor is in float32, as `reciprocal` is.",
    ),
    lists.supported("banned", LISTS + tests("casting/test_install", "test_banned_function")),
    lists.differs(
        "not patched",
        LISTS + tests(TABLE, "test_rows_are_unique_and_reasoned"),
        "Products that Apex did not know are cast too (einsum, attention, linalg), and a softmax "
        "is in float32 by every name.",
    ),
)

CALL_ROWS = (
    calls.supported(
        "`amp.init(…)`",
        tests(HANDLE, "test_casts_hold_until_deactivated", "test_refused", "test_banned_functions"),
    ),
    calls.supported(
        "`amp.init(enabled=False)`", tests(HANDLE, "test_disabled_init_changes_nothing")
    ),
    calls.supported(
        "`patch_type=torch.bfloat16`",
        tests(HANDLE, "test_casts_hold_until_deactivated"),
        "From ROCm's Apex.",
    ),
    calls.supported(
        "`functools.wraps`",
        tests("casting/test_install", "test_wrapped_functions_keep_their_names"),
    ),
    calls.differs(
        "tensors on the CPU",
        tests("devices/test_on_every_device", "test_training_follows_float32")
        + tests("devices/test_on_every_device", "test_tensors_on_other_devices_are_not_cast"),
        "Cast where the model is on the CPU; Apex cast CUDA tensors only.",
    ),
    calls.differs(
        "float64 tensors",
        tests(TABLE, "test_neither_disabled_casts_nor_float64_are_touched"),
        "Never cast; Apex made them half or float32.",
    ),
    calls.differs(
        "lists of tensors and other things",
        tests(REGISTRY, "test_tensors_beside_other_values_are_cast", "test_nested_lists_are_cast"),
        "The tensors in them are cast; Apex left the whole list. Dicts stay as they are in both.",
    ),
    calls.differs(
        "promotion of float64 or bfloat16 with float32",
        tests(TABLE, "test_zero_dim_float_promotes_half"),
        "torch's own; Apex raised NotImplementedError.",
    ),
    calls.supported(
        "0-dim float32 promotes half", tests(TABLE, "test_zero_dim_float_promotes_half")
    ),
    calls.supported(
        "`half += float32` binds a new tensor",
        tests(TABLE, "test_in_place_operators_with_float32_bind_a_new_tensor"),
    ),
    calls.supported(
        "in place in float32 on a half tensor: `NotImplementedError`",
        tests(
            TABLE,
            "test_in_place_float_functions_refuse_half",
            "test_a_target_given_by_keyword_is_refused_too",
        ),
    ),
    calls.supported(
        "in place otherwise: arguments follow the target",
        tests(
            TABLE,
            "test_in_place_functions_cast_to_the_target",
            "test_pointwise_in_place_functions_round_once",
        ),
        "Pointwise ones by torch's own rule, which rounds once.",
    ),
    calls.differs(
        "in-place guards inside `disable_casts`",
        tests(TABLE, "test_in_place_float_functions_refuse_half"),
        "Off together with the casts; Apex raised there as well.",
    ),
    calls.differs(
        "the weight cache",
        tests(
            "casting/test_regions",
            "test_weight_is_cast_once_in_a_forward",
            "test_weights_replaced_between_forwards_are_seen",
        ),
        "Lasts for one forward, so that weights changed in between are seen.",
    ),
    calls.supported(
        "recurrent layers, cells and packed sequences give half",
        tests(
            "casting/test_model_casts",
            "test_composite_layers_give_half",
            "test_packed_sequences_and_evaluation",
        ),
    ),
    calls.supported(
        "decorators",
        tests(
            REGISTRY,
            "test_decorators",
            "test_decorated_autograd_function",
            "test_decorated_c_function_is_not_cast_back_by_autocast",
        ),
    ),
    calls.supported(
        "`register_…`: `ValueError` if there is no such name",
        tests(REGISTRY, "test_missing_function_is_refused"),
    ),
    calls.refused(
        "`register_…` of what cannot be wrapped",
        tests(REGISTRY, "test_what_cannot_be_wrapped_is_refused"),
        "TypeError at once, where Apex failed in `initialize`.",
    ),
    calls.differs(
        "`register_…` after `initialize`",
        tests(REGISTRY, "test_registration"),
        "Takes effect at once, instead of with the next `initialize`.",
    ),
    calls.supported(
        "registered methods of a class", tests(REGISTRY, "test_registered_class_method")
    ),
    calls.supported(
        "handle: `is_active`, `_disable_casts`, `_deactivate`, `_save_func`, `verbose`",
        tests(
            HANDLE,
            "test_user_functions_are_cast",
            "test_saved_functions_come_back",
            "test_verbose_prints_casts",
            "test_a08_disabled_blocks_nest_and_survive_exceptions",
        ),
    ),
    calls.differs(
        "handle: `cache`, `has_cache`, `remove_cache`, `_clear_cache`",
        tests(HANDLE, "test_cache_is_the_users", "test_weights_changed_between_forwards_are_seen"),
        "There for scripts; casts do not use it, as a cache that outlives the forward goes stale.",
    ),
    calls.supported(
        "`handle.scale_loss(loss, optimizer)`",
        tests(
            HANDLE,
            "test_losses_are_scaled_and_gradients_unscaled",
            "test_overflow_skips_one_step_and_halves_the_scale",
            "test_backward_on_the_unscaled_loss_warns",
        ),
        "As in 2018; the last Apex only told of the new interface.",
    ),
    calls.refused(
        "`handle.scale_loss` of an optimizer that `initialize` has",
        tests(HANDLE, "test_refused"),
        "Use `amp.scale_loss`; two scales would be applied otherwise.",
    ),
    calls.supported(
        "`handle.wrap_optimizer(optimizer, num_loss)`",
        tests(
            HANDLE,
            "test_a20_wrapped_optimizer_unscales_gradients",
            "test_losses_have_scales_of_their_own_in_turn",
            "test_refused",
        ),
    ),
    calls.supported(
        "`NoOpHandle`",
        tests(HANDLE, "test_disabled_init_changes_nothing"),
    ),
    calls.differs(
        "how far casts reach",
        tests("casting/test_regions", "test_thread_casts_cover_functions_outside_models")
        + tests("casting/test_regions", "test_other_threads_have_no_thread_casts")
        + tests("engine/test_two_engines", "test_plain_models_are_not_touched_by_scope_model"),
        "The thread that called `initialize`, where in Apex it was the whole process; "
        'with `scope="model"` the model\'s forward.',
    ),
)

ROWS: tuple[Row, ...] = (*CALL_ROWS, *LIST_ROWS)
