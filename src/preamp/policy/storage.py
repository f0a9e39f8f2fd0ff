# SPDX-License-Identifier: BSD-3-Clause
"""How an engine keeps masters and moments between steps: `Storage`."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from preamp.core.errors import bad_type, bad_value

MasterStorage = Literal["float32", "split"]
MomentStorage = Literal["float32", "bfloat16", "8bit"]
Place = Literal["device", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How masters and moments are kept between steps; steps compute in float32 in any case.

    Attributes:
        masters: ``"float32"``, or ``"split"``: a half weight and the 16 bits that its master has
            beyond it, 4 bytes in place of 6. Exact for bfloat16 weights, and for float16 weights
            in float16's normal range; to 2**-41 below it.
        moments: ``"float32"``; ``"bfloat16"``, rounded stochastically; or ``"8bit"``, in blocks of
            one row with a scale each, rounded stochastically. Vectors and small tensors keep
            float32 moments with ``"8bit"``.
        seed: Of the stochastic rounding: runs of equal seeds round alike, on any number of
            threads, devices and ranks.
        release_gradients: Whether each gradient goes to the host as soon as a backward has made
            it, and waits there for its step: those of the whole model are never on the device
            together. For ``place="host"``.
        place: ``"device"``, beside the weights; or ``"host"``: masters and moments lie in the
            host's memory, and its processors make the update. In each step half weights and their
            gradients travel there, 2 bytes each for a parameter, and new half weights back. Of
            float32 weights it is 4 bytes each. What is accumulated over backwards adds up on the
            host. Pinned memory is that of three runs of 32 MiB, or of the largest tensor. Each step
            waits until the device has made its gradients; with ``release_gradients`` the host is at
            most two of them ahead of the device in a backward. Numbers are those that the back end
            for CPUs makes of the same gradients. Fused optimizers only; refused beside `LARC` and
            in a CUDA graph, and with ``release_gradients`` also beside sharded weights and in
            process groups.
    """

    masters: MasterStorage = "float32"
    moments: MomentStorage = "float32"
    seed: int = 0
    release_gradients: bool = False
    place: Place = "device"

    def __post_init__(self) -> None:
        """Refuse what is not known."""
        strings = {"masters": MasterStorage, "moments": MomentStorage, "place": Place}
        for name, allowed in strings.items():
            given, names = getattr(self, name), get_args(allowed)
            choices = f"It takes {', '.join(map(repr, names))}"
            if not isinstance(given, str):
                raise bad_type(
                    f"Storage got {name}={given!r}", choices, "Pass one of these strings"
                )
            if given not in names:
                raise bad_value(f"Storage got {name}={given!r}", choices, _hint(given, names))
        seeds = "It takes whole numbers from 0 to 2**32 - 1"
        try:
            seed = operator.index(self.seed)
        except TypeError:
            raise bad_type(f"Storage got seed={self.seed!r}", seeds, "Pass one of these") from None
        if not 0 <= seed < 2**32:
            raise bad_value(f"Storage got seed={self.seed!r}", seeds, "Pass one of these")
        object.__setattr__(self, "seed", seed)
        if not isinstance(self.release_gradients, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise bad_type(
                f"Storage got release_gradients={self.release_gradients!r}",
                "It takes True and False",
                "Pass one of these",
            )
        if self.release_gradients and self.place == "device":
            raise bad_value(
                "Storage got release_gradients=True, and masters and moments on the device",
                "Gradients are released to the host, which makes the update",
                "Pass place='host' as well, or leave it out",
            )


FULL = Storage()
STORAGES = {
    "full": FULL,
    "split": Storage(masters="split"),
    "compact": Storage(masters="split", moments="8bit"),
}
"""The storages that have a name."""


def describe_storage(
    masters: str, moments: str, *, release_gradients: bool = False, place: str = "device"
) -> str:
    """The name of a storage, or how one without a name is written."""
    given: dict[str, str | bool] = {"masters": masters, "moments": moments}
    given |= {"release_gradients": release_gradients, "place": place}
    for name, known in STORAGES.items():
        if all(getattr(known, key) == value for key, value in given.items()):
            return name
    usual = ("float32", "device", False)
    said = [f"{name}={value!r}" for name, value in given.items() if value not in usual]
    return f"Storage({', '.join(said)})"


def storage_name(storage: Storage) -> str:
    """As `describe_storage`, of a storage itself."""
    return describe_storage(
        storage.masters,
        storage.moments,
        release_gradients=storage.release_gradients,
        place=storage.place,
    )


def storage_code(name: str) -> str:
    """What ``initialize`` is given for the storage that `describe_storage` calls ``name``."""
    return f'"{name}"' if name in STORAGES else f"preamp.{name}"


def _hint(given: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(given.lower(), names, n=1)
    return f"Here {near[0]!r} was probably meant" if near else "Check the spelling"


def parse_storage(given: object) -> Storage:
    """Return the storage that ``initialize`` was given, by name or as it is.

    Raises:
        TypeError: It is neither.
        ValueError: No storage has that name.
    """
    if isinstance(given, Storage):
        return given
    if not isinstance(given, str):
        raise bad_type(
            f"initialize got storage={given!r}",
            f"It takes {', '.join(map(repr, STORAGES))}, or a preamp.Storage",
            'Pass storage="split", for example',
        )
    if given not in STORAGES:
        raise bad_value(
            f"initialize got storage={given!r}",
            f"The storages with a name are {', '.join(map(repr, STORAGES))}",
            f"{_hint(given, STORAGES)}; or pass a preamp.Storage(masters=..., moments=...)",
        )
    return STORAGES[given]
