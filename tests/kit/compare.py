# SPDX-License-Identifier: BSD-3-Clause
"""What is compared: values with their dtypes, and by identity all that an engine may change."""

import functools
import operator
from typing import Any

import torch
from torch import nn

import preamp


def same(a: Any, b: Any) -> bool:
    """Whether two trees of plain data have the same values and dtypes; NaN is the same as NaN."""
    if isinstance(a, torch.Tensor):
        if not (isinstance(b, torch.Tensor) and a.dtype is b.dtype and a.shape == b.shape):
            return False
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def halves_match(model: nn.Module) -> bool:
    """Whether every half weight that has a master is the master rounded."""
    engine = preamp.engine_of(model)
    pairs = [(param, engine.master_of(param)) for param in model.parameters()]
    return all(
        same(param.detach(), master.detach().to(param.dtype))
        for param, master in pairs
        if master is not None
    )


NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.autograd": torch.autograd,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.nn.Module": nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
    "the recurrent layers' functions": vars(torch.nn.modules.rnn)["_VF"],
}


def names_of_torch() -> dict[str, dict[str, object]]:
    """What torch's functions are at present."""
    return {name: {**vars(owner)} for name, owner in NAMESPACES.items()}


def rebound(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names in a namespace that are other objects by now."""
    if [*before] == [*after] and all(map(operator.is_, before.values(), after.values())):
        return []  # as nearly always, and soon found
    keys = before.keys() | after.keys()
    # Copying makes __slotnames__.
    return [k for k in keys - {"__slotnames__"} if before.get(k, after) is not after.get(k, before)]


def _exactly(value: Any) -> Any:
    """An object by identity, a tensor by identity and contents."""
    if isinstance(value, torch.Tensor):
        contents = value.detach().clone()
        return ("tensor", id(value), value.dtype, value.requires_grad, contents, value.grad is None)
    if isinstance(value, dict):
        return {key: _exactly(item) for key, item in value.items()}
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return ("object", id(value))


def picture(*subjects: nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that an engine may change, by identity: torch, casts, and the ``subjects``."""
    seen: dict[str, Any] = {**names_of_torch()}
    seen["casts"] = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    for index, subject in enumerate(subjects):
        if isinstance(subject, nn.Module):
            for name, child in subject.named_modules():
                for key, value in vars(child).items():
                    seen[f"{index}.{name}.{key}"] = _exactly(value)
            for name, param in subject.named_parameters():
                grad = param.grad
                seen[f"{index}.{name}.grad"] = None if grad is None else _exactly(grad)
        else:
            for key, value in vars(subject).items():
                known = isinstance(getattr(type(subject), key, None), functools.cached_property)
                if key not in ("state", "param_groups") and not known:  # known: asked for once
                    seen[f"{index}.{key}"] = _exactly(value)
            seen[f"{index}.groups"] = ("object", id(subject.param_groups))
            for number, group in enumerate(subject.param_groups):
                seen[f"{index}.group{number}"] = ("object", id(group))
                for key, value in group.items():
                    seen[f"{index}.group{number}.{key}"] = (
                        [id(value), *map(id, value)] if key == "params" else _exactly(value)
                    )
            for param, state in subject.state.items():
                seen[f"{index}.state.{id(param)}"] = _exactly(state)
    return seen


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what two pictures disagree about."""
    found: list[str] = []
    for name in before.keys() | after.keys():
        if name in NAMESPACES:
            found += [f"{name}.{key}" for key in rebound(before[name], after[name])]
        elif name not in before or name not in after or not same(before[name], after[name]):
            found.append(name)
    return sorted(found)
