# SPDX-License-Identifier: BSD-3-Clause
"""``apex.parallel``, ``apex.normalization`` and the modules that preamp does not have."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

DDP = "distributed/ddp_checks"
DELAYED = "distributed/delayed_checks"
DDP_TESTS = "distributed/test_ddp"
BN = "distributed/sync_batchnorm_checks"
BN_TESTS = "distributed/test_sync_batchnorm"
LAUNCH = "distributed/test_launch"
LARC = "optim/test_larc"
NORM = "normalization/test_normalization"
REFUSED = tests(DDP_TESTS, "test_refused_arguments")
MEANS = tests(DDP, "check_gradients_are_means")
REPLACED = tests("alias/test_names", "test_other_names_say_what_replaces_them")

ddp = Section("9.1")
syncbn = Section("9.3")
larc = Section("9.4")
launch = Section("9.5")
norm = Section("9.6")
others = Section("9.7")

ROWS: tuple[Row, ...] = (
    ddp.differs(
        "`DistributedDataParallel(module)`",
        MEANS
        + tests(
            DDP, "check_it_is_torchs_class", "check_parameters_come_from_rank_0_and_buffers_do_not"
        ),
        "A subclass of torch's, with Apex's arguments: on every device and back end, for "
        "bfloat16 too, with `no_sync`, and it can be pickled.",
    ),
    ddp.supported("`message_size`", MEANS + tests(DDP, "check_bucket_sizes")),
    ddp.supported(
        "`delay_allreduce`",
        MEANS
        + tests(DDP, "check_delayed_reduction_needs_no_gradient_for_every_parameter")
        + tests(
            DELAYED, "check_every_backward_is_reduced", "check_the_moment_of_the_backward_counts"
        ),
    ),
    ddp.supported("`shared_param`: `ValueError`", REFUSED),
    ddp.differs(
        "`allreduce_trigger_params`",
        REFUSED + tests(DDP, "check_trigger_params_change_nothing"),
        "Accepted; it was a matter of timing, and torch's reducer finds its own.",
    ),
    ddp.differs(
        "`retain_allreduce_buffers`",
        MEANS + tests(DDP, "check_retained_buffers_are_torchs"),
        "Gradients are views of the buckets, but there is no list `allreduce_buffers`.",
    ),
    ddp.supported("`allreduce_always_fp32`", MEANS + tests(DDP, "check_half_sums_stay_in_range")),
    ddp.differs("`num_allreduce_streams`", MEANS + REFUSED, "Accepted; it was a matter of timing."),
    ddp.differs(
        "`allreduce_communicators`",
        REFUSED + tests(DDP, "check_communicators_reduce"),
        "The first group does all the work; their ranks are the same.",
    ),
    ddp.supported("`gradient_average`", tests(DDP, "check_sums_on_request")),
    ddp.supported(
        "`gradient_predivide_factor`", MEANS + tests(DDP, "check_half_sums_stay_in_range")
    ),
    ddp.supported("`gradient_average_split_factor`", MEANS, "Apex never read it either."),
    ddp.supported("`prof`", MEANS, "Ranges are in torch.profiler always."),
    ddp.supported(
        "`disable_allreduce`, `enable_allreduce`", tests(DDP, "check_allreduce_can_be_turned_off")
    ),
    ddp.supported(
        "without a process group: an error", tests(DDP_TESTS, "test_without_a_process_group")
    ),
    ddp.supported(
        "training at every level on two ranks",
        tests(
            "distributed/training_checks",
            "check_plain_training",
            "check_accumulation_with_a_reduction_each",
            "check_an_overflow_on_one_rank_skips_the_step_on_all",
        ),
    ),
    ddp.supported("`Reducer(module)`", tests(DDP, "check_reducer_of_a_module")),
    ddp.supported(
        "`Reducer(gradients)`",
        tests(DDP, "check_reducer_of_gradients", "check_reducer_refuses_other_things"),
    ),
    ddp.supported("`flat_dist_call`", tests(DDP, "check_flat_calls")),
    syncbn.supported(
        "`SyncBatchNorm(…)`",
        tests(BN_TESTS, "test_signatures_are_those_of_apex")
        + tests(BN, "check_training_equals_one_batch"),
    ),
    syncbn.supported("unequal batches", tests(BN, "check_training_equals_one_batch")),
    syncbn.supported(
        "`channel_last`",
        tests(BN, "check_channels_last_are_the_same_numbers")
        + tests(BN_TESTS, "test_alone_it_is_a_plain_batch_norm"),
    ),
    syncbn.differs(
        "`fuse_relu` and `forward(input, z)`",
        tests(BN, "check_relu_and_residual_follow_the_norm")
        + tests(BN_TESTS, "test_alone_with_residual_and_relu"),
        "In every layout, not for channels last alone.",
    ),
    syncbn.supported(
        "`momentum=None`",
        tests(BN, "check_options_of_a_plain_batch_norm")
        + tests(BN_TESTS, "test_alone_it_is_a_plain_batch_norm"),
    ),
    syncbn.supported(
        "one value per channel: `ValueError`",
        tests(BN_TESTS, "test_refused_inputs")
        + tests(BN, "check_one_value_on_each_rank_is_enough"),
    ),
    syncbn.supported(
        "evaluation",
        tests(BN, "check_evaluation_talks_to_nobody")
        + tests(BN_TESTS, "test_alone_it_is_a_plain_batch_norm"),
    ),
    syncbn.differs(
        "`convert_syncbn_model`",
        tests(BN_TESTS, "test_conversion_carries_everything_over"),
        "Carries `training` and `requires_grad` over as well.",
    ),
    syncbn.supported(
        "`create_syncbn_process_group`",
        tests(DDP, "check_syncbn_groups") + tests(BN_TESTS, "test_groups_among_four_ranks"),
        "Sizes that do not divide the world are a ValueError.",
    ),
    syncbn.supported(
        "levels treat it as a batch norm", tests(BN_TESTS, "test_levels_treat_it_as_a_batch_norm")
    ),
    larc.supported("`LARC(…)`", tests(LARC, "test_signature_is_that_of_apex", "test_formula")),
    larc.supported(
        "forwards to the optimizer",
        tests(LARC, "test_everything_else_is_the_optimizers", "test_copies_are_whole"),
    ),
    larc.supported(
        "zero norms: nothing changes", tests(LARC, "test_where_a_norm_is_zero_nothing_changes")
    ),
    larc.differs(
        "`weight_decay` during the step",
        tests(
            LARC,
            "test_what_the_optimizer_sees",
            "test_weight_decay_comes_back_when_the_step_raises",
        ),
        "Comes back also when the step raises.",
    ),
    larc.supported(
        "in `initialize` and `scale_loss`, alone and in lists",
        tests(LARC, "test_training_equals_larc_on_masters", "test_lists_of_larc_and_others"),
    ),
    larc.supported(
        "schedulers take `.optim`", tests(LARC, "test_schedulers_take_the_wrapped_optimizer")
    ),
    launch.differs(
        "`python -m apex.parallel.multiproc`",
        tests(
            LAUNCH,
            "test_each_rank_gets_its_number",
            "test_one_process_per_device",
            "test_a_failing_process_ends_the_others",
        ),
        "A process that fails ends the others, and its exit code is returned.",
    ),
    norm.supported(
        "`FusedLayerNorm`, `FusedRMSNorm`",
        tests(
            NORM,
            "test_layers_against_the_formula",
            "test_signatures_are_those_of_apex",
            "test_compiled_and_traced",
            "test_scripted",
        ),
    ),
    norm.supported(
        "`MixedFusedLayerNorm`, `MixedFusedRMSNorm`",
        tests(NORM, "test_layers_against_the_formula", "test_mixed_layers_have_weights"),
    ),
    norm.supported(
        "the six functions",
        tests(NORM, "test_functions", "test_functions_default_to_a_smaller_eps"),
    ),
    norm.supported(
        "`memory_efficient`", tests(NORM, "test_memory_efficient_keeps_the_output_only")
    ),
    norm.supported(
        "under autocast", tests(NORM, "test_autocast_casts_the_arguments"), "On every device."
    ),
    others.refused("`apex.mlp.MLP`", REPLACED, "Use a Sequential of Linear and an activation."),
    others.refused(
        "`apex.fused_dense`",
        REPLACED,
        "Use Linear and GELU, under torch.compile if they should be fused.",
    ),
    others.refused(
        "`apex.RNN`",
        REPLACED,
        "Use torch.nn.LSTM, GRU or RNN. It could be imported on no torch of the last years.",
    ),
    others.refused(
        "`apex.transformer`",
        REPLACED,
        "Use torch.distributed.tensor.parallel and scaled_dot_product_attention.",
    ),
    others.refused(
        "the rest of `apex.contrib`",
        REPLACED,
        "Each module's error names what does its work today.",
    ),
)
