# SPDX-License-Identifier: BSD-3-Clause
"""Plain torch operations; the definition of every op. See `preamp.kernels.ops`."""

from preamp.kernels.reference.ops import cast_copy_ as cast_copy_
from preamp.kernels.reference.ops import census as census
from preamp.kernels.reference.ops import l2norm as l2norm
from preamp.kernels.reference.ops import name as name
from preamp.kernels.reference.ops import scale_add_ as scale_add_
from preamp.kernels.reference.ops import widen_add as widen_add
