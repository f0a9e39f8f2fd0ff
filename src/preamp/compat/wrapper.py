# SPDX-License-Identifier: BSD-3-Clause
"""What both FP16 optimizers show of the optimizer inside."""

from __future__ import annotations

from typing import Any, NoReturn

from preamp.core.errors import PreampStateError, bad_state


class OptimizerWrapper:
    """An optimizer inside another object that belongs to one model.

    Attributes:
        optimizer: The inner optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        """Wrap ``optimizer``."""
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        """The inner optimizer's ``state``."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's ``param_groups``, with the masters in them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise _no_copies()

    def __setstate__(self, state: object) -> NoReturn:
        """Refuse to be unpickled."""
        raise _no_copies()


def _no_copies() -> PreampStateError:
    return bad_state(
        "An FP16_Optimizer cannot be pickled or copied",
        "Its masters belong to one model",
        "Save optimizer.state_dict(), and load it into one made for the other model",
    )
