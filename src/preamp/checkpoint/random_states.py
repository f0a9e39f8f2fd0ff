# SPDX-License-Identifier: BSD-3-Clause
"""The states of the random generators of Python, numpy and torch as plain data, and back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from preamp.core.errors import bad_state, bad_value

_DEVICES = ("cuda", "xpu", "mps")
_NUMPYS = "MT19937"


def random_states() -> dict[str, Any]:
    """Return the states of all generators that are in use, as plain data.

    May synchronise. Raises `PreampStateError` if numpy's generator is another than the usual one.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64, device="cpu"), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = _numpy()
    if numpy is not None:
        states["numpy"] = _numpy_state(numpy)
    for name in _DEVICES:
        module: Any = getattr(torch, name)
        if module.is_available() and (name == "mps" or module.is_initialized()):
            states[name] = (
                [module.get_rng_state()] if name == "mps" else list(module.get_rng_state_all())
            )
    return states


def prepare_random_states(states: Mapping[str, Any]) -> Callable[[], None]:
    """Return what sets the generators of this process to `random_states`.

    Those of devices that are not here stay as they are. Raises `ValueError`, before anything
    changes, if a generator does not take its state.
    """
    try:
        return _prepare(states)
    except Exception as error:  # numpy's and torch's say so in many ways
        raise bad_value(
            f"The checkpoint has random states that cannot be set: {error!r}",
            "States load that save_checkpoint has written, into generators that this Python, "
            "numpy and torch have; nothing was loaded",
            "Leave them out with rng=False",
        ) from error


def _prepare(states: Mapping[str, Any]) -> Callable[[], None]:
    version, numbers, gauss = states["python"]
    python = (version, tuple(numbers.tolist()), gauss)
    random.Random().setstate(python)
    applies: list[Callable[[], object]] = [partial(random.setstate, python)]
    own = states["torch"].clone()
    torch.Generator().set_state(own)
    applies.append(partial(torch.set_rng_state, own))
    numpy, saved = _numpy(), states.get("numpy")
    if numpy is not None and saved is not None:
        applies.append(_prepare_numpy(numpy, saved))
    for name in _DEVICES:
        module: Any = getattr(torch, name)
        if name in states and module.is_available():
            count = 1 if name == "mps" else module.device_count()
            for index, state in enumerate(states[name][:count]):
                if name == "mps" or module.is_initialized():  # else it would be
                    torch.Generator(f"{name}:{index}").set_state(state)
                setting = (state.clone(),) if name == "mps" else (state.clone(), index)
                applies.append(partial(module.set_rng_state, *setting))

    def apply() -> None:
        for apply_one in applies:
            apply_one()

    return apply


def _numpy() -> Any:
    """The module, if the process uses it."""
    return sys.modules.get("numpy")


def _numpy_state(numpy: Any) -> dict[str, Any]:
    state: dict[str, Any] = numpy.random.get_state(legacy=False)
    name, inner = str(state["bit_generator"]), state["state"]
    if name != _NUMPYS:
        raise bad_state(
            f"numpy's global random generator was made to be {name}",
            f"Checkpoints hold the state of the usual one, {_NUMPYS}",
            "Draw from a numpy.random.Generator of your own, and save its bit_generator.state in "
            "extra",
        )
    return {
        "bit_generator": name,
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
        "key": [int(word) for word in inner["key"]],
        "pos": int(inner["pos"]),
    }


def _prepare_numpy(numpy: Any, saved: Mapping[str, Any]) -> Callable[[], None]:
    state = dict(saved)
    state["state"] = {"key": state.pop("key"), "pos": state.pop("pos")}
    there = numpy.random.get_state(legacy=False)["bit_generator"]
    if {there, state["bit_generator"]} != {_NUMPYS}:
        raise ValueError(f"numpy's generators are not both {_NUMPYS}")
    if state["state"]["pos"] not in range(625):  # numpy believes it, and would read beyond
        raise ValueError("numpy's generator would be beyond its words")
    numpy.random.RandomState().set_state(state)
    return partial(numpy.random.set_state, state)
