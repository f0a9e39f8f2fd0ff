# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_applier``, ``amp_C``, ``apex_C`` and ``fused_adam_cuda``."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

SCALE = "multi_tensor/test_scale"
NORMS = "multi_tensor/test_norms"
ADAM = "multi_tensor/test_adam"
LAMB = "multi_tensor/test_lamb"
OTHERS = "multi_tensor/test_adagrad_and_novograd"
SGD = "multi_tensor/test_sgd_and_lars"
CHECKS = "multi_tensor/test_checks"
NAMES = "multi_tensor/test_names"

s = Section("8")

ROWS: tuple[Row, ...] = (
    s.supported(
        "`multi_tensor_scale`",
        tests(SCALE, "test_scale", "test_scale_flags_one_bad_value_and_still_writes"),
    ),
    s.supported(
        "`multi_tensor_axpby`",
        tests(SCALE, "test_axpby", "test_axpby_flags_what_it_is_told_to_check"),
    ),
    s.supported(
        "`multi_tensor_l2norm`",
        tests(NORMS, "test_norms", "test_norms_per_tensor_are_empty_unless_asked_for"),
    ),
    s.supported(
        "`multi_tensor_l2norm_mp`", tests(NORMS, "test_only_the_mp_norm_looks_at_the_flag")
    ),
    s.supported("`multi_tensor_l2norm_scale`", tests(NORMS, "test_scaling_with_norms")),
    s.supported("`multi_tensor_unscale_l2norm`", tests(NORMS, "test_unscaled_norms")),
    s.supported(
        "`multi_tensor_sgd`",
        tests(
            SGD,
            "test_sgd",
            "test_sgd_refuses_every_other_signature",
            "test_a_set_flag_stops_the_step",
        ),
    ),
    s.differs(
        "`multi_tensor_adam`",
        tests(ADAM, "test_adam", "test_a15_half_moments_are_refused"),
        "Refuses half moments, which Apex's kernel read out of bounds.",
    ),
    s.differs(
        "`multi_tensor_adam_capturable`",
        tests(
            ADAM,
            "test_capturable_adam",
            "test_a_set_flag_stops_capturable_adam",
            "test_a16_capturable_adam_stores_moments_in_float32",
        ),
        "Stores moments in float32, where Apex rounded them to the parameter's dtype.",
    ),
    s.supported(
        "`multi_tensor_adam_capturable_master`", tests(ADAM, "test_capturable_adam_with_masters")
    ),
    s.supported("`multi_tensor_adagrad`", tests(OTHERS, "test_adagrad")),
    s.supported(
        "`multi_tensor_novograd`", tests(OTHERS, "test_novograd", "test_what_novograd_refuses")
    ),
    s.differs(
        "`multi_tensor_lamb`",
        tests(LAMB, "test_lamb", "test_a14_a_largest_norm_of_zero_clips_nothing"),
        "A largest norm of 0 means no clipping.",
    ),
    s.supported(
        "`multi_tensor_lamb_mp`",
        tests(
            LAMB, "test_lamb_on_scaled_gradients", "test_an_overflow_stops_lamb_on_scaled_gradients"
        ),
    ),
    s.supported(
        "`multi_tensor_lamb_stage1_cuda`",
        tests(LAMB, "test_stage_one", "test_the_two_stages_are_lamb"),
    ),
    s.supported(
        "`multi_tensor_lamb_stage2_cuda`",
        tests(LAMB, "test_stage_two", "test_the_two_stages_are_lamb"),
    ),
    s.supported(
        "`update_scale_hysteresis`",
        tests(
            "multi_tensor/test_hysteresis",
            "test_a_run_follows_the_rule",
            "test_the_scale_has_no_floor",
        ),
    ),
    s.supported(
        "`multi_tensor_lars`",
        tests(SGD, "test_lars", "test_lars_wants_one_norm_for_each_tensor"),
        "From ROCm's Apex.",
    ),
    s.supported("`apex_C.flatten`", tests(NAMES, "test_flatten_and_unflatten_are_torchs")),
    s.supported(
        "`apex_C.unflatten`",
        tests(
            NAMES,
            "test_flatten_and_unflatten_are_torchs",
            "test_unflattened_tensors_share_the_flat_memory",
        ),
    ),
    s.supported(
        "`fused_adam_cuda.adam`",
        tests(ADAM, "test_early_adam_on_one_parameter", "test_what_early_adam_refuses"),
    ),
    s.supported("`fused_adam_cuda.adam_mt`", tests(ADAM, "test_early_adam_on_lists")),
    s.supported(
        "`MultiTensorApply(chunk_size)`",
        tests(NAMES, "test_the_appliers_state", "test_the_applier_passes_everything_on"),
        "The chunk size changes nothing.",
    ),
    s.supported(
        "`MultiTensorApply.available = False`: `RuntimeError`",
        tests(NAMES, "test_an_applier_that_is_switched_off"),
    ),
    s.supported("the flag is set, never reset", tests(SCALE, "test_the_flag_is_never_reset")),
    s.supported(
        "lists that do not fit: `RuntimeError`",
        tests(CHECKS, "test_lists_that_do_not_fit", "test_flags_that_do_not_fit"),
        "Before anything is written.",
    ),
    s.supported("tensors are raw data", tests(NAMES, "test_parameters_of_a_graph_are_raw_data")),
)
