# SPDX-License-Identifier: BSD-3-Clause
"""Loss scales: how they start, grow and back off."""

from preamp.scaling.records import SMALLEST_SCALE as SMALLEST_SCALE
from preamp.scaling.records import DynamicScale as DynamicScale
from preamp.scaling.records import ScaleRule as ScaleRule
from preamp.scaling.records import ScaleState as ScaleState
from preamp.scaling.records import StaticScale as StaticScale
from preamp.scaling.scaler import LossScaler as LossScaler
