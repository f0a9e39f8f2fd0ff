# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer updates: master weights, and gradients on their way there."""

from preamp.optim.direct import DirectGradients as DirectGradients
from preamp.optim.direct import DirectMemo as DirectMemo
from preamp.optim.half_gradient import HalfGradient as HalfGradient
from preamp.optim.half_gradient import TwinMemo as TwinMemo
from preamp.optim.larc import LARC as LARC
from preamp.optim.master_parameter import MasterParameter as MasterParameter
from preamp.optim.master_parameter import is_master as is_master
from preamp.optim.master_parameter import leaf_of as leaf_of
from preamp.optim.master_parameter import pair_of as pair_of
from preamp.optim.masters import Masters as Masters
from preamp.optim.masters import cast_state as cast_state
from preamp.optim.twin import Twin as Twin
