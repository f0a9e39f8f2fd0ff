# SPDX-License-Identifier: BSD-3-Clause
"""Where torch's recurrent layers look their functions up."""

from __future__ import annotations

import importlib
from types import ModuleType


def recurrent_functions() -> ModuleType:
    """The module on which ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells find ``lstm`` etc.

    It is private to torch, and the only place: the layers do not use ``torch.lstm``.
    """
    return importlib.import_module("torch._VF")
