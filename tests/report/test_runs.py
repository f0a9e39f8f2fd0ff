# SPDX-License-Identifier: BSD-3-Clause
"""Runs that really trained with a planted fault: the first line, place and advice are right."""

from __future__ import annotations

import pytest

from cases.selection import sampled
from insight.report import CASES, HEALTHY, Case, judge_case, train
from preamp.report import render
from preamp.report.advice import advise
from preamp.report.gather import gather


@pytest.mark.parametrize("case", sampled(CASES, 9))
def test_a_planted_fault_is_told_of_first(case: Case) -> None:
    assert judge_case(case) == ""


def test_a_case_that_is_told_of_wrongly_counts_as_wrong() -> None:
    faulty = next(case for case in CASES if case.name == "o3-scale-1-all-zero")
    said = judge_case(Case("x", HEALTHY[0].first, level="O3", net=faulty.net, loss=faulty.loss))
    assert said.startswith("x: first line; got 'All gradients are zero in float16, since step 1'")


def test_advice_of_a_page_never_asks_for_what_the_run_had() -> None:
    case = next(case for case in CASES if case.name == "forward-traced")
    records = train(case)
    assert "overflow=" not in " ".join(f.do for f in advise(gather(records)))
    page = render(records)
    assert page.index("The forward of blocks.1.spot makes inf") < page.index("What to do")
