# SPDX-License-Identifier: BSD-3-Clause
"""The FP16_Optimizer of early 2019's ``apex.optimizers``: one flat master for each group."""

from preamp.compat.flat.optimizer import FP16_Optimizer as FP16_Optimizer
