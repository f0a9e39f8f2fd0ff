# SPDX-License-Identifier: BSD-3-Clause
"""How a model or an optimizer knows its engine without carrying it along."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from preamp.core.errors import PreampStateError, message

T = TypeVar("T", covariant=True)

ATTRIBUTE = "_preamp_link"
"""Name of the attribute that holds the link, on models and optimizers."""


class Link(Generic[T]):
    """A reference that stays behind when its holder is copied or pickled.

    Hooks and attributes on a user's model need the engine, but ``copy.deepcopy(model)`` and
    ``torch.save(model)`` must yield a model of its own, not a second handle on the engine.
    """

    __slots__ = ("target",)

    def __init__(self, target: T | None = None) -> None:
        self.target: T | None = target  # ``None`` in a copy and after `cut`

    def cut(self) -> None:
        """Forget the target."""
        self.target = None

    def __copy__(self) -> Link[T]:
        return Link()

    def __deepcopy__(self, memo: dict[int, Any]) -> Link[T]:
        return Link()

    def __reduce__(self) -> tuple[type[Link[T]], tuple[()]]:
        return (Link, ())


class NotScriptableError(PreampStateError, AttributeError):
    """TorchScript asked a hook for its name; whoever can do without finds none."""


class EngineHook:
    """Base of the module hooks that an engine attaches, by which they are known in copies."""

    @property
    def __name__(self) -> str:
        """What ``torch.jit.script``, and nobody else, cannot do without: it compiles hooks."""
        raise NotScriptableError(
            message(
                "torch.jit.script reached a model with the hooks of an engine of preamp",
                "TorchScript compiles hooks as well, and these cannot be",
                "Script copy.deepcopy(model), which has none at any level but O3, or the model "
                "after engine.close(); torch.jit.trace takes it as it is",
            )
        )
