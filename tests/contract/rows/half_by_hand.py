# SPDX-License-Identifier: BSD-3-Clause
"""``apex.fp16_utils`` and the flat ``FP16_Optimizer``."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

MODULES = "fp16_utils/test_modules"
LISTS = "fp16_utils/test_param_lists"
OPT = "fp16_utils/test_optimizer"
STATE = "fp16_utils/test_state"
FLAT = "flat/test_flat"
FLAT_STATE = "flat/test_state"
BY_HAND = tests(LISTS, "test_training_by_hand_is_training_of_float32_masters")

functions = Section("5.1")
scalers = Section("5.2")
optimizer = Section("5.3")
flat = Section("6")

FUNCTIONS = (
    functions.supported("`tofp16`", tests(MODULES, "test_tofp16_casts_anything")),
    functions.supported(
        "`BN_convert_float`",
        tests(MODULES, "test_bn_convert_float_brings_back_only_batch_norms_with_weights"),
    ),
    functions.differs(
        "`network_to_half`",
        tests(
            MODULES,
            "test_network_to_half_is_a_sequential_that_runs_forward_and_backward",
            "test_a31_batch_norms_are_not_rounded_on_the_way",
        ),
        "The same modules, but batch norms keep their exact values.",
    ),
    functions.supported(
        "`convert_module`", tests(MODULES, "test_convert_module_leaves_children_and_integers")
    ),
    functions.supported(
        "`convert_network`",
        tests(
            MODULES,
            "test_batch_norms_with_weights_stay_float32",
            "test_convert_network_keeps_recurrent_layers_working",
        ),
    ),
    functions.differs(
        "`FP16Model`",
        tests(MODULES, "test_a31_fp16_model_leaves_integer_inputs"),
        "Leaves integer inputs alone, and takes keyword arguments.",
    ),
    functions.differs(
        "`prep_param_lists`",
        BY_HAND
        + tests(
            LISTS,
            "test_a_flat_master_has_a_gradient_of_zeros",
            "test_a_flat_master_needs_one_dtype",
        ),
        "The gradient of a flat master starts as zeros, not as whatever was in memory.",
    ),
    functions.supported(
        "`model_grads_to_master_grads`",
        BY_HAND + tests(LISTS, "test_a_missing_gradient_clears_the_masters"),
    ),
    functions.supported(
        "`master_params_to_model_params`",
        BY_HAND + tests(LISTS, "test_lists_that_do_not_belong_together"),
    ),
    functions.supported("`to_python_float`", tests(LISTS, "test_to_python_float")),
    functions.supported("`clip_grad_norm`", tests(LISTS, "test_clip_grad_norm_is_torch_s")),
)

SCALERS = (
    scalers.supported(
        "`LossScaler`",
        tests(
            "fp16_utils/test_scalers",
            "test_a_constant_scale_stays_and_sees_nothing",
            "test_gradients_and_losses_are_scaled",
        ),
    ),
    scalers.supported(
        "`DynamicLossScaler`",
        tests("fp16_utils/test_scalers", "test_the_dynamic_rule", "test_defaults"),
    ),
    scalers.differs(
        "`has_overflow`",
        tests("fp16_utils/test_scalers", "test_overflow_is_found_in_any_gradient"),
        "Looks at every element; Apex looked at a sum, which overflows by itself.",
    ),
)

OPTIMIZER = (
    optimizer.supported(
        "`FP16_Optimizer(…)`",
        tests(
            OPT,
            "test_signatures",
            "test_lists_run_parallel_to_the_groups",
            "test_steps_are_those_of_plain_torch",
            "test_parameters_are_told_if_asked",
        ),
    ),
    optimizer.supported(
        "`dynamic_loss_args`",
        tests(OPT, "test_the_dynamic_scale_grows_and_stops_at_its_limits"),
        "`scale_factor` counts as well.",
    ),
    optimizer.supported(
        "`zero_grad`", tests(OPT, "test_signatures", "test_a_backward_of_the_script_s_own")
    ),
    optimizer.supported(
        "`backward`", tests(OPT, "test_several_backwards_are_summed", "test_retain_graph")
    ),
    optimizer.differs(
        "`update_master_grads`",
        tests(
            OPT,
            "test_another_update_changes_nothing",
            "test_a30_two_backwards_with_float32_parameters",
            "test_a_parameter_left_out_of_the_second_backward_keeps_its_gradient",
            "test_an_overflow_is_not_forgotten_over_the_next_backward",
        ),
        "Calling it twice divides once; gradients of float32 parameters are summed.",
    ),
    optimizer.supported(
        "`step`", tests(OPT, "test_an_overflow_skips_the_step_and_halves_the_scale")
    ),
    optimizer.supported(
        "`step(closure)`",
        tests(
            OPT, "test_lbfgs_with_a_closure", "test_a_closure_runs_again_until_it_does_not_overflow"
        ),
    ),
    optimizer.supported(
        "`clip_master_grads`",
        tests(
            OPT,
            "test_clipping_takes_everything_the_optimizer_updates",
            "test_an_overflow_skips_the_step_and_halves_the_scale",
        ),
    ),
    optimizer.supported(
        "`inspect_master_grad_data`",
        tests(OPT, "test_an_overflow_skips_the_step_and_halves_the_scale"),
    ),
    optimizer.supported(
        "`loss_scale`",
        tests(OPT, "test_the_scaler_is_the_one_of_amp", "test_scale_set_by_hand_between_backwards"),
    ),
    optimizer.supported(
        "`state`, `param_groups`", tests(OPT, "test_lists_run_parallel_to_the_groups")
    ),
    optimizer.differs(
        "`state_dict`",
        tests(STATE, "test_every_field_survives", "test_resuming_is_going_on"),
        "The scaler is plain data, so that `torch.load` takes the file.",
    ),
    optimizer.differs(
        "`load_state_dict`",
        tests(
            STATE,
            "test_live_objects_of_apex_are_understood",
            "test_masters_of_other_parameters_are_refused",
        ),
        "Reads Apex's states too; what does not fit is refused before anything changes.",
    ),
    optimizer.supported(
        "pickling and copying: `RuntimeError`",
        tests(STATE, "test_copies_are_refused", "test_being_unpickled_is_refused"),
    ),
    optimizer.differs(
        "frozen or added parameters",
        tests(OPT, "test_late_parameters_get_masters"),
        "Get a master when they need one.",
    ),
    optimizer.differs(
        "bfloat16 and float64 parameters",
        tests(OPT, "test_steps_are_those_of_plain_torch")
        + tests(OPT, "test_float64_parameters_are_the_optimizer_s_own"),
        "Trained, the first with masters; Apex raised a TypeError.",
    ),
    optimizer.differs(
        "overflows without end",
        tests(OPT, "test_overflows_without_end_are_an_error"),
        "An error says why; Apex skipped for ever.",
    ),
    optimizer.refused(
        "an optimizer that `initialize` has",
        tests(STATE, "test_an_initialized_optimizer_is_refused"),
        "It would be scaled twice.",
    ),
)

FLAT_ROWS = (
    flat.supported(
        "`FP16_Optimizer(…)` of early 2019",
        tests(FLAT, "test_steps_are_those_of_separate_float32_parameters", "test_fields"),
    ),
    flat.differs(
        "`dynamic_loss_args`",
        tests(FLAT, "test_the_dynamic_rule"),
        "Taken; Apex raised a SystemError.",
    ),
    flat.supported("`zero_grad`", tests(FLAT, "test_zero_grad"), "To None by default."),
    flat.supported("`backward`", tests(FLAT, "test_signatures", "test_backwards_are_summed")),
    flat.supported(
        "`step`", tests(FLAT, "test_the_early_protocol_gets_scaled_norms_and_clips_per_group")
    ),
    flat.differs(
        "`step(closure)`",
        tests(FLAT, "test_a_closure_is_called_once_before_the_step"),
        "Called once before the step; Apex ignored it.",
    ),
    flat.supported(
        "`_update_scale`",
        tests(
            FLAT, "test_the_dynamic_rule", "test_overflows_skip_the_step_with_either_kind_of_scale"
        ),
        "With its printed lines.",
    ),
    flat.supported(
        "`cur_scale`, `cur_iter`, `last_overflow_iter`, `scale_factor`, `scale_window`",
        tests(FLAT, "test_fields"),
    ),
    flat.differs(
        "overflows without end",
        tests(FLAT, "test_overflows_without_end_are_an_error"),
        "An error names the parameters; Apex skipped for ever.",
    ),
    flat.refused(
        "an optimizer that has stepped already",
        tests(FLAT, "test_an_optimizer_with_state_is_refused"),
        "Its state belongs to single parameters, which a flat master is not.",
    ),
    flat.refused(
        "groups added later",
        tests(FLAT, "test_groups_added_later_are_refused"),
        "They would have no flat buffer.",
    ),
    flat.supported("`state`, `param_groups`", tests(FLAT, "test_fields")),
    flat.supported(
        "`state_dict`",
        tests(FLAT_STATE, "test_resuming_is_going_on", "test_the_tensors_are_not_copied"),
    ),
    flat.differs(
        "`load_state_dict`",
        tests(
            FLAT_STATE,
            "test_loading_binds_parameters_that_were_given_other_data",
            "test_states_that_do_not_fit_are_refused_as_a_whole",
            "test_numbers_that_the_next_step_would_fail_on_are_refused",
        ),
        "Rewrites the half weights too, which Apex left as they were.",
    ),
    flat.supported(
        "early `FusedAdam(…, max_grad_norm=…)`",
        tests(
            "optim/test_fused_early_adam", "test_a_flat_optimizer_drives_it", "test_forms_of_grads"
        )
        + tests("flat/test_with_fused_adam", "test_it_trains_as_the_formula_says"),
        "Clips per group, as its formula says.",
    ),
    flat.supported(
        "which FusedAdam is meant",
        tests(
            "optim/test_fused_early_adam",
            "test_old_keywords_select_it",
            "test_formulas_do_not_mix",
            "test_options_of_both_generations_are_refused",
        ),
        "The early formula, if an early argument or `step(grads=…)` is given.",
    ),
    flat.refused(
        "optimizers that look at whole parameters",
        tests(
            FLAT,
            "test_optimizers_that_look_at_whole_parameters_are_refused",
            "test_optimizers_that_scale_by_norms_of_parameters_are_refused",
            "test_so_are_those_that_wrap_or_extend_them",
        ),
        "In one flat buffer a norm per parameter would be another number.",
    ),
)

ROWS: tuple[Row, ...] = (*FUNCTIONS, *SCALERS, *OPTIMIZER, *FLAT_ROWS)
