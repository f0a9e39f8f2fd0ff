# SPDX-License-Identifier: BSD-3-Clause
"""The back end: every op of ``preamp.kernels.ops``."""

from __future__ import annotations

from preamp.core.tensors import devices_of
from preamp.kernels.ops import Tensors
from preamp.kernels.triton.elementwise import Elementwise
from preamp.kernels.triton.launch import check_devices
from preamp.kernels.triton.reductions import Reductions
from preamp.kernels.triton.works import Launch


class Triton(Elementwise, Reductions):
    """Every op in Triton's kernels."""

    name = "triton"
    works = Launch

    def _check(self, tensors: Tensors) -> None:
        check_devices(devices_of(tensors))
