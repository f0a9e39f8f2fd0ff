# SPDX-License-Identifier: BSD-3-Clause
"""Turn an opt level and the user's overrides into one `Policy`, or refuse.

``None`` never overrides anything: a level's default can only be changed to a value.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch

from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import PreampPolicyError, bad_type, bad_value, message, worded
from preamp.policy.keep import parse_keep
from preamp.policy.levels import OPT_LEVELS
from preamp.policy.policy import Policy
from preamp.policy.storage import Storage, parse_storage, storage_code, storage_name

_LEVEL_NAMES = ", ".join(repr(name) for name in OPT_LEVELS)


def resolve(
    opt_level: object, overrides: Mapping[str, Any], *, hard_override: bool = False
) -> Policy:
    """Return the policy of ``opt_level`` with ``overrides`` applied.

    Args:
        opt_level: ``"O0"`` to ``"O5"``.
        overrides: Arguments of ``initialize`` by name; entries that are ``None`` do nothing,
            except ``max_loss_scale`` and ``max_consecutive_skips``, which are taken as they are.
        hard_override: Warn instead of refusing where an override contradicts the level.

    Returns:
        The frozen policy.

    Raises:
        PreampPolicyError: Unknown level, or an override that contradicts it.
        TypeError: An override of the wrong type.
        ValueError: An override of the right type and a wrong value.
    """
    policy = level_defaults(opt_level)
    changes: dict[str, object] = {}
    refuse = _Refusal(policy.opt_level, hard_override)
    for name, check in _CHECKS.items():
        if overrides.get(name) is not None:
            changes.update(check(policy, overrides[name], refuse))
    for name, parse in _PARSERS.items():
        if overrides.get(name) is not None:
            changes[name] = parse(name, overrides[name])
    for name in ("max_loss_scale", "max_consecutive_skips"):
        if name in overrides:
            changes[name] = overrides[name]
    policy = policy.replace(**changes)
    if policy.keep_fp32 and policy.cast_model_type not in HALF_DTYPES:
        refuse(
            f"keep_fp32={policy.keep_fp32}",
            "Weights and buffers are float32 where models are not cast to half",
            "Leave keep_fp32 out, or choose opt_level='O2' or 'O3' ('O5' for bfloat16)",
        )
    check_storage(policy)
    return _check_scale_range(policy)


def check_storage(policy: Policy) -> None:
    """Refuse a storage that a policy cannot have, whatever ``hard_override`` says."""
    storage = policy.storage
    if storage.masters == "split" and not policy.master_weights:
        name = storage_name(storage)
        other = storage_name(dataclasses.replace(storage, masters="float32"))
        raise worded(
            PreampPolicyError,
            f"storage={storage_code(name)} with opt_level={policy.opt_level!r}, which has no "
            "masters here",
            "Masters are split where half weights have any: at O2 and O5, or with "
            "master_weights=True",
            f"Choose one of these, or pass storage={storage_code(other)}",
        )


def at_level(policy: Policy, storage: Storage) -> Storage:
    """What of ``storage`` a policy can have."""
    return dataclasses.replace(
        storage, masters=storage.masters if policy.master_weights else "float32"
    )


def level_defaults(opt_level: object) -> Policy:
    """Return the row of ``opt_level``, or raise `PreampPolicyError` naming the levels."""
    if isinstance(opt_level, str) and opt_level in OPT_LEVELS:
        return OPT_LEVELS[opt_level]
    raise worded(
        PreampPolicyError,
        f"opt_level={opt_level!r} is not known",
        f"Choose one of {_LEVEL_NAMES}",
        level_hint(opt_level),
    )


def level_hint(opt_level: object) -> str:
    """Say what to pass instead of ``opt_level``, which is no level."""
    given = str(opt_level).removeprefix("torch.").lower()
    meant = f"O{given.lstrip('0o') or '0'}"
    rule = "Levels are strings that begin with the letter O, not the digit zero"
    if meant in OPT_LEVELS:
        return f"{rule}; here {meant!r} was probably meant"
    if given in ("fp32", "float32", "float", "32", "32-true"):
        return "For float32 pass 'O0'"
    bfloat16 = "for bfloat16 'O5', or 'O4' to keep the weights in float32"
    float16 = "for float16 'O2', or 'O1' to keep the weights in float32"
    if given.startswith(("bf16", "bfloat16")):
        return f"Pass {bfloat16}"
    if given.startswith(("fp16", "float16", "half", "16")):
        return f"Pass {float16}"
    return f"Pass {bfloat16}; {float16}" if given in ("mixed", "amp", "auto") else rule


class _Refusal:
    """Refuse an override, or only warn if the caller insists (``hard_override``)."""

    def __init__(self, level: str, only_warn: bool) -> None:
        self.level = level
        self.only_warn = only_warn

    def __call__(self, got: str, allowed: str, do: str) -> None:
        text = message(f"{got} with opt_level={self.level!r}", allowed, do)
        if not self.only_warn:
            raise PreampPolicyError(text)
        warnings.warn(f"{text} Going on because hard_override is set.", stacklevel=2)


def _is_function_level(policy: Policy) -> bool:
    return policy.patch_torch_functions


def _cast_model_type(policy: Policy, value: object, refuse: _Refusal) -> dict[str, object]:
    if value is False:  # the documented way to say "do not cast the model at all"
        return {"cast_model_type": None}
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise bad_type(
            f"cast_model_type={value!r} is not a floating-point dtype",
            "Allowed are torch.float16, torch.bfloat16, torch.float32, torch.float64, "
            "or False for no cast",
            "Pass the dtype itself, or leave the argument out for the level's default",
        )
    if _is_function_level(policy):
        if value is torch.float32:
            return {}  # the weights of O1 and O4 are float32 already
        refuse(
            f"cast_model_type={value!r}",
            "O1 and O4 keep the weights in float32 and cast function by function",
            "Leave cast_model_type out, or choose opt_level='O2' or 'O3' ('O5' for bfloat16)",
        )
    return {"cast_model_type": value}


def _patch_torch_functions(policy: Policy, value: object, refuse: _Refusal) -> dict[str, object]:
    on = parse_bool("patch_torch_functions", value)
    if on and not _is_function_level(policy):
        refuse(
            "patch_torch_functions=True",
            "Functions are cast one by one at O1 (float16) and O4 (bfloat16) only",
            "Choose opt_level='O1' or 'O4', or leave patch_torch_functions out",
        )
    if not on:
        return {"patch_torch_functions": False, "patch_torch_functions_type": None}
    dtype = policy.patch_torch_functions_type or torch.float16
    return {"patch_torch_functions": True, "patch_torch_functions_type": dtype}


def _patch_type(policy: Policy, value: object, refuse: _Refusal) -> dict[str, object]:
    allowed = policy.patch_torch_functions_type
    if value is not allowed:
        refuse(
            f"patch_torch_functions_type={value!r}",
            "O1 casts functions to torch.float16, O4 to torch.bfloat16, other levels to nothing",
            "Choose opt_level='O1' or 'O4' by the dtype you want",
        )
    return {"patch_torch_functions_type": value}


def _keep_batchnorm(policy: Policy, value: object, refuse: _Refusal) -> dict[str, object]:
    if _is_function_level(policy):
        refuse(
            f"keep_batchnorm_fp32={value!r}",
            "O1 and O4 keep all weights in float32, batch norm included",
            "Leave keep_batchnorm_fp32 out",
        )
    return {"keep_batchnorm_fp32": parse_bool("keep_batchnorm_fp32", value)}


def _master_weights(policy: Policy, value: object, refuse: _Refusal) -> dict[str, object]:
    if _is_function_level(policy):
        refuse(
            f"master_weights={value!r}",
            "O1 and O4 keep the weights in float32, so there is nothing to keep a master of",
            "Leave master_weights out, or choose opt_level='O2' ('O5' for bfloat16)",
        )
    return {"master_weights": parse_bool("master_weights", value)}


_CHECKS = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "patch_torch_functions_type": _patch_type,
    "keep_batchnorm_fp32": _keep_batchnorm,
    "master_weights": _master_weights,
}
"""What depends on the level."""


def parse_bool(name: str, value: object) -> bool:
    """Return ``value`` as a bool; the strings ``"True"`` and ``"False"`` come from flags."""
    if isinstance(value, bool):
        return value
    if value in ("True", "False"):
        return value == "True"
    raise bad_type(
        f"{name}={value!r} is not a truth value",
        "Allowed are True, False, 'True' and 'False'",
        "Pass one of them, or leave the argument out for the level's default",
    )


def parse_scale(name: str, value: object) -> float | Literal["dynamic"]:
    """Return ``"dynamic"`` or a positive finite float; numeric strings come from flags."""
    return "dynamic" if value == "dynamic" else parse_number(name, value, positive=True)


def parse_number(name: str, value: object, *, positive: bool = False) -> float:
    """Return ``value`` as a finite float that is not negative (or not zero either)."""
    try:
        number = float(cast("float | str", value))
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number) and (number > 0 if positive else number >= 0):
        return number
    choices = "'dynamic' or a positive number" if name == "loss_scale" else "a positive number"
    raise bad_value(
        f"{name}={value!r} cannot be used",
        f"Allowed is {choices}, also as a string such as '128.0'",
        "Pass a power of two if in doubt: scaling by it is exact",
    )


def parse_dtype(name: str, value: object) -> torch.dtype:
    """Return ``value``, a floating-point dtype."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return value
    raise bad_type(
        f"{name}={value!r} is not a floating-point dtype",
        "Allowed is a dtype such as torch.float32 or torch.float16",
        "Pass the dtype itself, or leave the argument out for float32 outputs",
    )


def parse_choice(name: str, value: object) -> str:
    """Return ``value``, one of the two words that argument ``name`` allows."""
    if isinstance(value, str) and value in _CHOICES[name]:
        return value
    allowed = " and ".join(f"{choice!r} ({why})" for choice, why in _CHOICES[name].items())
    raise bad_value(
        f"{name}={value!r} is not known", f"Allowed are {allowed}", "Choose one of the two"
    )


_CHOICES = {
    "scope": {
        "model": "casts hold inside the models' forward only",
        "thread": "casts hold in the whole thread",
    },
    "overflow": {
        "skip": "the step is skipped and told",
        "trace": "modules are watched too, to tell the first to go wrong",
    },
}

_PARSERS: dict[str, Callable[[str, object], object]] = {
    "keep_fp32": lambda _, value: parse_keep(value),
    "loss_scale": parse_scale,
    # Any falsy value means "no floor", as scripts that pass 0 from a flag expect.
    "min_loss_scale": lambda name, value: parse_number(name, value) or None,
    "cast_model_outputs": parse_dtype,
    "scope": parse_choice,
    "overflow": parse_choice,
    "storage": lambda _, value: parse_storage(value),
}
"""The others."""


def _check_scale_range(policy: Policy) -> Policy:
    """Check what only the whole policy shows: the range of a dynamic scale, and the limits."""
    limit = policy.max_consecutive_skips
    if limit is not None and (type(limit) is not int or limit < 1):
        raise bad_value(
            f"max_consecutive_skips={limit!r} cannot be used",
            "Allowed is a whole number from 1, or None for no limit",
            "Pass the number of skipped steps in a row after which training should stop",
        )
    if not policy.is_dynamic:
        return policy
    if policy.max_loss_scale is None:
        raise bad_type(
            "max_loss_scale=None with a dynamic loss scale",
            "A dynamic scale needs a ceiling, or it grows to infinity on a tiny loss",
            "Leave max_loss_scale out (2**24) or pass a number",
        )
    ceiling = parse_number("max_loss_scale", policy.max_loss_scale, positive=True)
    floor = policy.min_loss_scale
    if floor is not None and floor > ceiling:
        raise bad_value(
            f"min_loss_scale={floor} is above max_loss_scale={ceiling}",
            "The floor of the loss scale must not be above its ceiling",
            "Lower min_loss_scale or raise max_loss_scale",
        )
    return policy.replace(max_loss_scale=ceiling)


def describe_overrides(policy: Policy) -> list[tuple[str, object, object]]:
    """Return ``(field, level default, value)`` for every field that differs from its level.

    ``scope`` is left out where no functions are cast, and it means nothing.
    """
    default = OPT_LEVELS[policy.opt_level]
    return [
        (field.name, getattr(default, field.name), getattr(policy, field.name))
        for field in dataclasses.fields(Policy)
        if getattr(default, field.name) != getattr(policy, field.name)
        and (field.name != "scope" or policy.patch_torch_functions)
    ]
