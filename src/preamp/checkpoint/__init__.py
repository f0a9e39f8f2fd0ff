# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of whole runs, and files of earlier ones, read without running code from them."""

from preamp.checkpoint.background import Saving as Saving
from preamp.checkpoint.convert import Finding as Finding
from preamp.checkpoint.convert import convert_apex_checkpoint as convert_apex_checkpoint
from preamp.checkpoint.convert import describe as describe
from preamp.checkpoint.entry import latest_checkpoint as latest_checkpoint
from preamp.checkpoint.entry import read_checkpoint as read_checkpoint
from preamp.checkpoint.reader import ApexRecord as ApexRecord
from preamp.checkpoint.reader import read_apex_checkpoint as read_apex_checkpoint
from preamp.checkpoint.scaler_state import ScalerState as ScalerState
from preamp.checkpoint.scaler_state import plain_loss_scaler as plain_loss_scaler
from preamp.checkpoint.stopping import StopRequest as StopRequest
from preamp.checkpoint.stopping import stop_on_signal as stop_on_signal
