# SPDX-License-Identifier: BSD-3-Clause
"""The page on arguments has a section for each argument of ``initialize``, and no other."""

import inspect
import re
from pathlib import Path

import preamp

PAGE = Path(__file__).parents[2] / "docs" / "arguments.md"


def test_every_argument_has_a_section() -> None:
    sections = re.findall(r"^## `(\w+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(inspect.signature(preamp.initialize).parameters)
