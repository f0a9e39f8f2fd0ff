# SPDX-License-Identifier: BSD-3-Clause
"""Known bugs and rough edges of Apex, by number, and what happens here instead."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

BUGS = "compat/test_fixed_bugs"
HANDLE = "compat/test_handle"
STEP = "engine/test_step_semantics"
STATE = "optim/test_fused_state"
REGIONS = "casting/test_regions"
DDP = "distributed/ddp_checks"

s = Section("10")

ROWS: tuple[Row, ...] = (
    s.refused(
        "A-1: Apex's own DDP could be passed to `initialize`",
        tests(DDP, "check_a01_initialize_refuses_wrapped_models"),
        "Refused, as torch's is.",
    ),
    s.differs(
        "A-2: accumulated float32 gradients lost with a static scale of 1",
        tests(BUGS, "test_a02_accumulated_float32_gradients_count")
        + tests(STEP, "test_accumulated_norm_gradients_survive_a_static_scale_of_one"),
        "They are summed.",
    ),
    s.differs(
        "A-3: weights loaded late did not reach the masters",
        tests(BUGS, "test_a03_loaded_weights_reach_the_masters"),
        "They do, whenever they are loaded.",
    ),
    s.differs(
        "A-4: masters missing from checkpoints",
        tests(BUGS, "test_a04_checkpoints_hold_the_masters")
        + tests("engine/test_resume", "test_resume_anywhere"),
        "The model's state holds their exact values, so that resuming is exact.",
    ),
    s.differs(
        "A-5: `zero_grad(set_to_none=…)` failed",
        tests(BUGS, "test_a05_zero_grad_takes_set_to_none") + tests(STATE, "test_zero_grad"),
        "Accepted everywhere.",
    ),
    s.differs(
        "A-6: O1's weight cache failed on current torch",
        tests(
            REGIONS,
            "test_weight_is_cast_once_in_a_forward",
            "test_gradients_flow_when_a_weight_was_first_used_without_grad",
        ),
        "The cache is autocast's, tried out once for whether it keeps gradients.",
    ),
    s.differs(
        "A-7: O1's weight cache went stale",
        tests(REGIONS, "test_weights_replaced_between_forwards_are_seen")
        + tests(HANDLE, "test_weights_changed_between_forwards_are_seen"),
        "It ends with each forward.",
    ),
    s.differs(
        "A-8: `disable_casts` did not nest, and an exception left casts off",
        tests(HANDLE, "test_a08_disabled_blocks_nest_and_survive_exceptions")
        + tests("casting/test_disable_casts", "test_disable_casts_nests_and_survives_exceptions"),
        "It nests, ends properly, and holds for its own thread.",
    ),
    s.differs(
        "A-9: O1's patches stayed on for later levels",
        tests(
            HANDLE,
            "test_a09_models_at_other_levels_are_not_touched",
            "test_a09_a_second_init_replaces_the_first",
        )
        + tests(
            "engine/test_lifetime",
            "test_initializing_again_at_a_level_without_casts_ends_the_casts",
        ),
        "Models of other levels are not touched by them.",
    ),
    s.differs(
        "A-10: `_deactivate` left functions wrapped",
        tests(HANDLE, "test_a10_deactivation_restores_functions_wrapped_twice")
        + tests("casting/test_install", "test_any_order_of_removal_restores_every_attribute"),
        "Everything comes back, in any order.",
    ),
    s.differs(
        "A-11: FusedNovoGrad failed in `initialize`",
        tests(STATE, "test_novograd_state_before_the_first_step")
        + tests("optim/test_fused_with_amp", "test_state_from_before_initialize"),
        "Works before and after its first step.",
    ),
    s.differs(
        "A-12: FusedAdam ignored groups added later",
        tests(STATE, "test_a_group_added_later"),
        "They are updated.",
    ),
    s.differs(
        "A-13: FusedSGD started everyone's momentum again",
        tests(STATE, "test_sgd_momentum_starts_per_parameter"),
        "Each parameter has a first step of its own.",
    ),
    s.differs(
        "A-14: dtypes skipped, zero clipping, gradients destroyed",
        tests("optim/test_fused_formulas", "test_formula")
        + tests("optim/test_fused_against_torch", "test_lamb_without_clipping")
        + tests("optim/test_update_rules", "test_gradients_survive")
        + tests("multi_tensor/test_lamb", "test_a14_a_largest_norm_of_zero_clips_nothing"),
        "All floating dtypes are updated, 0 switches clipping off, and gradients stay.",
    ),
    s.differs(
        "A-15: loaded moments cast to half",
        tests(STATE, "test_float32_state_does_not_pass_through_half")
        + tests("multi_tensor/test_adam", "test_a15_half_moments_are_refused"),
        "They stay float32.",
    ),
    s.differs(
        "A-16: capturable FusedAdam rounded moments and miscounted steps",
        tests("optim/test_fused_grad_scaler", "test_an_overflow_changes_nothing")
        + tests("multi_tensor/test_adam", "test_a16_capturable_adam_stores_moments_in_float32"),
        "Moments are stored in float32, and an overflow counts for no group.",
    ),
    s.differs(
        "A-17: warnings of learning-rate schedulers",
        tests(
            BUGS,
            "test_a17_schedulers_do_not_warn",
            "test_a17_scheduler_built_while_an_overflow_is_pending",
        ),
        "None, built before or after, the first step skipped or not.",
    ),
    s.differs(
        "A-18: copies computed with the original's weights",
        tests(BUGS, "test_a18_copies_compute_with_their_own_weights"),
        "Copies and files of a model have weights of their own.",
    ),
    s.differs(
        "A-19: named tuples, generators and dict subclasses",
        tests(BUGS, "test_a19_containers_keep_their_types"),
        "Keep their types; modules are not converted.",
    ),
    s.differs(
        "A-20: `OptimWrapper` unscaled parameters",
        tests(HANDLE, "test_a20_wrapped_optimizer_unscales_gradients"),
        "It unscales gradients, as in 2018.",
    ),
    s.differs(
        "A-21: a tuple of optimizers",
        tests(BUGS, "test_a21_any_sequence_of_optimizers"),
        "Is the list it stands for.",
    ),
    s.differs(
        "A-22: parameters unfrozen later got scaled gradients",
        tests(BUGS, "test_a22_parameters_unfrozen_later_are_trained_right"),
        "They get a master when they need one.",
    ),
    s.differs(
        "A-23: an exception in the block lost gradients",
        tests(BUGS, "test_a23_an_exception_in_the_body_loses_nothing"),
        "Everything is as before the block.",
    ),
    s.differs(
        "A-24: `model.zero_grad()` left master gradients",
        tests(BUGS, "test_a24_zeroing_the_model_drops_the_masters_gradients"),
        "They go with the model's.",
    ),
    s.differs(
        "A-25: `amp.state_dict` and `load_state_dict`",
        tests(
            BUGS,
            "test_a25_state_when_amp_is_off",
            "test_a25_keys_are_matched_by_number",
            "test_a25_static_scales_keep_their_value",
            "test_a25_nothing_is_applied_when_it_raises",
        ),
        "Empty where amp is off, matched by number, and nothing is applied in part.",
    ),
    s.differs(
        "A-26: limits and checks of the loss scaler",
        tests(
            BUGS,
            "test_a26_scale_factor",
            "test_a26_the_scale_has_a_floor",
            "test_a26_a_delayed_check_loses_no_overflow",
            "test_a26_no_gradient_is_left_unwritten_behind_a_bad_one",
            "test_a26_finite_gradients_with_a_huge_sum_are_no_overflow",
        ),
        "`scale_factor` counts, there is a smallest scale, and every element is looked at.",
    ),
    s.differs(
        "A-27: promotion refused mixes that torch promotes",
        tests("casting/test_op_table", "test_zero_dim_float_promotes_half"),
        "torch's own promotion applies.",
    ),
    s.differs(
        "A-28: functions and layers that were not cast",
        tests("casting/test_apex_lists", "test_functions_have_the_rule_of_apex")
        + tests("casting/test_model_casts", "test_composite_layers_give_half"),
        "The bmm family, einsum, attention, linalg and plain RNNs are cast on every device.",
    ),
    s.differs(
        "A-29: nested lists of parameters",
        tests("casting/test_registry", "test_nested_lists_are_cast"),
        "Are cast.",
    ),
    s.differs(
        "A-30: fp16_utils' FP16_Optimizer",
        tests(
            "fp16_utils/test_optimizer",
            "test_a30_two_backwards_with_float32_parameters",
            "test_a30_no_gradient_now_means_none_even_if_there_was_one",
        )
        + tests("fp16_utils/test_state", "test_every_field_survives"),
        "Backwards are summed, stale gradients are gone, and its state is plain data.",
    ),
    s.differs(
        "A-31: `network_to_half` and `FP16Model`",
        tests(
            "fp16_utils/test_modules",
            "test_a31_batch_norms_are_not_rounded_on_the_way",
            "test_a31_fp16_model_leaves_integer_inputs",
        ),
        "Batch norms keep their exact values, integers stay integers.",
    ),
    s.differs(
        "A-32: the flat FP16_Optimizer",
        tests(
            "flat/test_flat",
            "test_a32_parameters_without_a_gradient_do_not_move",
            "test_a32_no_gradient_at_all",
            "test_a32_empty_groups_and_empty_parameters",
            "test_a32_weights_written_later_count",
            "test_a32_models_cast_later_are_refused",
        ),
        "Takes missing gradients and empty groups, notices written weights, and refuses a "
        "model that was converted later. Clipping is per group, as its formula says.",
    ),
    s.differs(
        "A-33: SyncBatchNorm in evaluation",
        tests(
            "distributed/test_sync_batchnorm",
            "test_alone_it_is_a_plain_batch_norm",
            "test_alone_with_residual_and_relu",
        ),
        "Every layout and option works.",
    ),
    s.differs(
        "A-34: SyncBatchNorm with unequal batches",
        tests("distributed/sync_batchnorm_checks", "check_training_equals_one_batch"),
        "Equals one batch norm over all ranks' values, empty ranks included.",
    ),
    s.differs(
        "A-35: DDP's pickling, bfloat16 and devices",
        tests(DDP, "check_copies_through_pickle_reduce_as_told", "check_gradients_are_means"),
        "It is a subclass of torch's; all work.",
    ),
    s.differs(
        "A-36: FusedMixedPrecisionLamb with float32 groups",
        tests(STATE, "test_lamb_takes_groups_of_mixed_dtype"),
        "Groups may mix dtypes.",
    ),
    s.differs(
        "A-37: CUDA only",
        tests(
            "devices/test_on_every_device",
            "test_training_follows_float32",
            "test_an_overflow_skips_the_step",
        ),
        "Every device that torch has; the whole suite runs on the CPU.",
    ),
    s.differs(
        "A-38: ROCm's O4 and O5",
        tests("casting/test_reports", "test_recurrent_layer")
        + tests("casting/test_op_table", "test_in_place_functions_cast_to_the_target")
        + tests("optim/test_fused_with_amp", "test_training_with_an_overflow"),
        "Recurrent layers can be reported, in-place arguments follow the target, and every "
        "fused optimizer trains at every level.",
    ),
    s.differs(
        "A-39: deprecations on every rank",
        tests("alias/test_names", "test_only_the_first_rank_warns"),
        "On the first rank only.",
    ),
    s.differs(
        "A-40: state-dict hooks failed on extra state",
        tests("engine/test_resume", "test_extra_state", "test_state_of_a_part_is_exact"),
        "What is no tensor is left as it is.",
    ),
)
