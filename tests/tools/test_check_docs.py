# SPDX-License-Identifier: BSD-3-Clause
"""The documentation check finds what is missing."""

from __future__ import annotations

from types import ModuleType

from check_docs import main, undocumented, unexplained


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


class Told:
    """Takes ``first``."""

    def method(self, first: int, second: int) -> None:
        """Take both."""


def test_arguments_that_nothing_tells_of_are_named() -> None:
    home = module("m", Told=Told, documented=documented)
    texts = {"m.Told": "", "m.documented": ""}
    assert unexplained(home, texts) == ["m.Told.method: nothing tells what 'second' is"]
    assert unexplained(home, {"m.Told": "`second` comes last"}) == []


def test_every_public_name_has_its_entry_and_every_argument_is_told() -> None:
    assert main() == 0
