# SPDX-License-Identifier: BSD-3-Clause
"""``python -m preamp.parallel.multiproc script.py arguments``: one process per device."""

import sys

from preamp.distributed.launch import main as main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
