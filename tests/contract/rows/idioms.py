# SPDX-License-Identifier: BSD-3-Clause
"""Lines that are found in many public scripts."""

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

lines = Section("A")

ROWS: tuple[Row, ...] = (
    lines.supported(
        "writing `loss_scalers[0]._loss_scale`",
        tests(IDIOMS, "test_scale_written_right_after_initialize"),
    ),
    lines.supported(
        "logging `loss_scalers[i].loss_scale()`",
        tests(IDIOMS, "test_two_networks_and_three_losses") + tests(SCRIPTS, "test_dcgan"),
    ),
    lines.supported(
        "BERT trainers' resume through `_lazy_init_maybe_master_weights`",
        tests(IDIOMS, "test_resume_of_language_model_scripts")
        + tests(SCRIPTS, "test_bert_goes_on_where_it_stopped"),
    ),
    lines.supported(
        "`_amp_lazy_init()`, then the lists of `_amp_stash`",
        tests(IDIOMS, "test_private_names_of_the_optimizer"),
    ),
    lines.supported(
        '`register_half_function(torch, "einsum")`',
        tests(REGISTRY, "test_registered_half_function_sees_replaced_weights"),
    ),
    lines.supported(
        "`master_weights=False` at O2, `cast_model_type=False`",
        tests(
            INIT,
            "test_no_masters_and_a_scale_from_a_flag",
            "test_cast_model_type_false_converts_nothing",
        ),
    ),
    lines.supported(
        "`amp_C` by hand, with a literal chunk size",
        tests(
            "multi_tensor/test_names",
            "test_gradients_are_copied_to_masters_with_a_literal_chunk_size",
            "test_clipping_as_frameworks_do_it",
            "test_flatten_and_unflatten_are_torchs",
        ),
    ),
    lines.supported(
        "clipping `amp.master_params(optimizer)`, inside or after the block",
        tests(IDIOMS, "test_clipping_the_masters"),
    ),
    lines.supported(
        "early FusedAdam in the flat FP16_Optimizer",
        tests("flat/test_with_fused_adam", "test_it_trains_as_the_formula_says"),
    ),
    lines.supported(
        "`handle._deactivate()` in tests",
        tests(
            IDIOMS, "test_handle_is_deactivated", "test_a_deactivated_handle_leaves_other_casts_on"
        )
        + tests(HANDLE, "test_casts_hold_until_deactivated"),
    ),
    lines.supported(
        "two networks, two optimizers, three losses",
        tests(IDIOMS, "test_two_networks_and_three_losses") + tests(SCRIPTS, "test_dcgan"),
    ),
    lines.supported(
        "capability probes",
        tests("alias/test_names", "test_capability_probes")
        + tests(
            "alias/test_install", "test_installing_imports_nothing_and_importing_changes_nothing"
        ),
        "`import amp_C` succeeds under the alias, and only there.",
    ),
)
