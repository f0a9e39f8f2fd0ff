# SPDX-License-Identifier: BSD-3-Clause
"""Scripts with a known truth: nothing is found in right ones, and the bug in wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import preamp
from insight.doctor import Case, examine, is_right, right_cases, wrong_cases

CASES = [*right_cases(), *wrong_cases()]
EVERY = 12  # of them are in the quick suite
MISSED = {"wrong: trainer, an average of new bfloat16 tensors"}  # as the page of PA204 says


def _param(number: int, case: Case) -> Any:
    marks = [] if number % EVERY == 0 else [pytest.mark.full]
    if case.name in MISSED:
        marks.append(pytest.mark.xfail(strict=True, reason="a known limit of the rule"))
    return pytest.param(case, marks=marks, id=case.name)


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    preamp.install_apex_alias()
    yield
    preamp.remove_apex_alias()


@pytest.mark.parametrize("case", [_param(number, case) for number, case in enumerate(CASES)])
def test_the_doctor_is_right(case: Case, tmp_path: Path) -> None:
    ids, trouble = examine(case.text, tmp_path)
    assert is_right(case, ids, trouble), (ids, trouble)


def test_there_are_enough() -> None:
    assert len(right_cases()) >= 60
    assert len(wrong_cases()) >= 80
    assert len({case.name for case in CASES}) == len(CASES)
    assert MISSED <= {case.name for case in CASES}
