# SPDX-License-Identifier: BSD-3-Clause
"""What ``importlib.metadata`` says of the distribution ``apex`` while the alias is on."""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path

NAME = "apex"

# Apex's version never changed from this one, which frameworks compare with.
_FILES = {
    "METADATA": f"""Metadata-Version: 2.1
Name: {NAME}
Version: 0.1
Summary: preamp under the name apex
""",
    "top_level.txt": "apex\namp_C\napex_C\nfused_adam_cuda\n",
}


class AliasDistribution(Distribution):
    """A distribution without files on the disk."""

    def read_text(self, filename: str) -> str | None:
        """The text of a metadata file such as ``METADATA``, or ``None`` if there is none."""
        return _FILES.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return ``path``; there is no folder that it could be relative to."""
        return Path(path)
