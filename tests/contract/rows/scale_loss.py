# SPDX-License-Identifier: BSD-3-Clause
"""``amp.scale_loss`` and the optimizers of an engine."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

STEP = "engine/test_step_semantics"
GRAD = "engine/test_gradients"
CALLS = "engine/test_optimizer_calls"
BUGS = "compat/test_fixed_bugs"
IDIOMS = "compat/test_idioms"
ERRORS = "engine/test_errors"
FACES = tests(IDIOMS, "test_private_names_of_the_optimizer")
MATRIX = tests("engine/test_matrix", "test_training_equals_plain_torch")

call = Section("2.1")
levels = Section("2.2")
methods = Section("2.6")
losses = Section("2.7")

CALL = (
    call.supported("six arguments", tests(IDIOMS, "test_signature_of_scale_loss")),
    call.supported(
        "before `initialize`: `RuntimeError`",
        tests(ERRORS, "test_amp_scale_loss_before_initialize"),
    ),
    call.differs(
        "an optimizer that was not initialized",
        tests(ERRORS, "test_scale_loss_with_a_foreign_optimizer"),
        "RuntimeError that says what to do, instead of an AttributeError.",
    ),
    call.differs(
        "a loss that is no floating tensor",
        tests(ERRORS, "test_loss_that_is_none"),
        "TypeError that says what to do, instead of an AttributeError.",
    ),
    call.differs(
        "`loss_id` out of range",
        tests(ERRORS, "test_wrong_loss_id"),
        "IndexError, as in Apex; negative ones are refused too.",
    ),
    call.supported("a loss that is no scalar", tests(STEP, "test_a_loss_that_is_no_scalar")),
    call.supported(
        "several backwards in the block", tests(STEP, "test_several_backwards_in_one_body")
    ),
    call.supported(
        "`.grad` inside the block is this backward's alone",
        tests(GRAD, "test_master_gradient_is_not_there_inside_the_body")
        + tests(IDIOMS, "test_scaled_gradients_are_reduced_inside_the_block"),
    ),
    call.supported(
        "half gradients keep the scale after the block",
        tests(GRAD, "test_half_gradients_keep_the_scale"),
    ),
    call.refused(
        "changing those half gradients in place",
        tests(GRAD, "test_with_a_loss_scale_rewriting_a_half_gradient_is_refused")
        + tests(ERRORS, "test_half_gradient_changed_in_place"),
        "They still carry the scale. Apex ignored such changes, so that clipping "
        "`model.parameters()` clipped nothing.",
    ),
    call.differs(
        "tuples and other collections of optimizers",
        tests(BUGS, "test_a21_any_sequence_of_optimizers"),
        "Treated as the list they stand for.",
    ),
    call.differs(
        "an exception in the block",
        tests(BUGS, "test_a23_an_exception_in_the_body_loses_nothing"),
        "Gradients and scale are as before the block; Apex lost them.",
    ),
    call.refused(
        "a block inside another of the same optimizer",
        tests(STEP, "test_nested_blocks_of_one_optimizer_are_refused"),
        "Both would unscale the same gradients.",
    ),
    call.supported(
        "`master_params(optimizer)`",
        tests(IDIOMS, "test_master_params_of_any_optimizer")
        + tests(GRAD, "test_masters_are_parameters_like_others"),
        "A generator, for any optimizer.",
    ),
    call.supported(
        "one update of the scale per block, not per step",
        tests(STEP, "test_the_scale_grows_after_enough_clean_backwards"),
    ),
    call.differs(
        "`disable_casts`",
        tests(
            "casting/test_disable_casts",
            "test_disable_casts_inside_a_model",
            "test_disable_casts_without_an_engine_leaves_autocast_on",
        ),
        "Without O1 it does nothing, where Apex raised an AttributeError.",
    ),
    call.differs(
        "sparse gradients",
        tests(
            STEP,
            "test_sparse_gradients",
            "test_sparse_gradients_are_refused_where_there_are_masters",
        ),
        "Work where the optimizer updates the parameter itself; with a master they are refused.",
    ),
)

LEVELS = (
    levels.supported(
        "disabled", tests("engine/test_initialize", "test_disabled_passes_everything_through")
    ),
    levels.supported(
        "O0, O3 defaults",
        MATRIX + tests(IDIOMS, "test_without_a_scale_the_loss_is_widened_all_the_same"),
    ),
    levels.supported("O1", MATRIX),
    levels.supported("O2", MATRIX + tests(IDIOMS, "test_clipping_the_masters")),
    levels.supported(
        "static scale ≠ 1",
        tests("engine/test_matrix", "test_a_static_scale_applies_infinite_gradients"),
    ),
    levels.differs(
        "static 1.0 with master weights",
        tests(BUGS, "test_a02_accumulated_float32_gradients_count"),
        "O5's default. Accumulated gradients of float32 parameters count, which Apex lost.",
    ),
)

METHODS = (
    methods.supported(
        "`step`",
        tests("engine/test_initialize", "test_bound_methods_are_methods")
        + tests(CALLS, "test_arguments_and_result_of_step_pass_through"),
    ),
    methods.differs(
        "`step(closure)` at O2 or on overflow",
        tests(
            CALLS, "test_closures", "test_lbfgs", "test_an_overflow_inside_a_closure_runs_it_again"
        ),
        "Works: the closure runs again at the lower scale. Apex refused closures.",
    ),
    methods.differs(
        "`zero_grad`",
        tests(BUGS, "test_a05_zero_grad_takes_set_to_none"),
        "Takes `set_to_none`, and sets to None by default, as torch does.",
    ),
    methods.supported(
        "`add_param_group`",
        tests(STEP, "test_add_param_group", "test_add_param_group_refuses_a_known_parameter"),
    ),
    methods.supported(
        "`state_dict`, `load_state_dict`",
        tests("engine/test_model_objects", "test_optimizer_state_is_float32_except_at_o3")
        + tests(IDIOMS, "test_the_usual_checkpoint"),
    ),
    methods.supported("`_amp_stash`", FACES),
    methods.supported(
        "`_lazy_init_maybe_master_weights`, `_amp_lazy_init`",
        FACES + tests(IDIOMS, "test_resume_of_language_model_scripts"),
    ),
    methods.supported(
        "`_prepare_amp_backward`, `_post_amp_backward`",
        tests(IDIOMS, "test_backward_by_hand", "test_an_overflow_by_hand_skips_the_step"),
    ),
    methods.refused(
        "lists of gradients in `_amp_stash`",
        tests(IDIOMS, "test_stash_has_no_lists_of_gradients_set_aside"),
        "Gradients are set aside in another way, so that a list would be a wrong one.",
    ),
    methods.supported(
        "a skipped step prints Apex's line",
        tests(STEP, "test_a_skip_prints_apex_line"),
        "With the parameter that overflowed after it.",
    ),
    methods.supported(
        "a skipped step changes nothing", tests(STEP, "test_a_skipped_step_changes_nothing")
    ),
    methods.differs(
        "overflows without end",
        tests(
            STEP,
            "test_too_many_skips_in_a_row_name_the_parameter",
            "test_the_scale_falling_to_its_minimum_is_an_error",
        ),
        "After 50 skipped steps in a row, or at 2⁻²⁴ without a floor of one's own, `step` raises "
        "and names the parameters; Apex skipped for ever.",
    ),
    methods.supported(
        "only optimizers of the overflowing loss skip",
        tests(STEP, "test_only_the_optimizers_of_the_overflowing_loss_are_skipped"),
    ),
    methods.supported(
        "master gradients are gone after `step`",
        tests(STEP, "test_two_steps_on_one_backward_apply_it_once")
        + tests(IDIOMS, "test_only_the_model_is_zeroed"),
    ),
)

LOSSES = (
    losses.supported(
        "a plain block for each micro-batch",
        tests(STEP, "test_accumulation_with_and_without_delay"),
    ),
    losses.supported(
        "`delay_unscale=True`", tests(STEP, "test_accumulation_with_and_without_delay")
    ),
    losses.differs(
        "plain and delayed blocks mixed",
        tests(STEP, "test_mixing_delayed_and_plain_backwards_gives_three"),
        "Gives the right sum; Apex divided earlier gradients again.",
    ),
    losses.refused(
        "a step while gradients are left scaled",
        tests(STEP, "test_stepping_on_scaled_gradients_is_refused"),
        "Apex applied them, times the loss scale.",
    ),
    losses.differs(
        "`delay_overflow_check=True`",
        tests(BUGS, "test_a26_a_delayed_check_loses_no_overflow"),
        "Delays the check; Apex dropped it.",
    ),
    losses.supported(
        "`num_losses` and `loss_id`",
        tests(IDIOMS, "test_two_networks_and_three_losses") + MATRIX,
    ),
    losses.supported(
        "three ways to zero gradients",
        tests(
            BUGS,
            "test_a24_zeroing_the_model_drops_the_masters_gradients",
            "test_a05_zero_grad_takes_set_to_none",
        )
        + tests(IDIOMS, "test_only_the_model_is_zeroed"),
    ),
    losses.differs(
        "`FusedSGD(materialize_master_grads=False)`",
        tests("optim/test_fused_with_amp", "test_sgd_has_the_fields_of_apex_under_amp")
        + tests("optim/test_fused_state", "test_sgd_divides_by_the_scale_it_is_told"),
        "The same numbers. Master gradients exist when they are read, so clipping them "
        "works too, which in Apex did nothing.",
    ),
)

ROWS: tuple[Row, ...] = (*CALL, *LEVELS, *METHODS, *LOSSES)
