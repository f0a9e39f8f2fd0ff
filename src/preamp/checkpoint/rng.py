# SPDX-License-Identifier: BSD-3-Clause
"""The states of the process's random generators: Python's, numpy's, and torch's on all devices."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

_DEVICES = ("cuda", "xpu", "mps")


def random_states() -> dict[str, Any]:
    """Return the states of all generators that are in use, as plain data. May synchronise."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = _numpy()
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        inner = state["state"]
        states["numpy"] = {
            "bit_generator": str(state["bit_generator"]),
            "key": [int(word) for word in inner["key"]],
            "pos": int(inner["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        }
    for name in _DEVICES:
        module: Any = getattr(torch, name)
        if module.is_available() and (name == "mps" or module.is_initialized()):
            states[name] = (
                [module.get_rng_state()] if name == "mps" else list(module.get_rng_state_all())
            )
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators of this process to what `random_states` returned.

    Devices that are not here are passed over; those without a state keep theirs.
    """
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(states["torch"].clone())
    numpy, saved = _numpy(), states.get("numpy")
    if numpy is not None and saved is not None:
        key = numpy.array(saved["key"], dtype=numpy.uint32)
        state = {**saved, "state": {"key": key, "pos": saved["pos"]}}
        numpy.random.set_state(state)
    for name in _DEVICES:
        module: Any = getattr(torch, name)
        if name in states and module.is_available():
            for index, state in enumerate(states[name]):
                if name == "mps":
                    module.set_rng_state(state.clone())
                elif index < module.device_count():
                    module.set_rng_state(state.clone(), index)


def _numpy() -> Any:
    """The module, if the process uses it."""
    return sys.modules.get("numpy")
