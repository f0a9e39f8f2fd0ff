# SPDX-License-Identifier: BSD-3-Clause
"""``apex.optimizers``."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

FORMULA = tests("optim/test_fused_formulas", "test_formula")
SIGNATURE = tests(
    "optim/test_fused_formulas", "test_arguments_may_be_passed_by_position_as_in_apex"
)
STATE = "optim/test_fused_state"
ERRORS = "optim/test_fused_errors"
TORCH = "optim/test_fused_against_torch"
SCALER = "optim/test_fused_grad_scaler"
AMP = "optim/test_fused_with_amp"
COMMON = FORMULA + SIGNATURE

each = Section("7")
shared = Section("7.0")

ROWS: tuple[Row, ...] = (
    each.differs(
        "`FusedSGD`",
        COMMON
        + tests(
            TORCH, "test_torch_computes_the_same", "test_decay_after_momentum_is_decoupled_decay"
        )
        + tests(STATE, "test_sgd_momentum_starts_per_parameter"),
        "Updates bfloat16 and float64 too, which Apex skipped in silence; momentum starts "
        "for each parameter by itself.",
    ),
    each.differs(
        "`FusedAdam`",
        COMMON
        + tests(TORCH, "test_torch_computes_the_same")
        + tests(STATE, "test_a_group_added_later")
        + tests(STATE, "test_float32_state_does_not_pass_through_half"),
        "Also updates groups added later, and float64; moments stay float32 through a checkpoint.",
    ),
    each.differs(
        "`FusedLAMB`",
        COMMON
        + tests(
            TORCH,
            "test_lamb_trust_ratio",
            "test_lamb_clips_all_groups_and_dtypes_together",
            "test_lamb_without_clipping",
        )
        + tests("optim/test_update_rules", "test_gradients_survive"),
        "`max_grad_norm=0` switches clipping off, where Apex made all gradients zero; "
        "gradients survive the step.",
    ),
    each.differs(
        "`FusedNovoGrad`",
        COMMON
        + tests(TORCH, "test_novograd_of_the_paper")
        + tests(
            STATE,
            "test_novograd_state_before_the_first_step",
            "test_novograd_reads_apex_checkpoints",
            "test_novograd_lets_the_number_of_gradients_change",
        ),
        "Norms are state of each parameter instead of lists in the group; Apex's "
        "checkpoints are read.",
    ),
    each.supported(
        "`FusedAdagrad`",
        COMMON
        + tests(TORCH, "test_torch_computes_the_same")
        + tests(ERRORS, "test_adagrad_wants_one_device_per_group"),
    ),
    each.differs(
        "`FusedMixedPrecisionLamb`",
        COMMON
        + tests(STATE, "test_lamb_takes_groups_of_mixed_dtype", "test_lamb_shows_its_copies")
        + tests(SCALER, "test_scaled_training_is_unscaled_training"),
        "Groups may mix dtypes, and the copies in full precision are saved.",
    ),
    each.differs(
        "`FusedLARS`",
        COMMON
        + tests(ERRORS, "test_lars_refuses_what_its_formula_lacks")
        + tests(TORCH, "test_lars_leaves_the_ratio_out_for_skipped_groups"),
        "Refuses `dampening` and `wd_after_momentum`, which ROCm's kernel ignored.",
    ),
    shared.supported("`amsgrad=True`: `RuntimeError`", tests(ERRORS, "test_amsgrad")),
    shared.supported(
        "`step(closure)`",
        tests(STATE, "test_closures_run_with_gradients"),
        "With gradients enabled, also under `no_grad`.",
    ),
    shared.supported(
        "sparse gradients: `RuntimeError`",
        tests(ERRORS, "test_sparse_gradients"),
        "In each of them, before anything changes.",
    ),
    shared.differs(
        "other dtypes",
        tests(ERRORS, "test_complex_parameters") + FORMULA,
        "float16, bfloat16, float32 and float64 in each of them; others are refused.",
    ),
    shared.differs(
        "rounding of half parameters",
        tests("optim/test_update_rules", "test_half_parameters_are_rounded_once"),
        "Once, after the whole update in float32; FusedSGD rounded the step first, and the sum "
        "again.",
    ),
    shared.differs(
        "`zero_grad(set_to_none=…)`",
        tests(STATE, "test_zero_grad"),
        "Accepted, and wins over `set_grad_none`.",
    ),
    shared.supported(
        "`group['step']`",
        tests(
            STATE,
            "test_state_and_groups_have_apex_keys",
            "test_the_step_counter_advances_for_every_group_with_parameters",
        ),
    ),
    shared.supported("checkpoints", tests(STATE, "test_resuming_continues_bitwise")),
    shared.supported(
        "`capturable=True` with torch's GradScaler",
        tests(
            SCALER,
            "test_scaled_training_is_unscaled_training",
            "test_an_overflow_changes_nothing",
            "test_only_device_counters_announce_the_protocol",
        ),
    ),
    shared.supported(
        "`torch.autocast` and GradScaler around any of them",
        tests(SCALER, "test_autocast_and_scaler_of_torch_around_any_of_them"),
    ),
    shared.supported("`step(grad_scaler=…)`", tests(SCALER, "test_a_scaler_given_to_step")),
    shared.differs(
        "`FusedAdam(master_weights=True)`",
        tests(ERRORS, "test_masters_need_counters_on_the_device")
        + tests(
            STATE,
            "test_copies_follow_what_is_written_to_the_parameters",
            "test_resuming_continues_bitwise",
        ),
        "bfloat16 parameters have masters too, and checkpoints hold them.",
    ),
    shared.differs(
        "`FusedAdam.step(grads=…)` and its other early arguments",
        tests(
            "optim/test_fused_early_adam",
            "test_without_grads_todays_formula_refuses",
            "test_formulas_do_not_mix",
            "test_forms_of_grads",
        ),
        "Select the formula of early 2019 in the first step; later Apex refused them.",
    ),
    shared.supported(
        "negative numbers: `ValueError`",
        tests(ERRORS, "test_negative_numbers", "test_nesterov_needs_momentum"),
        "In each of them, not in FusedSGD alone.",
    ),
    shared.supported(
        "`FusedNovoGrad(norm_type=…)`: `RuntimeError` for others than 0 and 2",
        tests(ERRORS, "test_norm_type"),
    ),
    shared.supported(
        "FusedSGD's `most_recent_scale`, `scale_set_by_backward`",
        tests(STATE, "test_sgd_divides_by_the_scale_it_is_told")
        + tests(AMP, "test_sgd_has_the_fields_of_apex_under_amp"),
    ),
    shared.supported(
        "through `amp.initialize`, with an overflow",
        tests(AMP, "test_training_with_an_overflow", "test_the_idiom_of_apex"),
    ),
)
