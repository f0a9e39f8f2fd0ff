# SPDX-License-Identifier: BSD-3-Clause
"""Bring a content into the form of what it is loaded into: sharded, shared, or whole.

What ranks had in pieces and what they had whole go into either. Each rank copies from the files
what it is going to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from preamp.checkpoint.shards import Place, SavedShards, shape_of
from preamp.checkpoint.subjects import Subjects, named_tensors, numbers_of, params_of
from preamp.core.errors import bad_value
from preamp.core.pytree import map_plain
from preamp.core.tensors import is_sharded
from preamp.engine import Engine
from preamp.kernels import fsdp
from preamp.optim.fused.moments import is_in_codes, is_scales, without_codes


def placed(content: Mapping[str, Any], subjects: Subjects, *, gradients: bool) -> dict[str, Any]:
    """Return what ``subjects`` load of a content, as ``DTensor`` values where theirs are.

    Where forms differ otherwise, the tensors are left whole for ``check_fits`` to complain about.
    Modules are resharded. Raises `ValueError` if there are not as many of a kind as were saved, or
    an optimizer has sharded state that is not of its parameter's shape; `PreampStateError` for a
    parameter sharded in a way that pieces cannot be cut for.
    """
    for kind in ("models", "optimizers", "schedulers"):
        asked, saved = len(getattr(subjects, kind)), len(content[kind])
        if asked and asked != saved:
            raise unfit(f"has {saved} {kind}, not {asked}", f"as many {kind}")
    fsdp.reshard(subjects.models)
    likes = dict(subjects.named_params())
    models = zip(content["models"], subjects.models, strict=False)
    optimizers = zip(content["optimizers"], subjects.optimizers, strict=False)
    made: dict[str, Any] = {key: content[key] for key in ("rng", "extra")}
    made["models"] = [
        {**one, "state": _like(one["state"], named_tensors(own))} for one, own in models
    ]
    made["optimizers"] = [
        {**one, "state": _optimizer_state(one["state"], own)} for one, own in optimizers
    ]
    made["schedulers"] = content["schedulers"] if subjects.schedulers else []
    made["engines"] = _with_own(content["engines"], subjects.engines, _engine)
    if subjects.optimizers:
        made["own_params"] = _like(content["own_params"], likes)
        made["gradients"] = {
            name: {side: _as(grad, likes.get(name)) for side, grad in sides.items()}
            for name, sides in content["gradients"].items()
            if gradients
        }
    return whole(made)


def _with_own(saved: Any, own: Iterable[Any], place: Callable[[Any, Any], Any]) -> list[Any]:
    """Place each thing that was saved as its counterpart here; what has none is checked later."""
    made = [place(one, other) for one, other in zip(saved, own, strict=False)]
    return [*made, *saved[len(made) :]]


def unfit(got: str, allowed: str) -> ValueError:
    """Say that a checkpoint does not fit what it is loaded into."""
    return bad_value(
        f"The checkpoint {got}",
        f"It loads into {allowed}; nothing was loaded",
        "Make the objects as the run that saved it did, or take parts of it by hand with "
        "preamp.checkpoint.read_checkpoint",
    )


def _like(values: Mapping[str, Any], likes: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: _as(value, likes.get(name)) for name, value in values.items()}


def _as(value: Any, like: torch.Tensor | None) -> Any:
    """Return ``value`` sharded as ``like`` is, if it is of that shape."""
    if like is None or not is_sharded(like):
        return value
    return Place.of_sharded(like).taken_from(value)


def _optimizer_state(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    params = dict(zip(numbers_of(state), params_of(optimizer), strict=False))
    saved: Mapping[int, Mapping[str, Any]] = state["state"]
    entries = {
        number: own
        if number not in params  # what an optimizer keeps for all of them, of any kind
        else _state_of(own, params[number])
        for number, own in saved.items()
    }
    return {**state, "state": entries}


def _state_of(saved: Mapping[str, Any], param: torch.Tensor) -> Mapping[str, Any]:
    """Return what is here of a parameter's state."""
    own = {**saved}  # refuses what is no dict
    if not is_sharded(param):
        return own
    place = Place.of_sharded(param)
    if place.rows is None and any(is_in_codes(own, key) for key in own):
        own = without_codes(whole(own))
    found = {
        key: value
        if key == "step"
        else (place.of_scales() if is_scales(own, key) else place).taken_from(value)
        for key, value in own.items()
    }
    for key, value in found.items():
        if isinstance(value, SavedShards) and place.like is not None and not is_scales(own, key):
            raise bad_value(
                f"The checkpoint has a sharded state {key!r} of shape {shape_of(value)} for a "
                f"parameter of shape {place.frame.shape}",
                "Into sharded parameters states load that are whole or have the parameter's shape; "
                "nothing was loaded",
                "Load it into a model that is not sharded, or use another optimizer",
            )
    return found


def _engine(saved: Any, engine: Engine) -> Any:
    """Gradients that a block has set aside are sharded as what they are of."""
    pending = {**saved["pending"]}  # unlike dict() refuses a list of pairs
    pending["sessions"] = _with_own(
        pending["sessions"],
        engine.sessions.values(),
        lambda one, session: {**one, "aside": _aside(one["aside"], list(session.params()))},
    )
    return {**saved, "pending": pending}


def _aside(aside: Any, params: list[torch.Tensor]) -> list[Any]:
    likes = dict(enumerate(params))
    return [(one[0], _as(one[1], likes.get(one[0])), one[2]) for one in aside]


def whole(tree: Any) -> Any:
    """Return a tree of plain data in which sharded tensors are whole. Not mutated."""
    return map_plain(lambda leaf: leaf.whole() if isinstance(leaf, SavedShards) else leaf, tree)
