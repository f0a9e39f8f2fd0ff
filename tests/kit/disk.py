# SPDX-License-Identifier: BSD-3-Clause
"""A folder of checkpoints, each of a model whose weights all have one value."""

from pathlib import Path
from typing import Any

from torch import nn

import preamp


class Disk:
    """Saves and loads files of such models.

    A program of `play` says which: ``8`` saves one as ``step_8``, and ``-x`` makes a file of
    somebody else's that is called so.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "run_1.safetensors"

    def of(self, number: object) -> Path:
        return self.folder / f"step_{number}"

    def save(self, value: float, path: Path | None = None, **options: Any) -> Any:
        model, options = nn.Linear(3, 2), {"extra": {"value": value}, **options}
        for param in model.parameters():
            nn.init.constant_(param, value)
        return preamp.save_checkpoint(path or self.path, model, **options)

    def value(self, path: Path | None = None) -> float:
        """That of all weights in a file, which says it itself as well."""
        model = nn.Linear(3, 2)
        extra = preamp.load_checkpoint(path or self.path, model)
        assert {x for p in model.parameters() for x in p.flatten().tolist()} == {extra["value"]}
        return extra["value"]

    def play(self, program: str, **options: Any) -> None:
        for word in program.split():
            if word.startswith("-"):
                (self.folder / word[1:]).write_bytes(b"mine")
            else:
                self.save(float(word), self.of(word), **options)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())
