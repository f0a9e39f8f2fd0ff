# SPDX-License-Identifier: BSD-3-Clause
"""``python -m preamp``: the same as the ``preamp`` command."""

from __future__ import annotations

from preamp.cli.main import main

if __name__ == "__main__":
    main()
