# SPDX-License-Identifier: BSD-3-Clause
"""Each rule finds its bug at its line, and nothing without it; no run is changed by looking."""

import json
import re
from pathlib import Path

import pytest

from doctor.cases import BOOK, BUGS, HEALTHY
from doctor.harness import HERE, examine, examine_beside, marked_line, where
from doctor_page import FAMILIES, PAGE, START, render
from kit.refusals import assert_approved
from preamp.doctor import RULES, Examination, Rule, explain_text, list_text, select_rules
from preamp.doctor.catalogue import DETECTORS

pytestmark = pytest.mark.usefixtures("alias")


def ids(examination: Examination) -> list[str]:
    return [finding.rule.id for finding in examination.findings]


def told(rule: str, examination: Examination) -> str:
    """What the rule has found with its numbers, and which others have found something."""
    first = next(f for f in examination.findings if f.rule.id == rule)
    others = [f.rule.id for f in examination.findings if f is not first]
    return f"{' '.join([rule, *others])}: {first.what} {first.do} {json.dumps(first.numbers)}"


@pytest.mark.parametrize("name", BUGS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:optimizer.step.. was called with gradients that no scale_loss")
@pytest.mark.filterwarnings("ignore:.*was changed after scale_loss, while it was still multiplied")
def test_a_bug_is_found_where_it_is(name: str, tmp_path: Path) -> None:
    rule, text = BUGS[name].rule, BUGS[name].text
    examination = examine_beside(text, tmp_path)
    assert_approved(BOOK, name, told(rule, examination))
    assert examination.notes == []
    finding = next(f for f in examination.findings if f.rule.id == rule)
    assert where(finding) == ("script.py", marked_line(text))


RIGHT = {bug.healthy: name for name, bug in BUGS.items()}
RIGHT |= {text: name for name, text in HEALTHY.items()}


@pytest.mark.parametrize("text", RIGHT, ids=RIGHT.values())
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_script_without_a_bug_is_clean(text: str, tmp_path: Path) -> None:
    assert HERE not in text
    examination = examine_beside(text, tmp_path)
    assert examination.findings == []
    assert examination.notes == []


def test_clipping_by_a_function_of_torch_is_reported_once(tmp_path: Path) -> None:
    """Its norm is the same in each step, by which clipping by hand would be known."""
    text = BUGS["clipping without unscale_"].text.replace("range(4)", "range(9)")
    data = "    x, y = torch.randn(8, 16), torch.randint(4, (8,))\n"
    text = text.replace("    optimizer.zero_grad()\n", f"    optimizer.zero_grad()\n{data}")
    assert ids(examine(text, tmp_path, select=("PA101",))[0]) == ["PA101"]


def test_every_rule_has_a_bug() -> None:
    assert {bug.rule for bug in BUGS.values()} == set(RULES)


# -- the rules as data ----------------------------------------------------------------------------


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
