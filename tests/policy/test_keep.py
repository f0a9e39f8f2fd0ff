# SPDX-License-Identifier: BSD-3-Clause
"""What ``keep_fp32`` may be, and where it contradicts the level."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from kit.refusals import assert_approved, refused
from preamp import OPT_LEVELS
from preamp.policy import KeepFP32, describe_overrides, resolve

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
    given = {"keep_fp32": [nn.LayerNorm, "rotary.*"]}
    words = {"given": "LayerNorm, 'rotary.*'", "level": level}
    with refused("policy", "keep_fp32 without half weights", **words):
        resolve(level, given)
    with pytest.warns(UserWarning, match=r" because hard_override is set\.$") as caught:
        resolve(level, given, hard_override=True)
    said = str(caught[0].message).removesuffix(" Going on because hard_override is set.")
    said = f"PreampPolicyError: {said}"
    assert_approved("policy", "keep_fp32 without half weights", said, **words)
    assert resolve(level, {"keep_fp32": None}) == resolve(level, {"keep_fp32": []})


@pytest.mark.parametrize(
    ("level", "cast_to", "works"),
    [
        ("O0", torch.float16, True),
        ("O0", torch.float64, False),
        ("O2", False, False),
        ("O2", torch.float32, False),
        ("O3", torch.bfloat16, True),
    ],
)
def test_the_dtype_that_counts_is_the_final_one(level: str, cast_to: Any, works: bool) -> None:
    overrides = {"cast_model_type": cast_to, "keep_fp32": "a"}
    if works:
        assert list(resolve(level, overrides).keep_fp32) == ["a"]
    else:
        with refused("policy", "keep_fp32 without half weights", given="'a'", level=level):
            resolve(level, overrides)


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


def test_it_is_among_the_overrides() -> None:
    policy = resolve("O5", {"keep_fp32": "head"})
    assert describe_overrides(policy) == [("keep_fp32", KeepFP32(), KeepFP32(["head"]))]
