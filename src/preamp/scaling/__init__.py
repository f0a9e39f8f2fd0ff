# SPDX-License-Identifier: BSD-3-Clause
"""Loss scales: how they start, grow and back off."""

from preamp.scaling.scaler import SMALLEST_SCALE as SMALLEST_SCALE
from preamp.scaling.scaler import DynamicScale as DynamicScale
from preamp.scaling.scaler import LossScaler as LossScaler
from preamp.scaling.scaler import ScaleRule as ScaleRule
from preamp.scaling.scaler import ScaleState as ScaleState
from preamp.scaling.scaler import StaticScale as StaticScale
