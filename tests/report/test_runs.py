# SPDX-License-Identifier: BSD-3-Clause
"""Runs that really trained with a planted fault: the first line, place and advice are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cases.planted import FAULTY, HEALTHY, Case, train
from preamp.report.advice import advise, judge
from preamp.report.gather import gather


@pytest.mark.parametrize("case", [*FAULTY, *HEALTHY], ids=lambda case: case.name)
def test_a_report_begins_with_what_is_wrong(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = gather(train(case))
    findings = advise(run)
    assert re.fullmatch(case.first, judge(run, findings).title)
    if case in FAULTY:
        first = findings[0]
        assert re.search(case.where, f"{first.title} {first.where} {first.number}")
        assert re.search(case.do, first.do)
    told = " ".join(finding.do for finding in findings)
    assert not case.never or not re.search(case.never, told)
