# SPDX-License-Identifier: BSD-3-Clause
"""Plain torch operations; the definition of every op. See `preamp.kernels.ops`."""

from preamp.kernels.reference.ops import Reference as Reference
