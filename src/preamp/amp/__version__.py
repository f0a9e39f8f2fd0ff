# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.__version__``: that of Apex's interface; preamp's own is ``preamp.__version__``."""

from preamp.compat.amp_version import VERSION as VERSION
from preamp.compat.amp_version import __version__ as __version__

__all__ = ["VERSION", "__version__"]
