# SPDX-License-Identifier: BSD-3-Clause
"""Right and wrong training scripts for the doctor: a few skeletons, and small edits of them.

Wrong scripts name the rules one of which must be found; right ones must have no finding at all.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import preamp
from insight import doctor_idioms
from insight.doctor_idioms import sections
from insight.doctor_scripts import KINDS
from insight.score import Score
from preamp.doctor import Examination, select_rules

_OWN_LINE = re.compile(r"(?m)^( *)\{(\w+)\}$")
_SLOTS = {name for row in KINDS.values() for name in re.findall(r"\{(\w+)\}", "".join(row))}
Slots = dict[str, str]


@dataclass(frozen=True)
class Case:
    """A script, and what the doctor must say of it."""

    name: str
    text: str
    expected: tuple[str, ...] = ()  # one of these must be found; none: no finding at all
    also: tuple[str, ...] = ()  # what the same bug may break besides


def case_of(name: str, rules: str, text: str) -> Case:
    """The case of a script; without rules it is a right one."""
    if not rules:
        return Case(f"right: {name}", text)
    first, *also = rules.split("+")
    return Case(f"wrong: {name}", text, tuple(first.split("|")), tuple(also))


class Kind:
    """A skeleton and its cases, as `doctor_scripts` spells them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.skeleton, text = KINDS[name]
        self._named: dict[str, Slots] = {}
        self._cases: list[tuple[str, str, Slots]] = []
        for head, body in sections(text):
            title, _, rules = head.partition(": ")
            slots = self._read(body)
            if title == "usual" or title.startswith("@"):
                self._named[title] = slots
            else:
                self._cases.append((f"{name}, {title}", rules, slots))

    def _read(self, body: str) -> Slots:
        slots: Slots = {}
        current = ""
        for line in body.strip("\n").splitlines():
            name, colon, content = line.partition(":")
            if line.startswith("@"):
                slots |= self._named[line]
            elif colon and name in _SLOTS:
                current = name
                slots[current] = content.removeprefix(" ")
            else:
                slots[current] += f"\n{line}"
        return slots

    def cases(self) -> Iterator[Case]:
        """All of them, right and wrong."""
        return (case_of(name, rules, self.script(slots)) for name, rules, slots in self._cases)

    def script(self, slots: Mapping[str, str]) -> str:
        """Fill the skeleton; a content may have slots itself."""
        values = {**self._named["usual"], **slots}
        unused = set(slots)

        def fill(match: re.Match[str]) -> str:
            unused.discard(match[2])
            lines = values.get(match[2], "pass").split("\n")
            return "\n".join(match[1] + line for line in lines)

        text, before = self.skeleton, ""
        while text != before:
            before, text = text, _OWN_LINE.sub(fill, text)
            for name in [name for name in values if f"{{{name}}}" in text]:
                unused.discard(name)
                text = text.replace(f"{{{name}}}", values[name])
        assert not unused, (self.name, unused)
        return text


SGD = "torch.optim.SGD(model.parameters(), lr=0.1)"
OPTIMIZERS = {
    "SGD": SGD,
    "momentum": SGD.replace("lr=0.1", "lr=0.1, momentum=0.9"),
    "Adam": "torch.optim.Adam(model.parameters(), lr=1e-3)",
    "AdamW fused": "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
}


def right_cases() -> list[Case]:
    """Scripts without a bug."""
    torch, amp = Kind("torch"), Kind("amp")
    found: dict[str, str] = {}
    for name, optimizer in OPTIMIZERS.items():
        found[f"torch, {name}"] = torch.script({"optimizer": optimizer})
        for level in ("O0", "O1", "O2", "O4", "O5"):
            found[f"{level}, {name}"] = amp.script({"level": level, "optimizer": optimizer})
    for level in ("O2", "O4", "O5"):
        found[f"{level}, its default scale"] = amp.script({"level": level, "scale": "None"})
    careful = {"optimizer": "torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)"}
    found["O3 with an eps"] = amp.script({"level": "O3", "scale": "1024.0", **careful})
    idioms = doctor_idioms.right_scripts()
    return [
        *(case_of(name, "", text) for name, text in found.items()),
        *(case for name in KINDS for case in Kind(name).cases() if not case.expected),
        *(case_of(f"idioms, {name}", "", text) for name, text in idioms.items()),
    ]


def wrong_cases() -> list[Case]:
    """Scripts with one bug each."""
    return [
        *(case for name in KINDS for case in Kind(name).cases() if case.expected),
        *(case_of(f"idioms, {n}", *flaw) for n, flaw in doctor_idioms.wrong_scripts().items()),
    ]


def examine(text: str, folder: Path) -> tuple[list[str], str]:
    """Run a script under the doctor; return the ids found, and why they may be incomplete."""
    path = folder / "script.py"
    path.write_text(text, "utf-8")
    examination, trouble = Examination(select_rules()), ""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with examination.watching():
                exec(compile(text, str(path), "exec"), names)
    except Exception as error:  # a wrong script may end so; the doctor reports all the same
        trouble = f" ({type(error).__name__}: {str(error)[:100]})"
    return [finding.rule.id for finding in examination.findings], trouble + "".join(
        f" [{note}]" for note in examination.notes
    )


def is_right(case: Case, ids: list[str], trouble: str) -> bool:
    """Whether what was found is the bug, and nothing else but what it entails."""
    if not case.expected:
        return not ids and not trouble
    return bool(set(ids) & set(case.expected)) and set(ids) <= {*case.expected, *case.also}


def _judge(case: Case, folder: Path) -> str:
    """What is wrong with the findings of a script, or nothing."""
    ids, trouble = examine(case.text, folder)
    if is_right(case, ids, trouble):
        return ""
    return f"{case.name}: {', '.join(ids) or 'nothing'}{trouble}"


def scores(every: int, offset: int) -> list[Score]:
    """Run each ``every``-th script, beginning with number ``offset``."""
    kinds = {"right": right_cases(), "wrong": wrong_cases()}
    preamp.install_apex_alias()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return [
                Score.of(
                    f"doctor, {kind} scripts",
                    (_judge(case, Path(folder)) for case in cases[offset::every]),
                )
                for kind, cases in kinds.items()
            ]
    finally:
        preamp.remove_apex_alias()
