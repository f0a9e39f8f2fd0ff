# SPDX-License-Identifier: BSD-3-Clause
"""torch's operations on lists: the definition of every op, on every device.

Lists are walked in runs that stay in a CPU's cache, and few launches elsewhere: several small
tensors, or a piece of a large one. On CPUs torch's fused kernels update where a rule is theirs and
tensors lie densely; the formulas of `preamp.kernels.rules` do all else, each operation rounded on
its own. Values on a CPU are read at once, which waits for nobody; nothing else is read.

It takes what other back ends do not: float64, complex and sparse tensors, gaps in memory, tensors
of a place that lie in different orders, and the meta device.
"""

from preamp.kernels.plain.ops import Plain as Plain
