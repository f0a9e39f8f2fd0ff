# SPDX-License-Identifier: BSD-3-Clause
"""Files of earlier runs: read without running code from them, and written as plain data."""

from preamp.checkpoint.convert import Finding as Finding
from preamp.checkpoint.convert import convert_apex_checkpoint as convert_apex_checkpoint
from preamp.checkpoint.convert import describe as describe
from preamp.checkpoint.reader import ApexRecord as ApexRecord
from preamp.checkpoint.reader import read_apex_checkpoint as read_apex_checkpoint
from preamp.checkpoint.scaler_state import ScalerState as ScalerState
from preamp.checkpoint.scaler_state import plain_loss_scaler as plain_loss_scaler
