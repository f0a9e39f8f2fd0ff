# SPDX-License-Identifier: BSD-3-Clause
"""Whether a checkpoint's content is that of the objects it is to be loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from preamp.checkpoint.capture import describe_params
from preamp.checkpoint.shares import Shares
from preamp.checkpoint.subjects import Subjects, class_name
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_value
from preamp.core.tensors import is_sharded

_SHOWN = 3


def check_fits(content: Mapping[str, Any], subjects: Subjects) -> None:
    """Raise `ValueError` unless everything asked for is there and of the same form.

    A kind of which ``subjects`` has none is left out.
    """
    for kind in ("models", "optimizers", "schedulers"):
        asked, saved = getattr(subjects, kind), content[kind]
        if asked and len(asked) != len(saved):
            raise _unfit(f"has {len(saved)} {kind}, not {len(asked)}", f"as many {kind}")
    shares = Shares(subjects)
    for index, (model, saved) in enumerate(zip(subjects.models, content["models"], strict=False)):
        _check_model(index, shares.model_forms(model), saved["state"])
        _check_tied(index, model, saved["state"])
    names = {id(param): name for name, param in subjects.named_params()}
    pairs = zip(subjects.optimizers, content["optimizers"], strict=False)
    for index, (optimizer, saved) in enumerate(pairs):
        _check_class(f"optimizers[{index}]", optimizer, saved["class"])
        _check_optimizer(index, optimizer, names, saved)
    pairs = zip(subjects.schedulers, content["schedulers"], strict=False)
    for index, (scheduler, saved) in enumerate(pairs):
        _check_class(f"schedulers[{index}]", scheduler, saved["class"])
    if subjects.optimizers:
        _check_engines(content["engines"], subjects)


def _check_model(index: int, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, extra = _beyond(own, saved), _beyond(saved, own)
    if missing or extra:
        raise _unfit(
            f"of models[{index}] lacks {_shown(missing)} and has {_shown(extra)} beyond it",
            "exactly the entries of model.state_dict()",
        )
    wrong = [name for name, value in own.items() if not _same_form(value, saved[name])]
    if wrong:
        raise _unfit(
            f"of models[{index}] has {_shown(wrong)} in another form, such as "
            f"{_form(saved[wrong[0]])} for {_form(own[wrong[0]])}",
            "entries of the same shape",
        )


def _check_tied(index: int, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Of values for one tensor under several names the last would silently be the one."""
    first: dict[int, str] = {}
    own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in own.items():
        known = first.setdefault(id(tensor), name)
        if known == name or is_sharded(tensor) or not {name, known} <= saved.keys():
            continue
        if not _same_bits(saved[known], saved[name]):
            raise _unfit(
                f"of models[{index}] has different values for {known!r} and {name!r}, which are "
                "one tensor here",
                "models that share the same tensors",
            )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    raw = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(*raw)


def _same_form(own: Any, saved: Any) -> bool:
    if not isinstance(own, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return isinstance(own, torch.Tensor) == isinstance(saved, torch.Tensor)
    is_same_kind = own.is_floating_point() == saved.is_floating_point()
    return own.shape == saved.shape and is_same_kind


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    return type(value).__name__


def _check_class(place: str, own: object, saved: str) -> None:
    if class_name(own) != saved:
        raise _unfit(f"has a {saved} as {place}, which is a {class_name(own)}", "the same class")


def _check_optimizer(
    index: int, optimizer: torch.optim.Optimizer, names: dict[int, str], saved: Mapping[str, Any]
) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in saved["state"]["param_groups"]]
    if sizes != theirs:
        raise _unfit(
            f"of optimizers[{index}] has parameter groups of {theirs} parameters, not {sizes}",
            "the same groups",
        )
    for own, other in zip(describe_params(optimizer, names), saved["params"], strict=True):
        if (own["name"], own["shape"]) != (other["name"], other["shape"]):
            raise _unfit(
                f"of optimizers[{index}] has {other['name']!r} {other['shape']} where it has "
                f"{own['name']!r} {own['shape']}",
                "the same parameters in the same order, with the models passed in the same order",
            )


def _check_engines(saved: Sequence[Mapping[str, Any]], subjects: Subjects) -> None:
    own = [
        [i for i, o in enumerate(subjects.optimizers) if id(o) in engine.sessions]
        for engine in subjects.engines
    ]
    theirs = [list(entry["optimizers"]) for entry in saved]
    if theirs and own != theirs:
        raise _unfit(
            f"is of preamp.initialize calls with the optimizers {theirs}, not {own}",
            "optimizers that were initialized in the same way",
        )


def check_own_params(saved: Mapping[str, torch.Tensor], subjects: Subjects) -> None:
    """Raise `ValueError` unless what only optimizers have is what they had."""
    own = {n for n, _ in subjects.named_params() if n.startswith("optimizers/")}
    if own != set(saved):
        raise _unfit(
            f"lacks {_shown(sorted(own - set(saved)))} and has "
            f"{_shown(sorted(set(saved) - own))} beyond the optimizers' own parameters",
            "the same models beside the optimizers as when it was saved",
        )


def _beyond(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [name for name in mine if name not in theirs]


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return (", ".join(map(repr, names[:_SHOWN])) or "nothing") + (
        f" and {more} more" if more > 0 else ""
    )


def _unfit(got: str, allowed: str) -> ValueError:
    return bad_value(
        f"The checkpoint {got}",
        f"It loads into {allowed}; nothing was loaded",
        "Make the objects as the run that saved it did, or take parts of it by hand with "
        "preamp.checkpoint.read_checkpoint",
    )
