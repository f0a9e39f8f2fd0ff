# SPDX-License-Identifier: BSD-3-Clause
"""What the opt levels set, and how arguments of ``amp.initialize`` override them."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

INIT = "engine/test_initialize"
POLICY = "policy/test_resolve"

levels = Section("1.4")
overrides = Section("1.5")

ROW = tests(POLICY, "test_level_row")
LEVELS = (
    *(
        levels.supported(f"`{name}`", ROW)
        for name in (
            "enabled",
            "opt_level",
            "cast_model_type",
            "patch_torch_functions",
            "patch_torch_functions_type",
            "keep_batchnorm_fp32",
            "loss_scale",
        )
    ),
    levels.differs(
        "`master_weights`", ROW, "False at O1 and O4, where Apex said None: there are no masters."
    ),
    levels.differs(
        "`patch_torch_functions` at O5",
        ROW,
        "False, where ROCm's fork said None: nothing is patched.",
    ),
    levels.supported("O4 and O5", ROW, "From ROCm's Apex: O1 and O2 in bfloat16."),
    levels.supported(
        "attribute or `options[name]`", tests("compat/test_idioms", "test_options_are_read")
    ),
)

REFUSED = tests(POLICY, "test_contradiction_is_refused", "test_hard_override_warns_and_goes_on")
OVERRIDES = (
    overrides.supported(
        "`cast_model_type`",
        REFUSED
        + tests(POLICY, "test_override")
        + tests(INIT, "test_cast_model_type_false_converts_nothing"),
        "`False` casts nothing, at every level.",
    ),
    overrides.supported(
        "`patch_torch_functions`",
        REFUSED + tests(POLICY, "test_functions_left_alone_keep_the_level_s_scaling"),
    ),
    overrides.supported("`patch_torch_functions_type`", REFUSED),
    overrides.differs(
        "`keep_batchnorm_fp32`",
        REFUSED + tests(POLICY, "test_bad_value") + tests(INIT, "test_keep_batchnorm_false"),
        "What is neither a bool nor the text of one is a TypeError instead of an AssertionError.",
    ),
    overrides.supported(
        "`master_weights`",
        REFUSED
        + tests(
            INIT, "test_master_weights_can_be_asked_for", "test_no_masters_and_a_scale_from_a_flag"
        ),
        'The texts "True" and "False" are understood too.',
    ),
    overrides.differs(
        "`loss_scale`",
        tests(POLICY, "test_override", "test_bad_value")
        + tests("compat/test_idioms", "test_scale_of_one"),
        "0, negative and infinite scales are refused at once, instead of dividing by zero later.",
    ),
    overrides.supported(
        "`max_loss_scale`",
        tests(POLICY, "test_bad_value", "test_override"),
        "None with a dynamic scale is a TypeError, as in Apex, but says why.",
    ),
    overrides.differs(
        "`min_loss_scale`",
        tests(POLICY, "test_override")
        + tests("engine/test_step_semantics", "test_the_scale_falling_to_its_minimum_is_an_error"),
        "Falsy means no floor of one's own, but at 2⁻²⁴ an error names the parameters, where "
        "Apex's scale went on to zero.",
    ),
    overrides.supported("`None` changes nothing", tests(POLICY, "test_none_changes_nothing")),
)

ROWS: tuple[Row, ...] = (*LEVELS, *OVERRIDES)
