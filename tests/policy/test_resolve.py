# SPDX-License-Identifier: BSD-3-Clause
"""Opt levels and their overrides: defaults, what may be changed, what is refused and how."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cases.levels import LEVELS
from kit.refusals import assert_approved, assert_refused, refused
from preamp.core.errors import PreampPolicyError
from preamp.policy import OPT_LEVELS, Policy, describe_overrides, level_defaults, resolve

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FUNCTION_LEVELS = ("O1", "O4")
OTHER_LEVELS = ("O0", "O2", "O3", "O5")

NAMES = ("cast_model_type", "patch_torch_functions", "patch_torch_functions_type")
NAMES += ("keep_batchnorm_fp32", "master_weights", "loss_scale")
DEFAULTS: dict[str, dict[str, Any]] = {
    level: dict(zip(NAMES, values, strict=True))
    for level, values in {
        "O0": (F32, False, None, None, False, 1.0),
        "O1": (None, True, F16, None, False, "dynamic"),
        "O2": (F16, False, None, True, True, "dynamic"),
        "O3": (F16, False, None, False, False, 1.0),
        "O4": (None, True, BF16, None, False, 1.0),
        "O5": (BF16, False, None, True, True, 1.0),
    }.items()
}


# -- defaults --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", DEFAULTS)
def test_level_row(level: str) -> None:
    policy = resolve(level, {})
    assert {name: getattr(policy, name) for name in DEFAULTS[level]} == DEFAULTS[level]
    assert policy.enabled is True
    assert policy.opt_level == level
    assert policy.brief.startswith(f"{level}:  ")
    assert policy == level_defaults(level)


def test_every_level_has_a_row_here() -> None:
    assert list(OPT_LEVELS) == list(DEFAULTS)


def test_common_defaults() -> None:
    policy = resolve("O1", {})
    assert policy.min_loss_scale is None
    assert policy.max_loss_scale == 2.0**24
    assert policy.cast_model_outputs is None
    assert policy.scope == "model"
    assert policy.max_consecutive_skips == 50


@pytest.mark.parametrize("level", DEFAULTS)
def test_none_changes_nothing(level: str) -> None:
    names = (*DEFAULTS[level], "cast_model_outputs", "min_loss_scale", "scope")
    assert resolve(level, dict.fromkeys(names)) == OPT_LEVELS[level]


@pytest.mark.parametrize(("level", "half"), [(row.name, row.half) for row in LEVELS])
def test_half_dtype(level: str, half: torch.dtype | None) -> None:
    assert OPT_LEVELS[level].half_dtype is half


def test_policies_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OPT_LEVELS["O1"].loss_scale = 2.0  # pyright: ignore


def test_the_table_is_read_only() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        OPT_LEVELS["O9"] = OPT_LEVELS["O1"]  # pyright: ignore


def test_replace_leaves_the_original_alone() -> None:
    assert OPT_LEVELS["O2"].replace(loss_scale=8.0).loss_scale == 8.0
    assert OPT_LEVELS["O2"].loss_scale == "dynamic"


# -- allowed overrides -----------------------------------------------------------------------

ALLOWED: list[tuple[str, str, Any, Any]] = [
    # level, argument, given, resolved
    ("O0", "cast_model_type", F16, F16),
    ("O2", "cast_model_type", BF16, BF16),
    ("O3", "cast_model_type", F32, F32),
    ("O3", "cast_model_type", F64, F64),
    ("O5", "cast_model_type", F16, F16),
    *((level, "cast_model_type", False, None) for level in DEFAULTS),
    *((level, "cast_model_type", F32, None) for level in FUNCTION_LEVELS),
    *((level, "patch_torch_functions", False, False) for level in DEFAULTS),
    *((level, "patch_torch_functions", True, True) for level in FUNCTION_LEVELS),
    ("O1", "patch_torch_functions", "False", False),
    ("O1", "patch_torch_functions_type", F16, F16),
    ("O4", "patch_torch_functions_type", BF16, BF16),
    *((level, "keep_batchnorm_fp32", True, True) for level in OTHER_LEVELS),
    *((level, "keep_batchnorm_fp32", False, False) for level in OTHER_LEVELS),
    ("O2", "keep_batchnorm_fp32", "False", False),
    ("O3", "keep_batchnorm_fp32", "True", True),
    *((level, "master_weights", True, True) for level in OTHER_LEVELS),
    *((level, "master_weights", False, False) for level in OTHER_LEVELS),
    ("O2", "master_weights", "False", False),
    *((level, "loss_scale", "dynamic", "dynamic") for level in DEFAULTS),
    ("O1", "loss_scale", "128.0", 128.0),
    ("O2", "loss_scale", 1, 1.0),
    ("O2", "loss_scale", True, 1.0),
    ("O0", "loss_scale", 0.5, 0.5),
    ("O1", "min_loss_scale", 0, None),
    ("O1", "min_loss_scale", False, None),
    ("O1", "min_loss_scale", "2.0", 2.0),
    ("O1", "min_loss_scale", 128.0, 128.0),
    ("O1", "max_loss_scale", 2.0**10, 2.0**10),
    ("O1", "max_loss_scale", "1024", 1024.0),
    ("O3", "max_loss_scale", None, None),
    ("O1", "cast_model_outputs", F16, F16),
    ("O2", "cast_model_outputs", F64, F64),
    ("O1", "scope", "thread", "thread"),
    ("O1", "max_consecutive_skips", None, None),
    ("O1", "max_consecutive_skips", 1, 1),
]


@pytest.mark.parametrize(("level", "name", "given", "expected"), ALLOWED)
def test_override(level: str, name: str, given: Any, expected: Any) -> None:
    value = getattr(resolve(level, {name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("level", FUNCTION_LEVELS)
def test_functions_left_alone_keep_the_level_s_scaling(level: str) -> None:
    policy = resolve(level, {"patch_torch_functions": False})
    assert policy.patch_torch_functions_type is None
    assert policy.half_dtype is None
    assert policy.loss_scale == DEFAULTS[level]["loss_scale"]


def test_only_what_was_overridden_differs() -> None:
    policy = resolve("O2", {"loss_scale": "128.0", "master_weights": False})
    assert describe_overrides(policy) == [
        ("master_weights", True, False),
        ("loss_scale", "dynamic", 128.0),
    ]


# -- refusals --------------------------------------------------------------------------------

CONTRADICTING: dict[str, list[tuple[str, Any]]] = {  # levels and what is given
    "cast_model_type": [(level, dtype) for level in FUNCTION_LEVELS for dtype in (F16, BF16, F64)],
    "patch_torch_functions": [(level, given) for level in OTHER_LEVELS for given in (True, "True")],
    "patch_torch_functions_type": [
        ("O0", F16),
        ("O1", BF16),
        ("O2", F16),
        ("O3", F16),
        ("O4", F16),
        ("O5", BF16),
    ],
    "keep_batchnorm_fp32": [
        (level, given) for level in FUNCTION_LEVELS for given in (True, False, "False")
    ],
    "master_weights": [(level, given) for level in FUNCTION_LEVELS for given in (True, False)],
}


@pytest.mark.parametrize(
    ("name", "level", "given"),
    [(name, *row) for name, rows in CONTRADICTING.items() for row in rows],
)
def test_contradictions_are_refused_or_overridden(name: str, level: str, given: Any) -> None:
    shown = True if name == "patch_torch_functions" else given  # of a text what it means
    words = {"given": repr(shown), "level": level}
    assert_refused("policy", name, lambda: resolve(level, {name: given}), **words)
    with pytest.warns(UserWarning, match=r" Going on because hard_override is set\.$") as caught:
        policy = resolve(level, {name: given}, hard_override=True)
    assert getattr(policy, name) == {"True": True, "False": False}.get(given, given)
    said = str(caught[0].message).replace(" Going on because hard_override is set.", "")
    assert_approved("policy", name, f"PreampPolicyError: {said}", **words)


MEANT = {"01": "O1", "o2": "O2", 1: "O1", 0: "O0", "0": "O0", "5": "O5", "00": "O0"}
UNKNOWN: dict[str, Sequence[Any]] = {
    "a level by other letters": [*MEANT],
    "no level": ("O9", "fp", None, [], True),
    "bfloat16 for a level": ("bf16", "BF16", "bfloat16", "bf16-mixed", torch.bfloat16),
    "float16 for a level": ("fp16", "float16", "half", "16-mixed", 16, torch.float16),
    "either half for a level": ("mixed", "amp"),
    "float32 for a level": ("fp32", "float32", torch.float32),
}


@pytest.mark.parametrize(
    ("name", "given"), [(name, given) for name, rows in UNKNOWN.items() for given in rows]
)
def test_an_unknown_level_is_refused_with_what_was_meant(name: str, given: Any) -> None:
    meant = repr(MEANT[given]) if name == "a level by other letters" else ""
    assert_refused("policy", name, lambda: resolve(given, {}), given=repr(given), meant=meant)


def test_a_refusal_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError):
        resolve("O7", {})


# Dynamic, and every argument is allowed there.
REFUSED: dict[str, list[tuple[str, Any]]] = {
    "a dtype for weights": [("cast_model_type", given) for given in (torch.int32, "fp16", True)],
    "a dtype for outputs": [("cast_model_outputs", given) for given in (torch.int8, False)],
    "a truth value": [
        *(("patch_torch_functions", given) for given in ("yes", 1)),
        *(("keep_batchnorm_fp32", given) for given in ("false", 0)),
        ("master_weights", "no"),
    ],
    "a loss scale": [
        ("loss_scale", given) for given in ("abc", "Dynamic", 0, -1.0, float("inf"), "nan", [1.0])
    ],
    "a bound of the scale": [
        *(("min_loss_scale", given) for given in (-1, "x")),
        *(("max_loss_scale", given) for given in (0, "big")),
    ],
    "no ceiling": [("max_loss_scale", None)],
    "a scope": [("scope", "module")],
    "a number of skips": [("max_consecutive_skips", given) for given in (0, 1.5, "3")],
}


@pytest.mark.parametrize("hard_override", [False, True])
@pytest.mark.parametrize(
    ("name", "option", "given"), [(name, *row) for name, rows in REFUSED.items() for row in rows]
)
def test_bad_value(name: str, option: str, given: Any, hard_override: bool) -> None:
    with refused("policy", name, option=option, given=repr(given)):
        resolve("O2", {option: given}, hard_override=hard_override)


def test_floor_above_ceiling() -> None:
    with refused("policy", "a floor above the ceiling"):
        resolve("O1", {"min_loss_scale": 16, "max_loss_scale": 8})


def test_a_static_scale_has_no_range_to_check() -> None:
    policy = resolve("O2", {"loss_scale": 4, "min_loss_scale": 16, "max_loss_scale": None})
    assert policy.loss_scale == 4.0


def test_refused_policies_leave_the_table_alone() -> None:
    before = dict(OPT_LEVELS)
    with pytest.raises(PreampPolicyError):
        resolve("O1", {"loss_scale": 8.0, "master_weights": True})
    assert dict(OPT_LEVELS) == before


def test_policy_is_a_value() -> None:
    assert Policy(opt_level="O0", brief="x") == Policy(opt_level="O0", brief="x")
    assert resolve("O2", {"loss_scale": 2}) != resolve("O2", {})
