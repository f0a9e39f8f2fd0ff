# SPDX-License-Identifier: BSD-3-Clause
"""Bring a content into the form of what it is loaded into: sharded, shared, or whole.

What ranks had in pieces and what they had whole go into either. Each rank copies from the files
what it is going to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from preamp.checkpoint.shards import Box, Frame, SavedShards, cut, shape_of, shard_of
from preamp.checkpoint.subjects import (
    MasterShard,
    MasterShards,
    Subjects,
    named_tensors,
    numbers_of,
    params_of,
)
from preamp.core.errors import bad_value
from preamp.core.pytree import map_plain
from preamp.core.tensors import is_sharded
from preamp.engine import Engine
from preamp.kernels import fsdp
from preamp.kernels.shards import has_whole_rows, sharded_as
from preamp.kernels.stored import scales_shape
from preamp.optim.fused.moments import is_in_codes, is_scales, without_codes


def placed(content: dict[str, Any], subjects: Subjects) -> dict[str, Any]:
    """Return a content whose tensors are ``DTensor`` values where those of ``subjects`` are.

    Where forms differ otherwise, the tensors are left whole for ``check_fits`` to complain about.
    Modules are resharded. Raises `ValueError` if an optimizer has sharded state that is not of its
    parameter's shape, `PreampStateError` for a parameter sharded in a way that pieces cannot be cut
    for.
    """
    fsdp.reshard(subjects.models)
    shares, made = MasterShards(subjects), dict(content)
    made["models"] = _with_own(
        content["models"],
        subjects.models,
        lambda saved, model: {**saved, "state": _like(saved["state"], named_tensors(model))},
    )
    made["optimizers"] = _with_own(
        content["optimizers"],
        subjects.optimizers,
        lambda saved, own: {**saved, "state": _optimizer_state(saved["state"], own, shares)},
    )
    likes: dict[str, torch.Tensor] = dict(subjects.named_params())
    made["own_params"] = _like(content["own_params"], likes)
    made["gradients"] = {
        name: {side: _as(grad, likes.get(name)) for side, grad in sides.items()}
        for name, sides in content["gradients"].items()
    }
    made["engines"] = _with_own(content["engines"], subjects.engines, _engine)
    return whole(made)


def _with_own(saved: Any, own: Iterable[Any], place: Callable[[Any, Any], Any]) -> list[Any]:
    """Place each thing that was saved as its counterpart here; what has none stays as it is."""
    made = [place(one, other) for one, other in zip(saved, own, strict=False)]
    return [*made, *saved[len(made) :]]


def _like(values: Mapping[str, Any], likes: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: _as(value, likes.get(name)) for name, value in values.items()}


def _as(value: Any, like: torch.Tensor | None) -> Any:
    """Return ``value`` sharded as ``like`` is, if it is of that shape."""
    if not isinstance(value, (torch.Tensor, SavedShards)) or like is None or not is_sharded(like):
        return value
    if shape_of(value) != tuple(like.shape):
        return value
    piece = shard_of(like, "A parameter", ranks=1)
    # Where the file is: loading it copies it to its device
    return sharded_as(cut(value, piece.frame, piece.box).reshape(piece.data.shape), like)


def _optimizer_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, shares: MasterShards
) -> Any:
    params = dict(zip(numbers_of(state), params_of(optimizer), strict=False))
    saved: Mapping[int, Mapping[str, Any]] = state["state"]
    entries = {
        number: own
        if number not in params  # what an optimizer keeps for all of them, of any kind
        else _state_of(own, params[number], shares)
        for number, own in saved.items()
    }
    return {**state, "state": entries}


def _state_of(
    saved: Mapping[str, Any], param: torch.Tensor, shares: MasterShards
) -> dict[str, Any]:
    share, own = shares.of(param), dict(saved)
    has_rows = share.span.has_whole_rows if share is not None else True
    if is_sharded(param):
        has_rows = has_whole_rows(param)
    if not has_rows and any(is_in_codes(own, key) for key in own):
        own = without_codes(whole(own))
    return {
        key: _scales(value, param, share)
        if is_scales(own, key)
        else _state_entry(key, value, param, share)
        for key, value in own.items()
    }


def _scales(value: Any, param: torch.Tensor, share: MasterShard | None) -> Any:
    """Of the scales of a moment the rows that go with what is here of the moment."""
    if share is not None:
        frame, box = share.place_of_scales()
    elif is_sharded(param):
        frame, box = Frame(scales_shape(param.shape)), shard_of(param, "A parameter", ranks=1).box
        box = Box((box.offsets[0], 0), (box.sizes[0], frame.shape[1]))
    else:
        return value
    if shape_of(value) != frame.shape:
        return value  # for the optimizer to complain about
    own = cut(value, frame, box)
    return sharded_as(own, param, frame.shape) if share is None else own


def _state_entry(key: str, value: Any, param: torch.Tensor, share: MasterShard | None) -> Any:
    if not isinstance(value, (torch.Tensor, SavedShards)):
        return value
    if share is not None and key != "step" and shape_of(value) == share.frame.shape:
        return cut(value, share.frame, share.box)
    if (
        isinstance(value, SavedShards)
        and is_sharded(param)
        and shape_of(value) != tuple(param.shape)
    ):
        raise bad_value(
            f"The checkpoint has a sharded state {key!r} of shape {shape_of(value)} for a "
            f"parameter of shape {tuple(param.shape)}",
            "Into sharded parameters states load that are whole or have the parameter's shape; "
            "nothing was loaded",
            "Load it into a model that is not sharded, or use another optimizer",
        )
    return value if key == "step" else _as(value, param)


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
