# SPDX-License-Identifier: BSD-3-Clause
"""Books of approved words: in order, and nothing in them that no test asks for."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BOOKS = sorted((TESTS / "approved").glob("*.txt"))


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_a_book_has_each_name_once_and_some_test_names_it(book: Path) -> None:
    names = [line.split(" | ", 1)[0] for line in book.read_text("utf-8").splitlines()]
    assert names == list(dict.fromkeys(names))
    sources = [path.read_text("utf-8") for path in TESTS.rglob("*.py")]
    asking = "\n".join(source for source in sources if f'"{book.stem}"' in source)
    assert [name for name in names if f'"{name}"' not in asking] == []
