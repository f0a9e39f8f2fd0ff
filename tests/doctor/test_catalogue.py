# SPDX-License-Identifier: BSD-3-Clause
"""The rules as data, what may be selected of them, and their page."""

import re
from pathlib import Path

import pytest

from doctor.cases import BUGS
from doctor.harness import examine
from doctor_page import FAMILIES, PAGE, START, render
from preamp.doctor import RULES, Rule, explain_text, list_text, select_rules
from preamp.doctor.catalogue import DETECTORS


def test_the_page_is_made_from_the_rules() -> None:
    """After a change of a rule: python tools/doctor_page.py."""
    text = PAGE.read_text("utf-8")
    assert text.count(START) == 1
    assert text == render(text)
    assert re.findall(r"^#### (PA\d{3})$", text, re.MULTILINE) == list(RULES)


def test_every_rule_is_in_one_detector_and_a_family() -> None:
    ids = [rule.id for detector in DETECTORS for rule in detector.RULES]
    assert sorted(ids) == list(RULES)
    assert {key[:3] for key in RULES} == set(FAMILIES)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_rule_says_everything(rule: Rule) -> None:
    assert not rule.title.endswith(".")
    for text in (rule.why, rule.how, rule.do):
        assert text.endswith(".")
        assert "  " not in text
    explained = explain_text(rule)
    assert explained.startswith(f"{rule.id} ({rule.severity.value}): {rule.title}\n")
    assert rule.do.split()[-1] in explained
    assert f"{rule.id}  {rule.severity.value}" in list_text([rule])


def test_selecting() -> None:
    def ids(*given: list[str]) -> list[str]:
        return [rule.id for rule in select_rules(*given)]

    assert ids() == list(RULES)
    assert ids(["PA101"]) == ["PA101"]
    assert ids(["PA3", "PA201"], ["PA302"]) == ["PA201", "PA301", "PA304"]
    with pytest.raises(ValueError, match="There is no rule ''"):
        select_rules([""])


def test_what_is_ignored_is_not_reported(tmp_path: Path) -> None:
    text = BUGS["clipping without unscale_"].text
    assert examine(text, tmp_path, select=("PA2", "PA3"))[0].findings == []
    assert len(examine(text, tmp_path, select=("PA1",))[0].findings) == 1
