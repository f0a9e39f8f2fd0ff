# SPDX-License-Identifier: BSD-3-Clause
"""Each rule speaks where it should, with the right number, and is silent where it should be."""

from __future__ import annotations

import math

import pytest

from cases import records as made
from preamp.numerics import CastsRecord, Record
from preamp.report.advice import RULES, Finding, advise
from preamp.report.gather import gather
from preamp.report.verdict import judge

STEPS = [made.step(n, 1 / n) for n in range(1, 101)]
CALM: list[Record] = [made.start(), *STEPS]


def skipping(steps: range, **changes: object) -> list[Record]:
    skipped = [made.step(n, skipped=n in steps, **changes) for n in range(1, 101)]
    return [made.start(), *skipped]


CASES: dict[str, tuple[list[Record], str, list[Record]]] = {
    "weights-not-finite": (
        [*CALM, made.look(9, made.tensor(what="weight", nonfinite=3))],
        "3 values at the latest look, the first in fc.weight.",
        [*CALM, made.look(9, made.tensor(nonfinite=3))],
    ),
    "loss-not-finite": (
        [*CALM, made.step(101, math.nan), made.overflow(7, loss_was_finite=False)],
        "In 2 steps, for the first time at step 7.",
        [*CALM, made.overflow(7)],
    ),
    "scale-at-floor": (
        [made.start(), made.step(1), made.step(2, scales={0: 0.25})],
        "Loss 0 ends at a scale of 2⁻².",
        [made.start(policy={"loss_scale": "1.0"}), made.step(1, scales={0: 1.0})],
    ),
    "overflow-in-one-place": (
        [*CALM, *(made.overflow(n) for n in (10, 20, 30)), made.overflow(40, "other")],
        "It came first in 3 of 4 skipped steps.",
        [
            made.start(),
            *(made.step(n, skipped=n < 9) for n in range(1, 50)),
            *(made.overflow(n) for n in range(1, 9)),
        ],
    ),
    "many-skips": (
        [made.start(), *(made.step(n, skipped=n % 4 == 0) for n in range(1, 101))],
        "25 of 100 steps: 25 %.",
        [made.start(), *(made.step(n, skipped=n % 6 == 0) for n in range(1, 101))],
    ),
    "skips-in-a-row": (
        skipping(range(40, 52)),
        "12 steps in a row, up to step 51.",
        skipping(range(40, 51)),
    ),
    "gradients-lost": (
        [*CALM, made.look(9, made.tensor(below_subnormal=11, headroom=4.5))],
        "11 % of the values that are not zero in fc.weight are lost at a loss scale of 2¹⁶.",
        [*CALM, made.look(9, made.tensor(below_subnormal=10))],
    ),
    "updates-stalled": (
        [*CALM, made.look(9, made.tensor(what="weight", stalled=31))],
        "31 % of the half weights stayed",
        [
            made.start(policy={"loss_scale": "dynamic", "master_weights": "True"}),
            made.look(9, made.tensor(what="weight", stalled=31)),
        ],
    ),
    "little-headroom": (
        [*CALM, made.look(9, made.tensor(what="activation", max_abs=5e4, headroom=0.4))],
        "The activation fc.weight reaches 5e+04, 0.4 powers of two below it.",
        [*CALM, made.look(9, made.tensor(headroom=0.4))],  # a gradient; its scale is dynamic
    ),
    "scale-at-ceiling": (
        [made.start(), *(made.step(n, scales={0: 2.0**24}) for n in range(4)), made.step(5)],
        "for 80 % of the steps.",
        CALM,
    ),
    "gradients-always-zero": (
        [*CALM, *(made.look(n, made.tensor(zeros=100)) for n in (1, 2))],
        "fc.weight had no value other than zero in 2 looks.",
        [*CALM, made.look(1, made.tensor(zeros=100)), made.look(2, made.tensor(zeros=99))],
    ),
    "casts-of-one-line": (
        [*CALM, CastsRecord(step=1, casts=[made.cast("a.py:1", 2**21), made.cast("b.py:1")])],
        "a.py:1 has 2.0 MiB cast",
        [*CALM, CastsRecord(step=1, casts=[made.cast("a.py:1"), made.cast("b.py:1", 9)])],
    ),
}


def found(records: list[Record], rule: str) -> list[Finding]:
    return [finding for finding in advise(gather(records)) if finding.id == rule]


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in RULES)


@pytest.mark.parametrize("rule", CASES)
def test_rule_speaks_with_its_number(rule: str) -> None:
    records, number, _ = CASES[rule]
    (finding,) = found(records, rule)
    assert number in finding.number.replace("\u00a0", " ")
    assert "{" not in finding.title + finding.number + finding.do


@pytest.mark.parametrize("rule", CASES)
def test_rule_is_silent_where_nothing_is_wrong(rule: str) -> None:
    assert found(CASES[rule][2], rule) == []


def test_a_calm_run_has_nothing_to_report() -> None:
    run = gather(CALM)
    assert advise(run) == []
    verdict = judge(run, [])
    assert (verdict.kind, verdict.title) == ("good", "Nothing to report")
    assert "100 steps, none of them skipped. The loss went from 1 to 0.01." in verdict.text
    assert "not looked at" in verdict.text


@pytest.mark.parametrize(("headroom", "words"), [(4.5, "8 times as large"), (1.5, "only 1.5")])
def test_advice_on_the_scale_depends_on_the_room_there_is(headroom: float, words: str) -> None:
    seen = made.look(9, made.tensor(below_subnormal=50, headroom=headroom))
    (finding,) = found([*CALM, seen], "gradients-lost")
    assert words in finding.do


def test_o0_loses_nothing_to_a_half_format() -> None:
    seen = made.look(9, made.tensor(below_subnormal=50, headroom=0.1))
    assert advise(gather([made.start(opt_level="O0"), *STEPS, seen])) == []


def test_a_verdict_names_the_worst() -> None:
    run = gather(CASES["loss-not-finite"][0])
    verdict = judge(run, advise(run))
    assert verdict.kind == "critical"
    assert verdict.title == "Something went wrong: the loss itself was infinite or nan"
    run = gather(CASES["updates-stalled"][0])
    assert judge(run, advise(run)).title == "1 thing deserves attention"
    run = gather(CASES["scale-at-ceiling"][0])
    assert judge(run, advise(run)).title == "Nothing to worry about, 1 note"
    assert judge(gather([]), []).kind == "empty"


def test_skips_before_the_first_step_are_a_scale_being_found() -> None:
    run = gather(skipping(range(1, 9)))
    assert "while the loss scale was being found" in judge(run, advise(run)).text


def test_names_with_braces_stay_as_they_are() -> None:
    records = [*CALM, *(made.overflow(n, "{0}{x}") for n in (10, 20, 30))]
    (finding,) = found(records, "overflow-in-one-place")
    assert "{0}{x}" in finding.title
