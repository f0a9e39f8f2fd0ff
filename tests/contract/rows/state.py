# SPDX-License-Identifier: BSD-3-Clause
"""``amp.state_dict`` and the loss scaler."""

from __future__ import annotations

from contract.rows.row import Row, Section, tests

BUGS = "compat/test_fixed_bugs"
IDIOMS = "compat/test_idioms"
SCALER = "scaling/test_scaler"

s = Section("3")
FIELDS = tests(SCALER, "test_apex_fields")

ROWS: tuple[Row, ...] = (
    s.supported(
        "`amp.state_dict(destination=None)`",
        tests(IDIOMS, "test_destination", "test_the_usual_checkpoint"),
    ),
    s.supported(
        "its format, `loss_scaler0` and so on",
        tests("engine/test_resume", "test_file_in_the_format_of_apex")
        + tests(BUGS, "test_a25_keys_are_matched_by_number"),
    ),
    s.differs(
        "`amp.state_dict()` when amp is off or was never initialized",
        tests(IDIOMS, "test_state_before_initialize")
        + tests(BUGS, "test_a25_state_when_amp_is_off"),
        "Empty, instead of an AttributeError.",
    ),
    s.supported(
        "`amp.load_state_dict` with more or fewer entries",
        tests(BUGS, "test_a25_more_or_fewer_entries"),
        "Apex's two lines are printed.",
    ),
    s.differs(
        "the order of entries",
        tests(BUGS, "test_a25_keys_are_matched_by_number"),
        "Entries are matched by the number in their key, not by their order.",
    ),
    s.differs(
        "unknown keys",
        tests(
            BUGS,
            "test_a25_nothing_is_applied_when_it_raises",
            "test_a25_no_entry_is_applied_when_a_later_one_cannot_be_read",
        ),
        "RuntimeError before anything is applied, instead of afterwards.",
    ),
    s.differs(
        "loading into a static scale",
        tests(BUGS, "test_a25_static_scales_keep_their_value"),
        "The static scale stays what was asked for.",
    ),
    s.supported("`LossScaler(…)`", tests(SCALER, "test_apex_static", "test_apex_fields")),
    s.differs(
        "`scale_factor`",
        tests(BUGS, "test_a26_scale_factor") + tests(SCALER, "test_apex_scale_factor_counts"),
        "Counts; Apex ignored it.",
    ),
    s.supported("`loss_scale()`", tests(SCALER, "test_apex_static")),
    s.differs(
        "`update_scale()`",
        tests(SCALER, "test_apex_growth_comes_exactly_with_the_2000th_clean_update")
        + tests(SCALER, "TestApexScaler")
        + tests(BUGS, "test_a26_the_scale_has_a_floor"),
        "The same rule, but the scale does not fall below 2⁻²⁴.",
    ),
    s.differs(
        "`unscale(…)`",
        tests(
            SCALER,
            "test_apex_unscale_finds_overflow_and_still_writes_all",
            "test_apex_large_finite_gradients_are_no_overflow",
            "test_apex_static_scaler_does_not_look",
            "test_apex_overrides_of_the_scale",
        ),
        "Writes every output, also behind one with an overflow.",
    ),
    s.supported("`unscale_with_stashed(…)`", tests(SCALER, "test_apex_overrides_of_the_scale")),
    s.supported("`clear_overflow_state()`", tests(SCALER, "TestApexScaler")),
    s.supported("`dynamic`", FIELDS),
    s.supported(
        "`_loss_scale`", FIELDS + tests(IDIOMS, "test_scale_written_right_after_initialize")
    ),
    s.supported(
        "`_max_loss_scale`, `_min_loss_scale`", FIELDS + tests(IDIOMS, "test_range_is_read")
    ),
    s.supported("`_scale_seq_len`", FIELDS + tests(IDIOMS, "test_window_and_counter_are_written")),
    s.supported("`_unskipped`", FIELDS + tests(IDIOMS, "test_window_and_counter_are_written")),
    s.supported("`_has_overflow`", FIELDS + tests(BUGS, "test_a26_the_scale_has_a_floor")),
    s.supported("`_overflow_buf`", tests(SCALER, "test_apex_overflow_buffer_is_an_int_flag")),
    s.refused(
        "`has_fused_kernel` and the flags of warnings",
        FIELDS,
        "There is no compiled kernel that could be missing, and nothing to warn of.",
    ),
)
