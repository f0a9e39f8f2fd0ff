# SPDX-License-Identifier: BSD-3-Clause
"""What an optimizer updates: master weights, and gradients on their way there."""

from preamp.optim.direct import DirectGradients as DirectGradients
from preamp.optim.larc import LARC as LARC
from preamp.optim.master_parameter import MasterParameter as MasterParameter
from preamp.optim.master_parameter import leaf_of as leaf_of
from preamp.optim.masters import Masters as Masters
from preamp.optim.masters import cast_state as cast_state
from preamp.optim.twin import Twin as Twin
