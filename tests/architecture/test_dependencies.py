# SPDX-License-Identifier: BSD-3-Clause
"""Rooms import downwards only; each rule is also shown a planted violation."""

from collections.abc import Callable
from pathlib import Path

import pytest

from architecture import rules

PACKAGE = Path(__file__).parents[2] / "src" / "preamp"

Rule = Callable[[list[rules.Source]], list[str]]

RULES: tuple[Rule, ...] = (
    rules.dependency_violations,
    rules.import_circles,
    rules.forbidden_imports,
    rules.late_imports,
    rules.private_torch,
    rules.logic_in_exports,
)


@pytest.fixture(scope="module")
def sources() -> list[rules.Source]:
    return rules.read_package(PACKAGE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_tree_keeps(rule: Rule, sources: list[rules.Source]) -> None:
    assert rule(sources) == []


def test_every_room_has_a_row_and_every_row_a_room(sources: list[rules.Source]) -> None:
    rooms = {source.room for source in sources} - {"", "__main__"}
    assert rooms == {*rules.DEPTH, *rules.FACADES}


PLANTED = [
    (rules.dependency_violations, "core/x.py", "from preamp.policy import Policy", "point down"),
    (rules.dependency_violations, "core/x.py", "from preamp import policy", "point down"),
    (rules.dependency_violations, "optim/x.py", "from preamp.casting import a", "one row"),
    (rules.dependency_violations, "engine/x.py", "from preamp import amp", "a facade"),
    (rules.dependency_violations, "engine/x.py", "from preamp import initialize", "sees its rooms"),
    (rules.dependency_violations, "engine/x.py", "from . import step", "absolute"),
    (
        rules.dependency_violations,
        "engine/x.py",
        "def f():\n    from preamp.watch.trace import Tracer",
        "point down",
    ),
    (rules.dependency_violations, "attic/x.py", "import preamp.core", "no row"),
    (
        rules.dependency_violations,
        "core/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import preamp.engine",
        "point down",
    ),
    (rules.forbidden_imports, "kernels/plain/x.py", "import triton.language as tl", "triton"),
    (rules.forbidden_imports, "engine/x.py", "import torch.distributed as dist", "distributed"),
    (rules.late_imports, "engine/x.py", "def f():\n    import math", "math"),
    (rules.late_imports, "cli/x.py", "def f():\n    import preamp.watch", "preamp.watch"),
    (rules.private_torch, "engine/x.py", "import torch\ntorch._foreach_mul_(1, 2)", "_foreach"),
    (rules.private_torch, "engine/x.py", "from torch.nn import functional as F\nF._x", "F._x"),
    (rules.private_torch, "engine/x.py", "from torch.utils import _pytree", "_pytree"),
    (rules.private_torch, "engine/x.py", "import torch\ngetattr(torch, '_C')", "torch._C"),
    (rules.logic_in_exports, "amp/scaler.py", "class LossScaler:\n    pass", "re-exports"),
    (rules.logic_in_exports, "engine/__init__.py", "import math\nPI = math.pi", "re-exports"),
]


@pytest.mark.parametrize(("rule", "file", "text", "expected"), PLANTED)
def test_planted_violation_is_found(
    rule: Rule, file: str, text: str, expected: str, tmp_path: Path
) -> None:
    found = rule(plant(tmp_path, file, text))
    assert len(found) == 1
    assert expected in found[0]


def test_a_circle_of_imports_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "engine/a.py", "from preamp.engine.b import f")
    (tmp_path / "preamp/engine/b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import preamp.engine.a"
    )
    (found,) = rules.import_circles(rules.read_package(tmp_path / "preamp"))
    assert "preamp.engine.a imports preamp.engine.b" in found


ALLOWED = [
    ("engine/x.py", "from preamp.casting.io import a\nfrom preamp.core import b"),
    ("engine/x.py", "import preamp.engine.step"),
    ("cli/x.py", "import preamp\nfrom preamp.watch import run\nfrom preamp import scale_loss"),
    ("cli/x.py", "def f():\n    import rich"),
    ("kernels/triton/x.py", "import triton"),
    ("report/page.py", "def f():\n    import jinja2"),
    ("kernels/x.py", "import torch\ntorch._foreach_mul_(1, 2)"),
    ("distributed/x.py", "import torch.distributed"),
    ("engine/x.py", "import torch\nprint(torch.__version__, x._version)"),
    ("amp/__init__.py", "from preamp.engine import a\nfrom preamp.compat import b\n__all__ = []"),
]


@pytest.mark.parametrize(("file", "text"), ALLOWED)
def test_allowed_code_is_not_reported(file: str, text: str, tmp_path: Path) -> None:
    sources = plant(tmp_path, file, text)
    assert [line for rule in RULES for line in rule(sources)] == []


def plant(folder: Path, file: str, text: str) -> list[rules.Source]:
    path = folder / "preamp" / file
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")
    return rules.read_package(folder / "preamp")
