# SPDX-License-Identifier: BSD-3-Clause
"""The names of the package ``apex`` itself."""

from __future__ import annotations

import warnings

from preamp.core.ranks import is_first_rank


class DeprecatedFeatureWarning(FutureWarning):
    """Category of Apex's own deprecations, which scripts name in their warning filters."""


def deprecated_warning(msg: str) -> None:
    """Warn that a feature is deprecated, on the first rank only."""
    if is_first_rank():
        warnings.warn(msg, DeprecatedFeatureWarning, stacklevel=2)
