# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of a tree that are read together: values, kinds, and what is left alone."""

from __future__ import annotations

import torch

from preamp.core.late_numbers import LateNumber, read_numbers


def test_each_number_is_of_its_kind() -> None:
    tensor = torch.ones(2)
    tree = {
        "scale": LateNumber(float, torch.tensor(2.0**-149)),
        "count": [LateNumber(int, torch.tensor(2**31 - 1, dtype=torch.int32)), None],
        "flag": (LateNumber(bool, torch.tensor(True)), "text"),
        "tensor": tensor,
    }
    read = read_numbers(tree)
    assert read == {
        "scale": 2.0**-149,
        "count": [2**31 - 1, None],
        "flag": (True, "text"),
        "tensor": tensor,
    }
    assert [type(v) for v in (read["scale"], read["count"][0], read["flag"][0])] == [
        float,
        int,
        bool,
    ]
    assert isinstance(tree["scale"], LateNumber)
