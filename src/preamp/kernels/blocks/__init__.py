# SPDX-License-Identifier: BSD-3-Clause
"""torch's operations on blocks: of the cache's size on a CPU, joined tensors on accelerators.

A block holds several small tensors, or a piece of a large one, and whatever has to happen to it
happens while it is at hand. On a CPU memory is thereby read and written once, torch's fused kernels
do what they can, and flags and learning rates are read at once, which waits for nobody. On other
devices blocks are large, launches few, and nothing is read back to the host.

Tensors that are not dense, or lie in another order than their gradients, and sparse or complex ones
take the reference back end instead, one by one.
"""

from preamp.kernels.blocks.cut import Sizes as Sizes
from preamp.kernels.blocks.ops import Blocks as Blocks
