# SPDX-License-Identifier: BSD-3-Clause
"""Learning-rate schedulers that pause while steps are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from preamp.core.errors import bad_state, with_article
from preamp.engine.lookup import bare, find_engine


def step_scheduler(scheduler: Any, optimizer: Any, *args: Any) -> bool:
    """Step a learning-rate scheduler, unless the optimizer's latest step was skipped.

    For schedulers that count optimizer steps, such as warm-ups. Call it after
    ``optimizer.step()``, once for each. One that counts epochs is stepped directly.

    Args:
        scheduler: Anything with a ``step`` method, such as those of ``torch.optim.lr_scheduler``,
            or a list or tuple of them.
        optimizer: The optimizer whose steps count: one given to ``preamp.initialize``, a `LARC`
            around it, or a wrapper that says by its bool ``overflow`` whether it skipped its latest
            step, as every ``FP16_Optimizer`` does.
        *args: For ``scheduler.step``, such as the metric of ``ReduceLROnPlateau``. In a list all
            schedulers get them.

    Returns:
        Whether it was stepped. Always true where preamp is off (``enabled=False``).

    Raises:
        PreampStateError: ``optimizer`` has no engine and does not tell about its steps, or has not
            stepped yet.
        AttributeError: ``scheduler`` has no ``step``.
        LossScaleError: Scaling cannot go on after the latest step; see ``preamp.initialize``.

    Mutates:
        The scheduler, and with it learning rates. Synchronises where the device decides about
        skips, which is where neither the host nor the optimizer looks at gradients: it waits for
        the latest step.
    """
    several = isinstance(scheduler, (list, tuple))
    taken = _latest_was_taken(optimizer)
    if taken:
        every = cast("Sequence[Any]", scheduler) if several else [scheduler]
        for step in [one.step for one in every]:  # all have one, or none is stepped
            step(*args)
    return taken


def _latest_was_taken(optimizer: Any) -> bool:
    engine = find_engine(optimizer)
    if engine is None:
        overflow = getattr(optimizer, "overflow", None)
        if isinstance(overflow, bool):
            return not overflow
        raise bad_state(
            f"step_scheduler was given {with_article(type(optimizer).__name__)} that has no engine",
            "Whether a step was taken is known of optimizers that went through "
            "preamp.initialize, and of FP16_Optimizer",
            "Pass that very optimizer, or step the scheduler directly",
        )
    if not engine.policy.enabled:
        return True
    taken = engine.ledger.latest_taken(engine.sessions[id(bare(optimizer))])
    if taken is None:
        raise bad_state(
            f"step_scheduler was called before the first step of this {type(optimizer).__name__}",
            "It asks whether the optimizer's latest step was taken",
            "Call optimizer.step() first, then step_scheduler(scheduler, optimizer)",
        )
    return taken
