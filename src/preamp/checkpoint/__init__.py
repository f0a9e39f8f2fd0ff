# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of whole runs, and files of earlier ones, read without running code from them."""

from typing import TYPE_CHECKING

from preamp.checkpoint.background import Saving as Saving
from preamp.checkpoint.stopping import StopRequest as StopRequest
from preamp.checkpoint.stopping import stop_on_signal as stop_on_signal
from preamp.core.late import names

if TYPE_CHECKING:
    from preamp.checkpoint.apex.convert import convert_apex_checkpoint as convert_apex_checkpoint
    from preamp.checkpoint.apex.findings import Finding as Finding
    from preamp.checkpoint.apex.findings import describe as describe
    from preamp.checkpoint.apex.reader import ApexRecord as ApexRecord
    from preamp.checkpoint.apex.reader import read_apex_checkpoint as read_apex_checkpoint
    from preamp.checkpoint.apex.scalers import ScalerState as ScalerState
    from preamp.checkpoint.apex.scalers import plain_loss_scaler as plain_loss_scaler
    from preamp.checkpoint.saving import latest_checkpoint as latest_checkpoint
    from preamp.checkpoint.saving import read_checkpoint as read_checkpoint

# Checkpoints would be a third of the time of importing preamp.
__getattr__, __dir__ = names(
    "preamp.checkpoint",
    ApexRecord="apex.reader",
    Finding="apex.findings",
    ScalerState="apex.scalers",
    convert_apex_checkpoint="apex.convert",
    describe="apex.findings",
    latest_checkpoint="saving",
    plain_loss_scaler="apex.scalers",
    read_apex_checkpoint="apex.reader",
    read_checkpoint="saving",
)

__all__ = [
    "ApexRecord",
    "Finding",
    "Saving",
    "ScalerState",
    "StopRequest",
    "convert_apex_checkpoint",
    "describe",
    "latest_checkpoint",
    "plain_loss_scaler",
    "read_apex_checkpoint",
    "read_checkpoint",
    "stop_on_signal",
]
