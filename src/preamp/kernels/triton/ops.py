# SPDX-License-Identifier: BSD-3-Clause
"""The back end put together."""

from preamp.kernels.triton.elementwise import Elementwise
from preamp.kernels.triton.reductions import Reductions
from preamp.kernels.triton.updates import Updates


class Triton(Elementwise, Reductions, Updates):
    """Every op in Triton's kernels."""

    name = "triton"
