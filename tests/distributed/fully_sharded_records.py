# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of records about models under ``fully_shard``: of their own parts."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import preamp
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from distributed.fully_sharded_checks import Run, batch, sgd
from distributed.ranks import each, shard
from preamp.core.tensors import local_of, storage_key
from preamp.kernels.wide_half import native_products
from preamp.numerics import NumericsRecord, measure
from preamp.optimizers import FusedAdam

EVEN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1),
}


def largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check_statistics_are_of_this_rank_s_part() -> None:
    for level, kind in each(("O0", "O1", "O2", "O5"), ("light", "full"), size=2):
        run = Run(level, scale=8.0, numerics=kind, numerics_every=1)
        run.backward()
        named = dict(run.model.named_parameters())
        scale = 8.0 if level in WITH_MASTERS else 1.0  # what is still on the gradients
        grads = {name: local_of(param.grad) / scale for name, param in named.items()}
        run.optimizer.step()
        (record,) = [r for r in run.engine.history if isinstance(r, NumericsRecord)]
        found = {(t.what, t.name): t for t in record.tensors}
        for name, grad in grads.items():
            told = found["gradient", name]
            assert told.elements == grad.numel()
            assert told.zeros == int(measure([grad])[0].tally.counts[0])
            assert told.max_abs / told.scale == largest(grad)
        assert any(not grad.numel() for grad in grads.values()) is (dist.get_rank() == 1)
        assert (("weight", "0.weight") in found) is (kind == "full")
        for name, param in named.items() if kind == "full" else ():
            told, weight = found["weight", name], local_of(param)
            assert told.elements == weight.numel()
            assert told.max_abs == largest(weight)
            if level in WITH_MASTERS:
                assert told.stalled is not None
                assert told.stalled <= weight.numel()


def check_memory_is_this_rank_s() -> None:
    """As estimated where parts are even; what a forward has gathered is no master."""
    for level, name in each(LEVEL_NAMES, EVEN, size=2):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        planned = EVEN[name](model.parameters())
        shares: Any = {"world_size": dist.get_world_size(), "sharding": "fsdp"}
        wanted = preamp.estimate(model, level, planned, **shares).categories
        optimizer = EVEN[name](shard(model).parameters())
        preamp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
        engine = preamp.engine_of(model)
        for step in range(2):
            with preamp.scale_loss(model(batch(0)).float().mean(), optimizer) as scaled:
                scaled.backward()
            if step:
                assert preamp.count_memory(engine) == wanted, (level, name)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch(0))
        assert preamp.count_memory(engine)["masters"] == wanted["masters"]


def check_reports_and_audits() -> None:
    """A parameter whose part is empty here is not one without gradients."""
    for level in each(("O1", "O2")):
        run = Run(level, scale=8.0, numerics="full", numerics_every=1)
        with preamp.audit_casts() as casts:
            for _ in range(3):
                run.step()
        assert {cast.function for cast in casts} == ({"linear"} if level == "O1" else set())
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            run.engine.report(path)
            assert "A gradient is always zero" not in path.read_text(encoding="utf-8")


def check_an_overflow_is_traced() -> None:
    """Each rank watches the modules that it runs; a rank alone sees what its own rows lead to."""
    for watches_always in each((True, False)):
        run = Run("O2", scale=8.0, **({"overflow": "trace"} if watches_always else {}))
        if not watches_always:
            run.engine.trace_overflow()
        run.step()
        with torch.no_grad():
            local_of(run.model[0].weight).fill_(4.0)
            rows = batch(run.rank)
            rows[0] = 2.0**14 if run.rank == 1 else 1.0
        with preamp.scale_loss(run.model(rows).float().mean(), run.optimizer) as scaled:
            scaled.backward()
        run.optimizer.step()
        assert run.engine.last_step_skipped
        (cause,) = run.engine.overflow_causes
        assert cause.was_watched
        seen = cause.trace and (cause.trace.module, cause.trace.phase)
        assert seen == (("0", "forward") if run.rank == 1 else None)


def check_what_casts_keep_until_the_backward() -> None:
    """Whole half copies of weights at O4, and none where weights are gathered in half."""
    side, layers = 32, 3
    for level, dtype, copies in (
        ("O0", None, 0),
        ("O4", None, layers - 1),  # the first layer's input has no gradient
        ("O4", torch.bfloat16, 0),
        ("O5", None, 0),
    ):
        options = {} if dtype is None else {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
        net = nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(layers)])
        model = shard(net, **options)
        preamp.initialize(model, sgd(model.parameters()), opt_level=level, verbosity=0)
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with native_products(), hooks:  # wide ones keep float32 copies
            loss = model(torch.ones(2, side)).float().sum()
        # What fully_shard gathered for a layer is released when its forward ends.
        kept = [t.untyped_storage() for t in saved if t.numel() == side * side]
        weights = {storage_key(storage): storage.nbytes() for storage in kept}
        assert sum(weights.values()) == copies * 2 * side * side, (level, dtype)
        loss.backward()
        preamp.engine_of(model).close()
