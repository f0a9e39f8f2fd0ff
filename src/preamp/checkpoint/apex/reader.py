# SPDX-License-Identifier: BSD-3-Clause
"""Read files that scripts wrote with Apex, without running anything they contain.

torch's own restricted unpickler does the work: tensors, plain containers, and the classes named
here, for which an inert stand-in takes the place of Apex's. Everything else is refused by name.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from preamp.checkpoint.formats import ZIP, cause_of, check_pickle, check_zip, class_asked_for
from preamp.core.errors import message
from preamp.core.files import open_regular

APEX_CLASSES = (
    "apex.amp.scaler.LossScaler",
    "apex.fp16_utils.loss_scaler.LossScaler",
    "apex.fp16_utils.loss_scaler.DynamicLossScaler",
)
"""The classes whose objects Apex's own state dicts contain."""


_OLD_PICKLES = 5  # in a file of the older format: three of its head, the content, the storages

_ONE_AT_A_TIME = threading.Lock()
"""torch's list of safe classes is the process's: leaving it would end another thread's reading."""


class ApexRecord:
    """What a file says about an object of Apex: the name of its class, and its attributes.

    Attributes:
        class_name: Dotted path of the class.
        attributes: The object's ``__dict__``.
    """

    class_name = ""
    attributes: dict[str, Any]

    def __new__(cls) -> ApexRecord:
        """Take no arguments: none of Apex's objects was pickled with any."""
        record = super().__new__(cls)
        record.attributes = {}
        return record

    def __setstate__(self, state: object) -> None:
        """Take the attributes from a pickle, as they are."""
        if not isinstance(state, dict) or not all(
            isinstance(key, str) for key in cast("dict[Any, Any]", state)
        ):
            raise pickle.UnpicklingError(f"{self.class_name} has a state of its own kind")
        self.attributes = dict(cast("dict[str, Any]", state))

    def __repr__(self) -> str:
        """Name the class."""
        return f"<record of {self.class_name}>"


def _stand_in(class_name: str) -> type[ApexRecord]:
    module, _, name = class_name.rpartition(".")
    # The restricted unpickler finds classes by these two names.
    names = {"__module__": module, "__qualname__": name, "class_name": class_name}
    return cast("type[ApexRecord]", type(name, (ApexRecord,), names))


_STAND_INS = [_stand_in(name) for name in APEX_CLASSES]


def read_apex_checkpoint(
    path: str | os.PathLike[str], *, map_location: torch.device | str = "cpu"
) -> Any:
    """Read a file written by ``torch.save``, in the zip or the older format.

    Nothing in the file is executed: it may hold tensors, numbers, strings, plain containers, and
    Apex's loss scalers, which come back as `ApexRecord`. Classes that the process itself declared
    harmless by ``torch.serialization.add_safe_globals`` are read as well.

    Args:
        path: The file.
        map_location: Where its tensors go.

    Returns:
        What was saved: for most scripts a dict.

    Raises:
        OSError: There is no such file, or it cannot be opened.
        ValueError: The file contains anything else, or is not one of ``torch.save``.
    """
    try:
        with open_regular(Path(path)) as file:
            _check(file)
            with _ONE_AT_A_TIME, torch.serialization.safe_globals(cast("Any", _STAND_INS)):
                return cast("Any", torch).load(file, map_location=map_location, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes torch raise nearly anything
        raise ValueError(_refusal(path, error)) from error


def _check(file: BinaryIO) -> None:
    """Raise nearly anything if reading the file could take all time or memory."""
    if file.read(len(ZIP)) == ZIP:
        check_zip(file)
    else:
        # Mapped, it gives no more than it has, however much a pickle asks for.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            for _ in range(_OLD_PICKLES):
                check_pickle(mapped, len(mapped))
    file.seek(0)


def _refusal(path: str | os.PathLike[str], error: Exception) -> str:
    name = class_asked_for(error)
    if name is not None:
        return message(
            f"{os.fspath(path)} asks for {name}, which is neither a tensor nor plain data",
            f"Tensors, plain containers and records of {', '.join(APEX_CLASSES)} are read; "
            "anything else could run code, so nothing of the file was used",
            "If you trust its origin, load it with torch.load(path, weights_only=False), take "
            "out what is not plain data, and save it again",
        )
    return message(
        f"{os.fspath(path)} cannot be read: {cause_of(error)}",
        "Files written by torch.save are read, in the zip and in the older format",
        "Check that the file is complete and is a checkpoint",
    )
