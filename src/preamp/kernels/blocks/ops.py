# SPDX-License-Identifier: BSD-3-Clause
"""The back end put together."""

from preamp.kernels.blocks.elementwise import Elementwise
from preamp.kernels.blocks.reductions import Reductions
from preamp.kernels.blocks.updates import Updates


class Blocks(Elementwise, Reductions, Updates):
    """Every op in blocks."""
