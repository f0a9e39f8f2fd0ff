# SPDX-License-Identifier: BSD-3-Clause
"""What a release says of itself agrees: versions, Pythons, systems, addresses, workflows."""

import re
from pathlib import Path

import pytest

import preamp

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
NOT_YET = "preamp.example"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def runs() -> str:
    """The lines of the support table where something was run."""
    lines = text("docs/support.md").partition("\n| torch | Python |")[2].partition("\n\n")[0]
    return "\n".join(line for line in lines.splitlines() if "not run" not in line)


def open_addresses(version: str, texts: list[str]) -> int:
    """How many made-up addresses a release would publish; before one they may stand."""
    return 0 if ".dev" in version else sum(text.count(NOT_YET) for text in texts)


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {preamp.__version__}\n" in text("CITATION.cff")


def test_the_oldest_versions_are_in_the_table_and_in_a_workflow() -> None:
    python = re.search(r'requires-python = ">=([\d.]+)"', text("pyproject.toml"))
    torch = re.search(r'"torch>=([\d.]+)"', text("pyproject.toml"))
    assert python
    assert torch
    versions = text(".github/workflows/versions.yml")
    for oldest in (python[1], torch[1]):
        assert oldest in runs()
        assert oldest in versions


def test_a_release_has_addresses() -> None:
    names = ["pyproject.toml", "SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml"]
    texts = [text(name) for name in names]
    assert open_addresses("0.1.0", [f"https://{NOT_YET}/"]) == 1
    assert open_addresses("0.1.0.dev0", [f"https://{NOT_YET}/"]) == 0
    assert open_addresses(preamp.__version__, texts) == 0


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_what_they_use_and_may_only_read(workflow: Path) -> None:
    content = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", content)
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name)] == []
    assert "\npermissions:\n  contents: read\n" in content


def test_the_changelog_is_read_in_two_minutes() -> None:
    section = text("CHANGELOG.md").partition("\n## [")[2].partition("\n## [")[0]
    assert len(section.split()) <= 400


FROM_AN_INDEX = re.compile(r"""pip install [^\n]*?['"]?\bpreamp\b|preamp\[""")
OF_A_CLONE = re.compile(r"""pip install (?:-e )?'\.\[([\w,]+)\]'|how_to_install\(['"](\w+)['"]\)""")


def test_nothing_says_to_install_from_an_index() -> None:
    """There is no preamp on any; what is said are extras that a clone has."""
    for line in ("pip install preamp", 'pip install "preamp[cli]"', "pip install -U 'preamp[cpu]'"):
        assert FROM_AN_INDEX.search(line), line
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
    texts = {file.name: file.read_text(encoding="utf-8") for file in files}
    assert [name for name, content in texts.items() if FROM_AN_INDEX.search(content)] == []
    found = {"".join(two) for content in texts.values() for two in OF_A_CLONE.findall(content)}
    named = {extra for several in found for extra in several.split(",")}
    project = pytest.importorskip("tomllib").loads(text("pyproject.toml"))["project"]
    assert {"cli", "cpu", "report", "tensorboard"} <= named <= {*project["optional-dependencies"]}
