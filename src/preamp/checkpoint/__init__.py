# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of whole runs, read without running code from them."""

from typing import TYPE_CHECKING

from preamp.checkpoint.background import Saving as Saving
from preamp.core.late import names

if TYPE_CHECKING:
    from preamp.checkpoint.saving import latest_checkpoint as latest_checkpoint
    from preamp.checkpoint.saving import read_checkpoint as read_checkpoint

# Checkpoints would be a third of the time of importing preamp.
__getattr__, __dir__ = names(
    "preamp.checkpoint", latest_checkpoint="saving", read_checkpoint="saving"
)

__all__ = ["Saving", "latest_checkpoint", "read_checkpoint"]
