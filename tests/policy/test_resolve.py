# SPDX-License-Identifier: BSD-3-Clause
"""Opt levels and their overrides: defaults, what may be changed, what is refused and how."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from cases.levels import BY_NAME
from kit.refusals import assert_approved, assert_refused, refused
from preamp.policy import OPT_LEVELS, KeepFP32, Policy, describe_overrides, level_defaults, resolve

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
    assert policy.half_dtype is BY_NAME[level].half
    others = (policy.min_loss_scale, policy.max_loss_scale, policy.max_consecutive_skips)
    assert others == (None, 2.0**24, 50)
    assert (policy.cast_model_outputs, policy.scope) == (None, "model")
    assert list(OPT_LEVELS) == list(DEFAULTS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        OPT_LEVELS[level].loss_scale = 2.0  # pyright: ignore
    with pytest.raises(TypeError, match="does not support item assignment"):
        OPT_LEVELS["O9"] = policy  # pyright: ignore


@pytest.mark.parametrize("level", DEFAULTS)
def test_none_changes_nothing(level: str) -> None:
    names = (*DEFAULTS[level], "cast_model_outputs", "min_loss_scale", "scope")
    assert resolve(level, dict.fromkeys(names)) == OPT_LEVELS[level]


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


def test_only_what_was_overridden_differs() -> None:
    given = {"loss_scale": "128.0", "master_weights": False, "keep_fp32": "head"}
    assert describe_overrides(resolve("O2", given)) == [
        ("keep_fp32", KeepFP32(), KeepFP32(["head"])),
        ("master_weights", True, False),
        ("loss_scale", "dynamic", 128.0),
    ]


# -- refusals --------------------------------------------------------------------------------

CONTRADICTING: dict[str, list[tuple[str, Any]]] = {  # levels and what is given
    "cast_model_type": [(level, dtype) for level in FUNCTION_LEVELS for dtype in (F16, BF16, F64)],
    "patch_torch_functions": [(level, given) for level in OTHER_LEVELS for given in (True, "True")],
    "patch_torch_functions_type": [*zip(DEFAULTS, (F16, BF16, F16, F16, F16, BF16), strict=True)],
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
    policy = check_contradiction(name, level, {name: given}, repr(shown))
    assert getattr(policy, name) == {"True": True, "False": False}.get(given, given)


def check_contradiction(name: str, level: str, given: dict[str, Any], shown: str) -> Policy:
    """It is refused, and as a warning with ``hard_override``, whose policy is returned."""
    words = {"given": shown, "level": level}
    assert_refused("policy", name, lambda: resolve(level, given), **words)
    with pytest.warns(UserWarning, match=r" Going on because hard_override is set\.$") as caught:
        policy = resolve(level, given, hard_override=True)
    said = str(caught[0].message).removesuffix(" Going on because hard_override is set.")
    assert_approved("policy", name, f"PreampPolicyError: {said}", **words)
    return policy


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
    bounds = {"min_loss_scale": 16, "max_loss_scale": 8}
    with refused("policy", "a floor above the ceiling"):
        resolve("O1", bounds)
    assert resolve("O2", {**bounds, "loss_scale": 4}).loss_scale == 4.0  # static: has no range


# -- keep_fp32: what it may be, and where it contradicts the level ---------------------------------


HALF_LEVELS = [name for name, row in OPT_LEVELS.items() if row.half_dtype is row.cast_model_type]
OTHER_LEVELS = [name for name in OPT_LEVELS if name not in HALF_LEVELS]


def small(name: str, tensor: torch.Tensor) -> bool:
    return tensor.numel() < 10 and bool(name)


ONE_OR_SEVERAL: list[tuple[Any, list[Any]]] = [
    (nn.LayerNorm, [nn.LayerNorm]),
    ("rotary.*", ["rotary.*"]),
    (small, [small]),
    ([nn.LayerNorm, "rotary.*", small], [nn.LayerNorm, "rotary.*", small]),
    (("a", "b"), ["a", "b"]),
    ([], []),
]


@pytest.mark.parametrize("level", HALF_LEVELS)
@pytest.mark.parametrize(("given", "entries"), ONE_OR_SEVERAL)
def test_one_or_several(given: Any, entries: list[Any], level: str) -> None:
    policy = resolve(level, {"keep_fp32": given})
    assert list(policy.keep_fp32) == entries
    assert policy == OPT_LEVELS[level].replace(keep_fp32=given)
    assert (policy == OPT_LEVELS[level]) is (not entries)


@pytest.mark.parametrize(
    "given", [True, 3, torch.ones(2), int, nn.Linear(2, 2), {"a"}, ["a", None], [["a"]]]
)
def test_anything_else_is_refused(given: Any) -> None:
    shown = given[-1] if isinstance(given, list) else given
    with refused("policy", "keep_fp32 of something else", given=shown):
        resolve("O2", {"keep_fp32": given})


@pytest.mark.parametrize("level", OTHER_LEVELS)
def test_levels_that_cast_no_model_refuse_it(level: str) -> None:
    given, shown = {"keep_fp32": [nn.LayerNorm, "rotary.*"]}, "LayerNorm, 'rotary.*'"
    check_contradiction("keep_fp32 without half weights", level, given, shown)
    assert resolve(level, {"keep_fp32": None}) == resolve(level, {"keep_fp32": []})


class Chooser:
    """A predicate with a state that cannot be copied."""

    def __call__(self, name: str, tensor: torch.Tensor) -> bool:
        return True

    def __deepcopy__(self, memo: Any) -> Chooser:
        raise AssertionError("copied")


def test_it_reads_the_same_in_every_process() -> None:
    chooser = Chooser()
    keep = KeepFP32([nn.LayerNorm, "a.*", small, chooser])
    assert repr(keep) == "LayerNorm, 'a.*', small, Chooser"
    assert repr(KeepFP32()) == "nothing"
    assert copy.deepcopy(keep) is keep
    assert hash(keep) == hash(KeepFP32([nn.LayerNorm, "a.*", small, chooser]))
    assert keep != KeepFP32([nn.LayerNorm])
