# SPDX-License-Identifier: BSD-3-Clause
"""``amp.initialize``."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

INIT = "engine/test_initialize"
ERRORS = "engine/test_errors"
POLICY = "policy/test_resolve"

call = Section("1.1")
shapes = Section("1.2")
casts = Section("1.7")
inputs = Section("1.8")

CALL = (
    call.supported(
        "fourteen arguments, in order",
        tests(
            INIT, "test_signature_is_apex_s", "test_all_arguments_explicitly_with_their_defaults"
        ),
    ),
    call.differs(
        "`patch_torch_functions_type`",
        tests(INIT, "test_signature_is_apex_s") + tests(POLICY, "test_override"),
        "Keyword only: ROCm's fork put it in the middle, so that later positional arguments meant "
        "different things in the two forks.",
    ),
    call.differs(
        "`enabled=False`",
        tests(
            INIT,
            "test_disabled_passes_everything_through",
            "test_disabled_asks_nothing_of_its_arguments",
            "test_disabled_prints_nothing",
        )
        + tests("compat/test_fixed_bugs", "test_a25_state_when_amp_is_off"),
        "As in Apex nothing is checked, printed or changed; `amp.state_dict()` is empty instead of "
        "an error.",
    ),
    call.differs(
        "`torch.backends.cudnn.enabled = False`",
        tests(INIT, "test_cudnn_may_be_switched_off"),
        "Works: half precision does not depend on cuDNN.",
    ),
    call.supported(
        "unknown level: `RuntimeError` that tells O from 0",
        tests(POLICY, "test_unknown_level", "test_level_with_a_zero_for_the_letter")
        + tests(POLICY, "test_a_refusal_is_a_runtime_error"),
    ),
    call.supported(
        "an `FP16_Optimizer` is refused with `RuntimeError`",
        tests("compat/test_idioms", "test_an_fp16_optimizer_is_refused"),
    ),
    call.supported(
        "models in DataParallel or DistributedDataParallel are refused",
        tests(ERRORS, "test_model_in_data_parallel", "test_model_in_distributed_data_parallel")
        + tests("distributed/ddp_checks", "check_a01_initialize_refuses_wrapped_models"),
        "Apex's own class too, which Apex let pass.",
    ),
    call.differs(
        "models that are half already are refused",
        tests(ERRORS, "test_model_that_is_half", "test_model_with_a_half_buffer_in_a_list")
        + tests(ERRORS, "test_half_models_on_request_through_the_state"),
        "bfloat16 ones too, as in ROCm's fork; NVIDIA's Apex let these pass.",
    ),
    call.differs(
        "parameters on the CPU or any other device",
        tests("devices/test_on_every_device", "test_training_follows_float32"),
        "Accepted; Apex refused everything that was not on CUDA.",
    ),
    call.differs(
        "float64 parameters in an optimizer",
        tests("engine/test_step_semantics", "test_float64_parameters_in_the_optimizer"),
        "Trained as they are; Apex failed in the first backward.",
    ),
    call.differs(
        "a failure halfway",
        tests(ERRORS, "test_failed_initialize_rolls_back")
        + tests(ERRORS, "test_failed_amp_initialize_keeps_the_current_engine"),
        "Everything is as before the call; Apex took nothing back.",
    ),
    call.supported(
        "printed lines",
        tests(INIT, "test_printed_tokens"),
        "Options in columns of 26, as in ROCm's fork.",
    ),
    call.supported("`verbosity=0`", tests(INIT, "test_silence")),
    call.supported(
        "`verbosity=2` prints every cast",
        tests(
            "casting/test_reports",
            "test_every_cast_is_printed",
            "test_every_row_that_casts_is_printed",
        ),
    ),
    call.supported(
        "only the first rank prints",
        tests("casting/test_reports", "test_lines_come_from_the_first_rank_only")
        + tests("core/test_small_things", "test_in_a_job_rank_0_speaks"),
    ),
    call.supported(
        "the same optimizer again: `RuntimeError`",
        tests(ERRORS, "test_optimizer_of_another_engine", "test_optimizer_listed_twice"),
    ),
    call.supported(
        "the same half model again: `RuntimeError`", tests(ERRORS, "test_model_of_another_engine")
    ),
    call.differs(
        "another call with new objects",
        tests(INIT, "test_new_objects_get_an_engine_of_their_own")
        + tests("engine/test_two_engines", "test_interleaved")
        + tests(
            "engine/test_two_engines", "test_the_current_engine_is_the_latest_made_through_amp"
        ),
        "Earlier models and optimizers keep their settings and scales; `amp.state_dict()` and "
        "`_amp_state` mean the latest call.",
    ),
)

SHAPES = (
    *(
        shapes.supported(f"{models}, {optimizers} → {result}", tests(INIT, *functions))
        for models, optimizers, result, functions in (
            (
                "Module",
                "none",
                "module",
                ("TestShapes::test_model_alone", "TestShapes::test_model_and_none"),
            ),
            ("Module", "Optimizer", "pair", ("TestShapes::test_model_and_optimizer",)),
            ("Module", "list", "pair", ("TestShapes::test_model_and_list",)),
            ("list", "none", "list", ("TestShapes::test_list_alone",)),
            ("list", "Optimizer", "pair", ("TestShapes::test_list_and_optimizer",)),
            ("list", "list", "pair", ("TestShapes::test_list_and_list",)),
        )
    ),
    shapes.supported(
        "LARC for an optimizer", tests("optim/test_larc", "test_training_equals_larc_on_masters")
    ),
    shapes.supported(
        "models: tuple or anything else → `TypeError`",
        tests(ERRORS, "test_models_of_the_wrong_type"),
    ),
    shapes.supported(
        "optimizers: tuple, generator or anything else → `TypeError`",
        tests(ERRORS, "test_optimizers_of_the_wrong_type"),
    ),
    shapes.supported(
        "the very objects come back",
        tests(INIT, "test_parameters_keep_their_identity", "test_groups_keep_their_identity"),
    ),
    shapes.supported(
        "`num_losses=0`",
        tests("compat/test_idioms", "test_no_losses") + tests(INIT, "test_num_losses"),
    ),
)

CASTS = (
    casts.supported(
        "batch norms with weights stay float32 at O2 and O5",
        tests(INIT, "test_conversion_of_half_models", "test_every_batch_norm_is_kept"),
    ),
    casts.supported(
        "O1 and O4 convert nothing", tests(INIT, "test_function_levels_convert_nothing")
    ),
    casts.supported("O0 makes float64 float32", tests(INIT, "test_o0_makes_doubles_float32")),
    casts.supported("existing gradients", tests(INIT, "test_existing_gradients_are_converted")),
    casts.supported("recurrent layers", tests(INIT, "test_recurrent_model")),
    casts.supported(
        "optimizer state follows its parameters",
        tests(
            INIT, "test_optimizer_state_follows_the_dtypes", "test_optimizer_state_at_o3_is_half"
        ),
    ),
    casts.differs(
        "masters",
        tests(
            INIT,
            "test_masters_are_the_exact_values_from_before",
            "test_which_parameters_have_masters",
        ),
        "Made at once, from the weights before they were rounded to half; Apex widened the "
        "rounded ones, and not before the first backward.",
    ),
    casts.differs(
        "a float32 tensor made inside a half model",
        tests(INIT, "test_float32_inside"),
        "Layers of torch.nn take it; in Apex they failed.",
    ),
    casts.supported(
        "`model.state_dict()` is float32 and a copy",
        tests("engine/test_resume", "test_state_is_float32_and_does_not_alias"),
    ),
    casts.differs(
        "what `model.state_dict()` holds",
        tests("engine/test_resume", "test_state_holds_the_exact_masters"),
        "The masters' exact values; Apex wrote the rounded weights.",
    ),
    casts.differs(
        "extra state that is no tensor",
        tests("engine/test_resume", "test_extra_state"),
        "Left as it is; Apex failed on it.",
    ),
    casts.refused(
        "`model.float()` afterwards, with masters",
        tests(ERRORS, "test_model_made_float_after_initialize"),
        "The next step would write to weights of another dtype; `engine.close()` comes first.",
    ),
    casts.refused(
        "`model.load_state_dict(assign=True)` with masters",
        tests(ERRORS, "test_assigning_load"),
        "Masters belong to the parameters that it would replace.",
    ),
    casts.supported(
        "float32 state loads into a half model",
        tests(
            "engine/test_resume",
            "test_state_round_trip_changes_nothing",
            "test_half_values_load_too",
        ),
    ),
)

INPUT = tests(INIT, "test_inputs")
INPUTS = (
    inputs.differs(
        "Tensor",
        INPUT
        + tests("core/test_pytree", "test_floating_tensors_are_cast", "test_other_tensors_are_not"),
        "As in Apex, on every device, and without a warning about tensors that are not on CUDA.",
    ),
    inputs.supported("str, ndarray", INPUT),
    inputs.differs(
        "object with `to`",
        INPUT + tests("core/test_pytree", "test_object_with_to", "test_modules_are_not_touched"),
        "Called, as in Apex, but never for modules: Apex converted those in place.",
    ),
    inputs.differs(
        "Mapping",
        INPUT
        + tests(
            "core/test_pytree",
            "test_dict_subclass_with_attributes",
            "test_dict_keeps_keys_and_order",
        ),
        "Keeps its type and its keys; Apex made a plain dict, and mapped keys too.",
    ),
    inputs.differs(
        "other Iterable",
        INPUT
        + tests(
            "core/test_pytree",
            "test_sequences",
            "test_named_tuple",
            "test_generator_is_mapped_on_the_way",
        ),
        "Keeps its type; named tuples, generators and ranges failed in Apex.",
    ),
    inputs.differs(
        "anything else",
        INPUT
        + tests("core/test_pytree", "test_dataclasses", "test_other_values_come_back_as_they_are"),
        "Unchanged, but dataclasses are mapped field by field.",
    ),
    inputs.supported(
        "outputs: float32, or `cast_model_outputs`",
        tests(
            INIT,
            "test_outputs",
            "test_cast_model_outputs",
            "test_outputs_only",
            "test_no_cast_at_all",
        ),
    ),
    inputs.differs(
        "`model.forward` after `initialize`",
        tests("compat/test_fixed_bugs", "test_a18_copies_compute_with_their_own_weights"),
        "The class's own: casts are module hooks, which copies and pickles carry along.",
    ),
)

ROWS: tuple[Row, ...] = (*CALL, *SHAPES, *CASTS, *INPUTS)
