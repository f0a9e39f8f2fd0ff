# SPDX-License-Identifier: BSD-3-Clause
"""The interface Apex had before ``amp.initialize``: ``amp.init`` and what it returns."""

from preamp.compat.handle.handle import AmpHandle as AmpHandle
from preamp.compat.handle.handle import NoOpHandle as NoOpHandle
from preamp.compat.handle.handle import init as init
from preamp.compat.handle.optim_wrapper import OptimWrapper as OptimWrapper
