# SPDX-License-Identifier: BSD-3-Clause
"""The documentation check finds what is missing."""

from __future__ import annotations

from types import ModuleType

from check_docs import undocumented


def documented() -> None:
    """Do nothing."""


def bare() -> None: ...


class Half:
    """Has a docstring, unlike its method."""

    def method(self) -> None: ...


def module(name: str, **names: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names, __all__=list(names))
    return made


def test_complete_module_has_no_gaps() -> None:
    home = module("m", documented=documented)
    assert undocumented(home, home, "# Page\n\n::: m.documented\n") == []


def test_gaps_are_named() -> None:
    home = module("m", documented=documented, bare=bare, Half=Half)
    found = undocumented(home, home, "::: m.bare\n::: m.Half\n")
    assert found == [
        "m.documented: no '::: m.documented' in docs/api",
        "m.bare: no docstring",
        "m.Half.method: no docstring",
    ]


def test_a_facade_may_point_at_the_original() -> None:
    home = module("m", documented=documented)
    facade = module("m.amp", documented=documented)
    assert undocumented(facade, home, "the same: `documented`") == []
    assert len(undocumented(facade, home, "nothing")) == 1
