# SPDX-License-Identifier: BSD-3-Clause
"""How people's scripts use Apex, in nineteen numbered forms."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

IDIOMS = "compat/test_idioms"
INIT = "engine/test_initialize"
STEP = "engine/test_step_semantics"
OBJECTS = "engine/test_model_objects"
CALLS = "engine/test_optimizer_calls"
BUGS = "compat/test_fixed_bugs"
HANDLE = "compat/test_handle"
REGISTRY = "casting/test_registry"
DDP = "distributed/ddp_checks"
SCRIPTS = "scripts/test_scripts"
OPT = "fp16_utils/test_optimizer"

forms = Section("forms")

ROWS: tuple[Row, ...] = (
    forms.supported(
        "1: what `initialize` returns is ignored",
        tests(IDIOMS, "test_frameworks_ignore_what_is_returned")
        + tests(INIT, "test_parameters_keep_their_identity", "test_groups_keep_their_identity"),
    ),
    forms.supported(
        "1: schedulers built before hold groups and the bound `step`",
        tests(
            CALLS,
            "test_a_step_bound_before_initialize_works_and_skips",
            "test_schedulers_see_the_optimizer",
        )
        + tests(BUGS, "test_a17_schedulers_do_not_warn"),
    ),
    forms.supported(
        "1: no models, a module and its part, frozen copies",
        tests(
            INIT,
            "TestShapes::test_no_models",
            "test_a_module_and_its_own_part",
            "test_frozen_copies_for_averaging",
        ),
    ),
    forms.supported(
        "2: arguments as text from argparse",
        tests(IDIOMS, "test_strings_from_argparse", "test_scale_of_one")
        + tests(SCRIPTS, "test_imagenet_flags"),
    ),
    forms.supported(
        "2: all arguments through `inspect.signature`",
        tests(INIT, "test_all_arguments_explicitly_with_their_defaults")
        + tests(IDIOMS, "test_arguments_from_a_dict"),
    ),
    forms.supported(
        "2: keywords of other forks: `TypeError`",
        tests(INIT, "test_unknown_keyword_of_another_fork"),
    ),
    forms.supported(
        "3: input gradients at O2 without masters, two blocks before a step",
        tests(IDIOMS, "test_adversarial_input_gradients")
        + tests(INIT, "test_no_masters_and_a_scale_from_a_flag"),
    ),
    forms.supported(
        "4: accumulation with clipping each time, or `delay_unscale`",
        tests(IDIOMS, "test_accumulation")
        + tests(STEP, "test_accumulation_with_and_without_delay"),
    ),
    forms.supported(
        "5: a norm that is not finite, and `step` all the same",
        tests(IDIOMS, "test_overflow_seen_by_the_script"),
    ),
    forms.supported("5: a bad loss is left out", tests(IDIOMS, "test_a_bad_loss_is_left_out")),
    forms.supported("6: only the model is zeroed", tests(IDIOMS, "test_only_the_model_is_zeroed")),
    forms.supported(
        "6: one gradient set to None", tests(IDIOMS, "test_gradient_of_one_parameter_is_dropped")
    ),
    forms.supported(
        "6: a step before any backward", tests(IDIOMS, "test_step_before_any_backward")
    ),
    forms.supported(
        "7: several backwards, double backward",
        tests(IDIOMS, "test_gradient_penalty", "test_gradient_penalty_has_the_exact_gradient"),
    ),
    forms.supported(
        "7: gradients reduced inside the block",
        tests(IDIOMS, "test_scaled_gradients_are_reduced_inside_the_block")
        + tests("distributed/training_checks", "check_reducing_by_hand"),
    ),
    forms.supported(
        "8: forward arguments of every kind",
        tests(IDIOMS, "test_forward_with_a_string_first")
        + tests(INIT, "test_inputs", "test_recurrent_model")
        + tests(SCRIPTS, "test_lstm"),
    ),
    forms.supported(
        "9: copies for averages",
        tests(IDIOMS, "test_exponential_average_through_data")
        + tests(OBJECTS, "test_copy_has_weights_of_its_own"),
    ),
    forms.supported(
        "9: `torch.save(model)`", tests(BUGS, "test_a18_copies_compute_with_their_own_weights")
    ),
    forms.supported(
        "9: wrapping in DDP or DataParallel afterwards",
        tests(OBJECTS, "test_engine_is_found_through_data_parallel")
        + tests(SCRIPTS, "test_two_processes")
        + tests(DDP, "check_the_engine_is_found_behind_it"),
    ),
    forms.supported(
        "9: activation checkpointing",
        tests(
            "casting/test_model_casts", "test_checkpointed_model_has_the_gradients_of_the_plain_one"
        ),
    ),
    forms.supported(
        "9: `convert_syncbn_model` before",
        tests("distributed/test_sync_batchnorm", "test_levels_treat_it_as_a_batch_norm")
        + tests(SCRIPTS, "test_imagenet_with_synchronised_batch_norm"),
    ),
    forms.supported(
        "9: evaluation without an optimizer", tests(INIT, "test_model_alone_for_evaluation")
    ),
    forms.supported(
        "10: the usual checkpoint",
        tests(IDIOMS, "test_the_usual_checkpoint")
        + tests(SCRIPTS, "test_imagenet_goes_on_where_it_stopped"),
    ),
    forms.supported(
        "10: the module as an object with state",
        tests(IDIOMS, "test_module_as_an_object_with_state")
        + tests("alias/test_names", "test_module_passed_as_an_object_with_state"),
    ),
    forms.differs(
        "10: `amp.state_dict()` without `initialize`",
        tests(IDIOMS, "test_state_before_initialize"),
        "Empty, instead of an AttributeError.",
    ),
    forms.supported(
        "10: loading before and after, and at another level",
        tests("engine/test_resume", "test_resume_at_another_level", "test_resume")
        + tests(BUGS, "test_a03_loaded_weights_reach_the_masters"),
    ),
    forms.supported(
        "11: BERT-style resume",
        tests(IDIOMS, "test_resume_of_language_model_scripts")
        + tests(SCRIPTS, "test_bert_goes_on_where_it_stopped"),
    ),
    forms.supported(
        "12: fields of the loss scaler",
        tests(
            IDIOMS,
            "test_scale_written_right_after_initialize",
            "test_window_and_counter_are_written",
        )
        + tests(
            "scaling/test_scaler", "test_apex_fields", "test_apex_overflow_buffer_is_an_int_flag"
        ),
    ),
    forms.supported("12: `opt_properties`", tests(IDIOMS, "test_options_are_read")),
    forms.supported(
        "12: `_amp_state.handle._deactivate()`", tests(IDIOMS, "test_handle_is_deactivated")
    ),
    forms.supported(
        '12: `hasattr(optimizer, "_amp_stash")`',
        tests(IDIOMS, "test_is_it_initialised", "test_private_names_of_the_optimizer"),
    ),
    forms.supported(
        "12: `apex.amp._initialize.applier`",
        tests(IDIOMS, "test_applier_maps_nested_batches")
        + tests("alias/test_names", "test_import_forms"),
    ),
    forms.supported(
        "12: `apex.amp._amp_state` as object and module",
        tests("alias/test_names", "test_the_state_is_an_object_and_a_module"),
    ),
    forms.supported(
        "13: registered functions, before and after `initialize`",
        tests(
            REGISTRY,
            "test_registration",
            "test_registered_class_method",
            "test_registration_overrides_the_table",
        )
        + tests(IDIOMS, "test_registered_float_function_after_initialize"),
    ),
    forms.supported(
        "13: decorated functions, methods, static methods, builtins",
        tests(
            REGISTRY,
            "test_decorators",
            "test_decorated_autograd_function",
            "test_decorated_c_function_is_not_cast_back_by_autocast",
        )
        + tests(IDIOMS, "test_float_function_as_decorator"),
    ),
    forms.supported(
        "14: a fresh layer outside the model is cast",
        tests("casting/test_regions", "test_thread_casts_cover_functions_outside_models")
        + tests(IDIOMS, "test_a_deactivated_handle_leaves_other_casts_on"),
    ),
    forms.differs(
        "14: casts of the model only",
        tests("engine/test_two_engines", "test_plain_models_are_not_touched_by_scope_model"),
        '`scope="model"`, on request.',
    ),
    forms.supported(
        "15: `enabled=False`",
        tests(
            INIT,
            "test_disabled_passes_everything_through",
            "test_disabled_state",
            "test_disabled_scale_loss_asks_nothing_of_its_optimizers",
        ),
    ),
    forms.supported(
        "15: `scale_loss` without `initialize`: the documented error",
        tests("engine/test_errors", "test_amp_scale_loss_before_initialize"),
    ),
    forms.supported(
        "16: `amp.init`, `handle.scale_loss`, `wrap_optimizer`",
        tests(
            HANDLE,
            "test_losses_are_scaled_and_gradients_unscaled",
            "test_a20_wrapped_optimizer_unscales_gradients",
            "test_disabled_init_changes_nothing",
        ),
    ),
    forms.supported(
        "16: `FP16_Optimizer` in every step of its protocol",
        tests(
            OPT,
            "test_signatures",
            "test_several_backwards_are_summed",
            "test_clipping_takes_everything_the_optimizer_updates",
            "test_lists_run_parallel_to_the_groups",
        ),
    ),
    forms.supported(
        "16: several optimizers in one `scale_loss`",
        tests(STEP, "test_any_collection_of_optimizers"),
    ),
    forms.supported(
        "17: old DDP arguments",
        tests(
            DDP,
            "check_gradients_are_means",
            "check_bucket_sizes",
            "check_delayed_reduction_needs_no_gradient_for_every_parameter",
        ),
    ),
    forms.supported("17: `flat_dist_call`", tests(DDP, "check_flat_calls")),
    forms.supported(
        "18: LARC in `initialize`",
        tests(
            "optim/test_larc",
            "test_training_equals_larc_on_masters",
            "test_lists_of_larc_and_others",
        ),
    ),
    forms.supported(
        "18: an optimizer whose `step` takes other arguments",
        tests(CALLS, "test_arguments_and_result_of_step_pass_through"),
    ),
    forms.supported(
        "18: a tuple of optimizers", tests(BUGS, "test_a21_any_sequence_of_optimizers")
    ),
    forms.supported(
        "18: a mock of an optimizer",
        tests(CALLS, "test_a_mock_of_an_optimizer")
        + tests(INIT, "test_disabled_asks_nothing_of_its_arguments"),
    ),
    forms.supported(
        "19: float64 and integer buffers",
        tests(INIT, "test_conversion_of_half_models", "test_function_levels_convert_nothing"),
    ),
    forms.supported(
        "19: parameters and tensors on the CPU",
        tests(
            "devices/test_on_every_device",
            "test_training_follows_float32",
            "test_tensors_on_other_devices_are_not_cast",
        ),
    ),
    forms.supported(
        "19: functions that half cannot run",
        tests("casting/test_op_table", "test_float_functions_compute_in_float32_throughout"),
    ),
)
