# SPDX-License-Identifier: BSD-3-Clause
"""What a checkpoint contains, as a few numbers and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from preamp.checkpoint.background import LATEST
from preamp.checkpoint.placing import whole
from preamp.checkpoint.saving import read_or_refuse
from preamp.checkpoint.storage import SHOWN, Loaded, files_of, taken_apart
from preamp.core.dtypes import dtype_name
from preamp.core.pytree import tensors_in
from preamp.kernels.sparse import stored_parts
from preamp.policy.storage import describe_storage

_T = TypeVar("_T")

CATEGORIES = {
    "models": "models",
    "optimizers": "optimizers",
    "own_params": "optimizers",
    "gradients": "gradients",
    "engines": "pending steps",
    "schedulers": "schedulers",
    "rng": "random states",
    "extra": "extra",
}
"""How the tensors under a key of the content are called in `Summary.bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is in a checkpoint that was verified."""

    path: str  # the file, or the folder of a sharded checkpoint
    size: int  # of the file or of all of them, in bytes
    written_by: dict[str, Any]  # versions: of the content (``"version"``), of preamp and of torch
    ranks: int  # how many processes saved it
    # For each ``preamp.initialize`` call the opt level, the loss scale of each loss, and steps
    # applied and skipped of each optimizer.
    engines: list[dict[str, Any]]
    # For each the class, and under ``"tensors"`` name, shape and dtype of each.
    models: list[dict[str, Any]]
    # For each the class, the number of its parameters, and the storage of masters and moments.
    optimizers: list[dict[str, Any]]
    schedulers: list[str]  # their classes
    extra: list[str] | str  # its keys, or its type if it is no dict; "none" where there is none
    # Of the first rank's tensors, sharded ones in whole, by category; what is referred to twice
    # counts once.
    bytes: dict[str, int]


def summarize_checkpoint(path: Path) -> Summary:
    """Read and verify a checkpoint, a file or the folder of a sharded one; tell what is in it."""
    LATEST.join()
    loaded = read_or_refuse(path, purpose=SHOWN)
    with taken_apart(SHOWN):
        return _summary(path, loaded)


def _summary(path: Path, loaded: Loaded) -> Summary:
    content = whole(loaded.content)
    extra: Any = content["extra"]
    return Summary(
        path=str(path),
        size=_size(path),
        written_by=loaded.written_by,
        ranks=loaded.ranks,
        engines=[_engine(engine) for engine in content["engines"]],
        models=[_model(model) for model in content["models"]],
        optimizers=[_optimizer(optimizer) for optimizer in content["optimizers"]],
        schedulers=[_of(str, scheduler["class"]) for scheduler in content["schedulers"]],
        extra=_extra(extra),
        bytes=_bytes(content),
    )


def _size(path: Path) -> int:
    files = files_of(path) if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files)


def _engine(saved: Mapping[str, Any]) -> dict[str, Any]:
    scalers = saved["scalers"]
    numbered = (entry for key, entry in scalers.items() if key != "steps")
    return {
        "opt_level": _of(str, saved["opt_level"]),
        "loss_scales": [float(_of((int, float), entry["loss_scale"])) for entry in numbered],
        "steps": [
            {key: _of(int, count[key]) for key in ("applied", "skipped")}
            for count in scalers.get("steps", ())
        ],
    }


def _of(kinds: type[_T] | tuple[type[_T], ...], value: object) -> _T:
    if not isinstance(value, kinds):
        raise TypeError(f"{value!r} is of type {type(value).__name__}")
    return value


def _model(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "class": _of(str, saved["class"]),
        "tensors": [
            {"name": str(name), "shape": list(value.shape), "dtype": dtype_name(value.dtype)}
            for name, value in saved["state"].items()
            if isinstance(value, torch.Tensor)
        ],
    }


def _optimizer(saved: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [_of(str, saved["storage"][name]) for name in ("masters", "moments")]
    return {
        "class": _of(str, saved["class"]),
        "parameters": len(saved["params"]),
        "storage": describe_storage(*kinds),
    }


def _extra(extra: Any) -> list[str] | str:
    if isinstance(extra, dict):
        return [str(key) for key in cast("dict[Any, Any]", extra)]
    return "none" if extra is None else type(extra).__name__


def _bytes(content: Mapping[str, Any]) -> dict[str, int]:
    found = dict.fromkeys(dict.fromkeys(CATEGORIES.values()), 0)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for key, category in CATEGORIES.items():
        for tensor in _tensors(content[key]):
            memory = tensor.data_ptr(), tuple(tensor.shape)
            if memory not in seen:
                seen.add(memory)
                found[category] += tensor.numel() * tensor.element_size()
    return found


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_in(tree):
        yield from stored_parts(tensor) if tensor.is_sparse else (tensor,)
