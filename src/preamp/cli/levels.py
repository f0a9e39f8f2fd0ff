# SPDX-License-Identifier: BSD-3-Clause
"""``preamp levels``: the table of opt levels."""

from __future__ import annotations

import torch
from rich.table import Table

import preamp
from preamp.cli.console import make_console
from preamp.core.dtypes import dtype_name


def levels() -> None:
    """Print what each opt level does by default."""
    table = Table(title="Opt levels", title_justify="left")
    table.add_column("level", style="bold")
    for heading in ("model cast to", "functions cast to", "batch norm", "masters", "loss scale"):
        table.add_column(heading, overflow="fold")
    table.add_column("in words", overflow="fold")
    for name, policy in preamp.OPT_LEVELS.items():
        table.add_row(
            name,
            _dtype(policy.cast_model_type),
            _dtype(policy.patch_torch_functions_type),
            "float32" if policy.keep_batchnorm_fp32 else "–",
            "float32" if policy.master_weights else "–",
            str(policy.loss_scale),
            policy.brief.split(":", 1)[-1].strip(),
        )
    make_console().print(table)


def _dtype(dtype: torch.dtype | None) -> str:
    return "–" if dtype is None else dtype_name(dtype)
