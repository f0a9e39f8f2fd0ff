# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer updates: master weights, and gradients on their way there."""

from preamp.optim.gradients import DirectGradients as DirectGradients
from preamp.optim.gradients import HalfGradients as HalfGradients
from preamp.optim.gradients import State as State
from preamp.optim.larc import LARC as LARC
from preamp.optim.master_parameter import MasterParameter as MasterParameter
from preamp.optim.master_parameter import is_master as is_master
from preamp.optim.master_parameter import leaf_of as leaf_of
from preamp.optim.master_parameter import leaves_of as leaves_of
from preamp.optim.master_parameter import without_masters as without_masters
from preamp.optim.split import SplitTable as SplitTable
from preamp.optim.table import Twin as Twin
from preamp.optim.table import WeightPairs as WeightPairs
from preamp.optim.table import WeightTable as WeightTable
from preamp.optim.table import cast_state as cast_state
from preamp.optim.table import in_two_optimizers as in_two_optimizers
from preamp.optim.table import pair_of as pair_of
