# SPDX-License-Identifier: BSD-3-Clause
"""The faults that ``tools/mutants.py`` plants are faults of the code as it is."""

from __future__ import annotations

import mutants


def test_each_fault_stands_once_in_its_file() -> None:
    faults = [(file, text) for (file, _), pairs in mutants.FAULTS.items() for text, _ in pairs]
    assert len(faults) >= 40
    assert [fault for fault in faults if mutants.text_of(fault[0]).count(fault[1]) != 1] == []
