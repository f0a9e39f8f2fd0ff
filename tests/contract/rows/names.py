# SPDX-License-Identifier: BSD-3-Clause
"""What can be imported, and from where."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

s = Section("0")
PRESENT = tests("alias/test_names", "test_documented_names_are_attributes")
REPLACED = tests("alias/test_names", "test_other_names_say_what_replaces_them")
FUSED = tests("optim/test_fused_formulas", "test_formula")

SUPPLIED: dict[str, dict[str, tuple[str, ...]]] = {
    "apex": {
        "amp": tests("alias/test_names", "test_attributes_after_a_plain_import"),
        "fp16_utils": tests("alias/test_names", "test_modules_know_their_names"),
        "optimizers": tests("alias/test_names", "test_modules_know_their_names"),
        "normalization": tests("alias/test_names", "test_modules_know_their_names"),
        "parallel": tests("alias/test_names", "test_no_torch_distributed_no_parallel"),
        "DeprecatedFeatureWarning": tests(
            "alias/test_names", "test_deprecations_have_apex_category"
        ),
        "deprecated_warning": tests("alias/test_names", "test_only_the_first_rank_warns"),
    },
    "apex.amp": {
        "init": tests("compat/test_handle", "test_casts_hold_until_deactivated"),
        "half_function": tests("casting/test_registry", "test_decorators"),
        "float_function": tests("casting/test_registry", "test_decorators"),
        "promote_function": tests("casting/test_registry", "test_decorators"),
        "bfloat16_function": tests("casting/test_registry", "test_decorators"),
        "register_half_function": tests("casting/test_registry", "test_registration"),
        "register_float_function": tests("casting/test_registry", "test_registration"),
        "register_promote_function": tests("casting/test_registry", "test_registration"),
        "register_bfloat16_function": tests("casting/test_registry", "test_registration"),
        "scale_loss": tests("compat/test_idioms", "test_signature_of_scale_loss"),
        "disable_casts": tests("casting/test_disable_casts", "test_disable_casts_inside_a_model"),
        "initialize": tests("engine/test_initialize", "test_signature_is_apex_s"),
        "state_dict": tests("compat/test_idioms", "test_destination"),
        "load_state_dict": tests("compat/test_fixed_bugs", "test_a25_keys_are_matched_by_number"),
        "master_params": tests("compat/test_idioms", "test_master_params_of_any_optimizer"),
    },
    "apex.amp.scaler": {"LossScaler": tests("compat/test_idioms", "test_scaler_module")},
    "apex.amp.handle": {
        "AmpHandle": tests("compat/test_handle", "test_casts_hold_until_deactivated"),
        "NoOpHandle": tests("compat/test_handle", "test_disabled_init_changes_nothing"),
    },
    "apex.amp.opt": {
        "OptimWrapper": tests("compat/test_handle", "test_wrapper_forwards_everything_else"),
    },
    "apex.fp16_utils": {
        "BN_convert_float": tests(
            "fp16_utils/test_modules",
            "test_bn_convert_float_brings_back_only_batch_norms_with_weights",
        ),
        "network_to_half": tests(
            "fp16_utils/test_modules",
            "test_network_to_half_is_a_sequential_that_runs_forward_and_backward",
        ),
        "prep_param_lists": tests(
            "fp16_utils/test_param_lists", "test_training_by_hand_is_training_of_float32_masters"
        ),
        "model_grads_to_master_grads": tests(
            "fp16_utils/test_param_lists", "test_training_by_hand_is_training_of_float32_masters"
        ),
        "master_params_to_model_params": tests(
            "fp16_utils/test_param_lists", "test_training_by_hand_is_training_of_float32_masters"
        ),
        "tofp16": tests("fp16_utils/test_modules", "test_tofp16_casts_anything"),
        "to_python_float": tests("fp16_utils/test_param_lists", "test_to_python_float"),
        "clip_grad_norm": tests("fp16_utils/test_param_lists", "test_clip_grad_norm_is_torch_s"),
        "convert_module": tests(
            "fp16_utils/test_modules", "test_convert_module_leaves_children_and_integers"
        ),
        "convert_network": tests(
            "fp16_utils/test_modules", "test_batch_norms_with_weights_stay_float32"
        ),
        "FP16Model": tests("fp16_utils/test_modules", "test_a31_fp16_model_leaves_integer_inputs"),
        "FP16_Optimizer": tests("fp16_utils/test_optimizer", "test_signatures"),
        "LossScaler": tests(
            "fp16_utils/test_scalers", "test_a_constant_scale_stays_and_sees_nothing"
        ),
        "DynamicLossScaler": tests("fp16_utils/test_scalers", "test_the_dynamic_rule"),
    },
    "apex.optimizers": {
        "FusedSGD": FUSED,
        "FusedAdam": FUSED,
        "FusedNovoGrad": FUSED,
        "FusedLAMB": FUSED,
        "FusedAdagrad": FUSED,
        "FusedMixedPrecisionLamb": FUSED,
        "FP16_Optimizer": tests("flat/test_flat", "test_signatures"),
    },
    "apex.contrib.optimizers": {
        "FusedAdam": tests("optim/test_fused_early_adam", "test_a_flat_optimizer_drives_it")
        + tests("alias/test_names", "test_contribs_adam_is_that_of_early_2019"),
        "FusedLAMB": FUSED,
    },
    "apex.multi_tensor_apply": {
        "multi_tensor_applier": tests(
            "multi_tensor/test_names", "test_the_applier_passes_everything_on"
        ),
        "MultiTensorApply": tests("multi_tensor/test_names", "test_the_appliers_state"),
    },
    "apex.parallel": {
        "ReduceOp": tests("distributed/test_ddp", "test_reduce_op_is_torchs"),
        "DistributedDataParallel": tests("distributed/test_ddp", "test_signature_is_that_of_apex"),
        "Reducer": tests("distributed/ddp_checks", "check_reducer_of_a_module"),
        "SyncBatchNorm": tests(
            "distributed/sync_batchnorm_checks", "check_training_equals_one_batch"
        ),
        "convert_syncbn_model": tests(
            "distributed/test_sync_batchnorm", "test_conversion_carries_everything_over"
        ),
        "create_syncbn_process_group": tests("distributed/ddp_checks", "check_syncbn_groups"),
    },
    "apex.parallel.LARC": {"LARC": tests("optim/test_larc", "test_signature_is_that_of_apex")},
    "apex_C": {
        "flatten": tests("multi_tensor/test_names", "test_flatten_and_unflatten_are_torchs"),
        "unflatten": tests("multi_tensor/test_names", "test_flatten_and_unflatten_are_torchs"),
    },
}
"""Module → name → what proves that the name does its work."""

REFUSED = {
    "apex.transformer": "Tensor and pipeline parallelism are torch's own today.",
    "apex.RNN": "It could be imported on no torch of the last years; torch.nn has the layers.",
    "apex.mlp": "A Sequential under torch.compile does it.",
    "apex.fused_dense": "Linear and GELU under torch.compile do it.",
    "syncbn": "SyncBatchNorm needs no compiled module; what probes for one takes its other path.",
    "fused_layer_norm_cuda": "FusedLayerNorm needs no compiled module; what probes for one takes "
    "its other path.",
    "mlp_cuda": "It served apex.mlp only.",
    "fused_dense_cuda": "It served apex.fused_dense only.",
}

ROWS: tuple[Row, ...] = (
    *(
        s.supported(f"`{module}.{name}`", (*PRESENT, *proof))
        for module, names in SUPPLIED.items()
        for name, proof in names.items()
    ),
    s.supported(
        "`apex.amp._amp_state`",
        tests("alias/test_names", "test_the_state_is_an_object_and_a_module"),
        "An object, and an importable module of the same name.",
    ),
    s.differs(
        "`apex.amp.frontend.Properties`",
        tests("compat/test_idioms", "test_levels_and_options_of_the_frontend"),
        "Shows the options of a frozen policy; there is no setter that checks overrides, since "
        "`initialize` checks them all before it changes anything.",
    ),
    s.differs(
        "`apex.amp.frontend.opt_levels`",
        tests("compat/test_idioms", "test_levels_and_options_of_the_frontend"),
        "Frozen policies with a `brief`, not objects that are called with the options to fill.",
    ),
    s.differs(
        "`apex.contrib.optimizers.FP16_Optimizer`",
        tests("alias/test_names", "test_contrib_has_the_optimizers_of_the_main_package")
        + tests("flat/test_flat", "test_steps_are_those_of_separate_float32_parameters"),
        "The flat one of `apex.optimizers`: the same numbers, but masters in "
        "`fp32_groups_flat` instead of `fp32_groups`.",
    ),
    s.refused(
        "`apex.contrib.optimizers.fused_sgd` with `step(grads=…)`",
        tests("alias/test_names", "test_contrib_has_the_optimizers_of_the_main_package"),
        "The name is today's FusedSGD; its predecessor, which took gradients as arguments, was "
        "driven by contrib's FP16_Optimizer only.",
    ),
    s.supported(
        "`apex.optimizers.FusedLARS`",
        FUSED + tests("optim/test_fused_formulas", "test_every_public_optimizer_has_a_row"),
        "From ROCm's Apex.",
    ),
    s.supported(
        "`apex.multi_tensor_apply.multi_tensor_applier_l2norm`",
        tests("multi_tensor/test_names", "test_the_appliers_state"),
        "From ROCm's Apex.",
    ),
    s.supported("`apex.parallel.multiproc`", tests("distributed/test_launch", "test_as_a_module")),
    s.supported(
        "`apex.parallel.distributed.flat_dist_call`",
        tests("distributed/ddp_checks", "check_flat_calls"),
    ),
    s.supported(
        "`apex.amp._initialize.applier`",
        tests("compat/test_idioms", "test_applier_maps_nested_batches"),
    ),
    s.supported(
        "`amp_C`",
        PRESENT + tests("multi_tensor/test_names", "test_clipping_as_frameworks_do_it"),
        "On every device, as plain functions.",
    ),
    s.supported("`fused_adam_cuda`", tests("multi_tensor/test_adam", "test_early_adam_on_lists")),
    *(s.refused(f"`{module}`", REPLACED, why) for module, why in REFUSED.items()),
    s.differs(
        "deprecation warnings",
        tests("alias/test_names", "test_initialize_is_not_deprecated"),
        "None: what Apex deprecated is supported here. The category exists for warning filters.",
    ),
    s.refused(
        "`cast_batchnorm=` and keywords of other forks",
        tests("engine/test_initialize", "test_unknown_keyword_of_another_fork"),
        "Python's own TypeError names the keyword.",
    ),
    s.supported(
        "`_amp_state.hard_override`",
        tests("compat/test_idioms", "test_hard_override", "test_state_before_initialize"),
    ),
    s.supported(
        "`_amp_state.allow_incoming_model_not_fp32`",
        tests("engine/test_errors", "test_half_models_on_request_through_the_state"),
    ),
    s.supported("`_amp_state.verbosity`", tests("compat/test_idioms", "test_verbosity_is_written")),
    s.supported(
        "`_amp_state.opt_properties`", tests("compat/test_idioms", "test_options_are_read")
    ),
    s.supported("`_amp_state.min_loss_scale`", tests("compat/test_idioms", "test_range_is_read")),
    s.supported("`_amp_state.max_loss_scale`", tests("compat/test_idioms", "test_range_is_read")),
    s.supported(
        "`_amp_state.loss_scalers`",
        tests("compat/test_idioms", "test_scale_written_right_after_initialize"),
    ),
    s.supported("`_amp_state.handle`", tests("compat/test_idioms", "test_handle_is_deactivated")),
)
