# SPDX-License-Identifier: BSD-3-Clause
"""Layer-wise learning rates around any optimizer."""

from __future__ import annotations

from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.errors import bad_state, bad_type, with_article
from preamp.core.splits import Splits
from preamp.core.tensors import local_of
from preamp.core.torch_private.shards import place_gradients
from preamp.optim.fused.base import rate_of
from preamp.optim.master_parameter import leaf_of
from preamp.optim.rank_norms import complete_
from preamp.optim.table import pair_of
from preamp.policy.storage import FULL, Storage


class LARC:
    """Limits or scales each parameter's learning rate by the size of its weights and gradients.

    Per parameter, with p the weights, g the gradient, wd the group's weight decay,

        a = trust_coefficient · |p| / (|g| + wd · |p| + eps)
        a = min(a / lr, 1) if clip
        g = (g + wd · p) · a

    and then the wrapped optimizer steps, without weight decay of its own. Where a norm is zero
    g stays as it is, without weight decay. Norms and arithmetic are in float32 (float64 for
    float64 parameters), rounded once into the gradient.

    A wrapper, not an optimizer: give learning-rate schedulers the wrapped one, ``larc.optim``.
    Build it first, then pass it to ``preamp.initialize``, ``scale_loss`` and so on in the
    optimizer's place. It works on what the optimizer sees, float32 masters at O2 and O5, and
    leaves everything alone where a step is skipped. Norms of sharded parameters (``DTensor``) are
    those of the whole tensors, and cost one all-reduce.

    Formula: You, Gitman and Ginsburg, 2017, arXiv:1708.03888; the clipped form is NVIDIA's.

    Attributes:
        optim: The wrapped optimizer.
        trust_coefficient: Size of an update relative to that of the weights.
        clip: Whether the optimizer's learning rate is an upper limit; otherwise it is multiplied.
        eps: Added to the denominator.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        """Wrap ``optimizer``.

        Raises:
            TypeError: ``optimizer`` is no ``torch.optim.Optimizer``.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise bad_type(
                f"LARC was given {with_article(type(optimizer).__name__)}",
                "It wraps a torch.optim.Optimizer",
                "Pass the optimizer itself; wrap it before preamp.initialize",
            )
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def step(self) -> None:
        """Adapt the gradients and let the wrapped optimizer step. Does not synchronise by itself.

        Raises:
            PreampStateError: A gradient is sparse, or the host makes the update; nothing was
                changed.

        Mutates:
            Gradients, and what the optimizer does. Weight decays are zero while it steps.
        """
        check_storage(getattr(self.optim, "storage", FULL))
        decays: list[tuple[dict[str, Any], Any]] = []
        is_adapted = False

        # In a hook, since the engine decides inside optim.step() whether there is a step at all,
        # and has brought the masters up to date by the time hooks run.
        def adapt(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
            nonlocal is_adapted
            if is_adapted:  # hooks run twice where a subclass calls super().step
                return
            is_adapted = True
            self._adapt_all(optimizer)
            for group in optimizer.param_groups:
                if "weight_decay" in group:
                    decays.append((group, group["weight_decay"]))
                    group["weight_decay"] = 0.0

        handle = self.optim.register_step_pre_hook(adapt)
        try:
            self.optim.step()
        finally:
            handle.remove()
            for group, decay in decays:
                group["weight_decay"] = decay

    @torch.no_grad()
    def _adapt_all(self, optimizer: torch.optim.Optimizer) -> None:
        own = [
            (param, group)
            for group in optimizer.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        for param, _ in own:
            if param.grad.is_sparse:
                raise bad_state(
                    f"LARC found a sparse gradient of shape {tuple(param.shape)}",
                    "It takes dense gradients, since weight decay changes every element",
                    "Make the embedding with sparse=False, or step it with an optimizer of its own",
                )
        params = [param for param, _ in own]
        place_gradients(params)
        # Of each parameter its norm and its gradient's, of whole tensors
        norms = [torch.stack([cast("Any", t).norm() for t in _wide(param)]) for param in params]
        splits: Splits = getattr(optimizer, "splits", Splits())
        if splits.concern(params):
            over = [[splits.of(leaf_of(param))] for param in params]
            complete_([pair[:, None] for pair in norms], over, splits)
        for (param, group), pair in zip(own, norms, strict=True):
            self._adapt(param, pair, group)

    def _adapt(self, param: torch.Tensor, norms: torch.Tensor, group: dict[str, Any]) -> None:
        decay = group.get("weight_decay", 0.0)
        weights, wide = _wide(param)
        norm, grad_norm = norms.unbind()
        ratio = self.trust_coefficient * norm / (grad_norm + norm * decay + self.eps)
        if self.clip:
            ratio = (ratio / rate_of(group)).clamp(max=1.0)
        adapted = (wide + decay * weights) * ratio
        # Chosen on the device: asking a norm whether it is zero would wait for it.
        local_of(cast("torch.Tensor", param.grad)).copy_(
            torch.where((norm != 0) & (grad_norm != 0), adapted, wide)
        )

    # -- the surface of an optimizer ---------------------------------------------------------

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optim.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups; may be assigned."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state; LARC has none."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Drop them rather than fill them with zeros; by default what the wrapped
                optimizer does.
        """
        if set_to_none is None:
            self.optim.zero_grad()
        else:
            self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Give the wrapped optimizer another group."""
        self.optim.add_param_group(param_group)

    def __repr__(self) -> str:
        return repr(self.optim)


def check_storage(storage: Storage) -> None:
    """Raise `PreampStateError` for a storage that leaves LARC nothing to adapt in ``step``."""
    parts = {'masters="split"': storage.masters == "split", 'place="host"': storage.place == "host"}
    found = [name for name, is_chosen in parts.items() if is_chosen]
    if found:
        raise bad_state(
            f"LARC was used with storage that has {' and '.join(found)}",
            "It reads float32 masters and adapts whole gradients, on the device, in step()",
            "Pass the optimizer without LARC, or a storage without that",
        )


def _wide(param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a parameter and of its gradient, in the precision of the arithmetic."""
    dtype = math_dtype(param.dtype)
    grad, twin = cast("torch.Tensor", param.grad), pair_of(param)
    value = param.detach() if twin is None else twin.value()
    return local_of(value).to(dtype), local_of(grad.detach()).to(dtype)
