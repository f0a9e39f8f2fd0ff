# SPDX-License-Identifier: BSD-3-Clause
"""Right and wrong training scripts for the doctor: a few skeletons, and small edits of them.

Wrong scripts name the rules one of which must be found; right ones must have no finding at all.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import textwrap
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import preamp
from insight import doctor_idioms
from insight.doctor_scripts import FURTHER
from insight.score import Score
from preamp.doctor import Examination, select_rules

HEAD = """
import copy, io, math, sys
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
data = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range({steps})]
{model}
"""
LOOP = (
    HEAD
    + """
<begin>
{setup}
for step, (x, y) in enumerate(data):
    {zero}
<forward>
    {loss}
    {backward}
    {between}
    {step}
    {after}
{end}
"""
)


def loop(begin: str, forward: str) -> str:
    """A script with slots around the lines before its loop, and those of its forward."""
    return LOOP.replace("<begin>", begin).replace("<forward>", textwrap.indent(forward, "    "))


TORCH = loop(
    "optimizer = {optimizer}\n{scaler}",
    'with torch.autocast("cpu", torch.{dtype}):\n'
    "    output = model(x)\n    loss = F.cross_entropy(output, y)",
)
AMP = loop(
    "from apex import amp\noptimizer = {optimizer}\n"
    'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}", verbosity=0,\n'
    "                                  loss_scale={scale})\n"
    'if {scale} == "dynamic":\n    amp._amp_state.loss_scalers[0]._loss_scale = {start}',
    "loss = F.cross_entropy(model(x).float(), y)",
)
HAND = loop(
    "model.to(torch.{dtype})\noptimizer = {optimizer}",
    "loss = F.cross_entropy(model(x.to(torch.{dtype})).float(), y)",
)
MASTERS = loop(
    "model.half()\nmasters = {masters}\noptimizer = {optimizer}",
    "loss = F.cross_entropy(model(x.half()).float(), y)",
)
SCALED = "with amp.scale_loss(loss, optimizer) as scaled_loss:\n    scaled_loss.backward()"
DEFAULTS = {
    "steps": "12",
    "optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "scaler": 'scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)',
    "zero": "optimizer.zero_grad()",
    "step": "optimizer.step()",
    "backward": "loss.backward()",
    "dtype": "float16",
    "start": "1024.0",
}
OF = {
    TORCH: {
        "backward": "scaler.scale(loss).backward()",
        "step": "scaler.step(optimizer)\nscaler.update()",
    },
    AMP: {"backward": SCALED, "level": "O2", "scale": '"dynamic"'},
    HAND: {"dtype": "bfloat16"},
    MASTERS: {
        "masters": "[p.detach().clone().float().requires_grad_() for p in model.parameters()]",
        "optimizer": "torch.optim.SGD(masters, lr=0.1, momentum=0.9)",
        "zero": "model.zero_grad()",
        "backward": "(loss * 128.0).backward()",
        "between": "for m, p in zip(masters, model.parameters()):\n"
        "    m.grad = p.grad.float() / 128.0",
        "after": "for m, p in zip(masters, model.parameters()):\n    p.data.copy_(m.data)",
    },
}


def script(skeleton: str, **slots: str) -> str:
    """Fill the skeleton's slots; further lines of a slot are indented as its first one."""
    usual = OF.get(skeleton) or next(row[2] for row in FURTHER if row[1] == skeleton)
    values = {**DEFAULTS, **usual, **slots}
    used: set[str] = set()

    def fill(match: re.Match[str]) -> str:
        indent, name = match[1], match[2]
        used.add(name)
        return "\n".join(indent + line for line in values.get(name, "pass").split("\n"))

    text = re.sub(r"(?m)^( *)\{(\w+)\}$", fill, skeleton)
    for name, value in values.items():
        if f"{{{name}}}" in text:
            used.add(name)
            text = text.replace(f"{{{name}}}", value)
    assert set(slots) <= used, set(slots) - used
    return text


@dataclass(frozen=True)
class Case:
    """A script, and what the doctor must say of it."""

    name: str
    text: str
    expected: tuple[str, ...] = ()  # one of these must be found; none: no finding at all
    also: tuple[str, ...] = field(default=())  # what the same bug may break besides


def _right(kind: str, skeleton: str, rows: dict[str, dict[str, str]]) -> list[Case]:
    return [Case(f"right: {kind}, {name}", script(skeleton, **s)) for name, s in rows.items()]


def _wrong(kind: str, skeleton: str, rows: dict[str, tuple[str, dict[str, str]]]) -> list[Case]:
    found: list[Case] = []
    for name, (rules, slots) in rows.items():
        found.append(_flawed(f"{kind}, {name}", rules, script(skeleton, **slots)))
    return found


def _flawed(name: str, rules: str, text: str) -> Case:
    first, *also = rules.split("+")
    return Case(f"wrong: {name}", text, tuple(first.split("|")), tuple(also))


def adam(eps: float = 1e-8, of: str = "model.parameters()", lr: float = 1e-3) -> str:
    """The call that makes an Adam."""
    return f"torch.optim.Adam({of}, lr={lr}, eps={eps})"


ACCUMULATE = {"zero": "if step % 2 == 0:\n    optimizer.zero_grad()"}
EVERY_SECOND = "if step % 2:\n    {}"
EMA = (
    "with torch.no_grad():\n    for e, p in zip(ema.parameters(), model.parameters()):\n        {}"
)
SECOND = "head = nn.Linear(16, 4)\nheads = torch.optim.SGD(head.parameters(), lr=0.1)"
SGD = DEFAULTS["optimizer"]
SAVE = "torch.save({{{}}}, io.BytesIO())"
STATE = "'model': model.state_dict(), 'optimizer': optimizer.state_dict()"
STEP = OF[TORCH]["step"]
OWN_CLIP = (
    "total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\n"
    "for p in model.parameters():\n    p.grad.mul_(1.0 / (total + 1e-6))"
)
UNDO = "for p in model.parameters():\n    p.grad.div_(128.0)"
RELOAD = "snapshot = copy.deepcopy(model.state_dict())"

HEAD_TOO = "head = nn.Linear(16, 4)\noptimizer.add_param_group({'params': head.parameters()})"
FIRST_SCALED = "scaler.scale(torch.ones(()))"  # which makes the scale's tensor
HEAD_LOSS = "F.cross_entropy(head(x), y).backward()"
SECOND_STEP = EVERY_SECOND.format("scaler.step(optimizer); scaler.update()")
DECAY = "torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)"
IN_PLACE = "optimizer.zero_grad(set_to_none=False)"
BY_SCALE = "for p in model.parameters():\n    p.grad.div_(scaler.get_scale())"
SCHEDULE = "schedule = torch.optim.lr_scheduler.{}"
RESUMED = """
import os, tempfile
folder = tempfile.TemporaryDirectory()
path = os.path.join(folder.name, "last.pt")
def save(path, **more):
    states = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    torch.save({{**states, "scaler": scaler.state_dict(), **more}}, path)
save(path, epoch=1)
model = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
state = torch.load(path)
model.load_state_dict(state["model"])
{}
for x, y in data:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update()
save({})
folder.cleanup()
"""
OPTIMIZER_BACK = "optimizer.load_state_dict(state['optimizer'])"
SCALER_BACK = "scaler.load_state_dict(state['scaler'])"
RESUME = {"optimizer": adam()}


RIGHT_TORCH: dict[str, dict[str, str]] = {
    "bfloat16 with a disabled scaler": {
        "dtype": "bfloat16",
        "scaler": "scaler = torch.amp.GradScaler('cpu', enabled=False)",
    },
    "zeros in place": {"zero": "optimizer.zero_grad(set_to_none=False)"},
    "zeros after the step": {"zero": "pass", "after": "optimizer.zero_grad()"},
    "zeros by hand": {"zero": "for p in model.parameters():\n    p.grad = None"},
    "zeros through the model": {"zero": "model.zero_grad()"},
    "clips unscaled": {
        "between": "scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    },
    "clips unscaled by hand": {"between": f"scaler.unscale_(optimizer)\n{OWN_CLIP}"},
    "clamps unscaled": {
        "between": "scaler.unscale_(optimizer)\n"
        "for p in model.parameters():\n    p.grad.clamp_(-1e-3, 1e-3)"
    },
    "noise on scaled gradients": {
        "between": "for p in model.parameters():\n    p.grad.add_(torch.randn_like(p), alpha=1e-3)"
    },
    "divided accumulation": {
        **ACCUMULATE,
        "loss": "loss = loss / 2",
        "step": EVERY_SECOND.format("scaler.step(optimizer); scaler.update()"),
    },
    "accumulation divided in the gradients": {
        **ACCUMULATE,
        "step": "if step % 2:\n    for p in model.parameters():\n        p.grad.div_(2)\n"
        "    scaler.step(optimizer); scaler.update()",
    },
    "accumulation of sums": {
        **ACCUMULATE,
        "loss": "loss = F.cross_entropy(output.float(), y, reduction='sum') / 16",
        "step": EVERY_SECOND.format("scaler.step(optimizer); scaler.update()"),
    },
    "two losses, both scaled": {
        "loss": "other = output.float().square().mean()",
        "backward": "scaler.scale(loss).backward(retain_graph=True)\n"
        "scaler.scale(other).backward()",
    },
    "scaled losses added up": {
        "loss": "other = output.float().square().mean()",
        "backward": "(scaler.scale(loss) + scaler.scale(other)).backward()",
    },
    "a scaled loss divided": {"backward": "(scaler.scale(loss) / 2).backward()"},
    "a second optimizer without half": {
        "setup": SECOND,
        "after": "heads.zero_grad(); F.cross_entropy(head(x), y).backward(); heads.step()",
    },
    "two optimizers, one scaler": {
        "setup": SECOND,
        "loss": "loss = loss + F.cross_entropy(head(x), y)\nheads.zero_grad()",
        "step": "scaler.step(optimizer)\nscaler.step(heads)\nscaler.update()",
    },
    "overflows at the beginning": {
        "scaler": DEFAULTS["scaler"].replace("1024.0", "2.0**30"),
        "steps": "40",
    },
    "one batch with nan": {"loss": "if step == 5:\n    loss = loss * float('nan')"},
    "one batch left out": {"loss": "if step == 5:\n    continue"},
    "a schedule per epoch of skipped steps": {
        "steps": "24",
        "setup": "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)",
        "scaler": DEFAULTS["scaler"].replace("1024.0", "2.0**30"),
        "after": "if step % 4 == 3:\n    schedule.step()",
    },
    "gradients dropped after a bad norm": {
        "between": "if step == 3:\n    optimizer.zero_grad()\n    continue"
    },
    "a checkpoint with the scaler": {"end": SAVE.format(f"{STATE}, 'scaler': scaler.state_dict()")},
    "a checkpoint in two files": {
        "end": SAVE.format(STATE) + "\ntorch.save(scaler.state_dict(), io.BytesIO())"
    },
    "only weights are saved": {"end": "torch.save(model.state_dict(), io.BytesIO())"},
    "a float32 average": {
        "setup": "ema = copy.deepcopy(model)",
        "after": EMA.format("e.lerp_(p, 0.01)"),
    },
    "evaluation without gradients": {
        "after": "with torch.no_grad():\n    model(torch.full((2, 16), float('nan')))"
    },
    "a frozen layer": {
        "optimizer": "torch.optim.SGD(model[2].parameters(), lr=0.1)",
        "model": "model[0].requires_grad_(False)",
    },
    "a part of the gradients dropped": {"between": "model[0].zero_grad()"},
    "a scaler for each run": {
        "steps": "3",
        "end": "for _ in range(4):\n"
        "    scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)\n"
        f"    optimizer = {SGD}\n"
        "    for x, y in data:\n"
        "        optimizer.zero_grad()\n"
        "        with torch.autocast('cpu', torch.float16):\n"
        "            loss = F.cross_entropy(model(x), y)\n"
        "        scaler.scale(loss).backward()\n"
        "        scaler.step(optimizer); scaler.update()",
    },
    "scaled by hand by the scaler's scale": {
        "setup": FIRST_SCALED,
        "backward": "(loss * scaler.get_scale()).backward()",
    },
    "scaled by hand by the scaler's scale, divided": {
        "setup": FIRST_SCALED,
        "backward": "(loss * scaler.get_scale() / 4).backward()",
    },
    "two losses, one scaled by hand": {
        "loss": "other = output.float().square().mean()",
        "backward": "scaler.scale(loss).backward(retain_graph=True)\n"
        "(other * scaler.get_scale()).backward()",
    },
    "a weighted loss": {"loss": "loss = 0.5 * loss"},
    "gradients handed on from a scaled loss": {
        "loss": "features = output.detach().requires_grad_()\n"
        "loss = F.cross_entropy(features.float(), y)",
        "backward": "scaler.scale(loss).backward()\noutput.backward(features.grad)",
    },
    "a surrogate made of a scaled loss's gradients": {
        "loss": "features = output.detach().requires_grad_()\n"
        "loss = F.cross_entropy(features.float(), y)",
        "backward": "scaler.scale(loss).backward()\n"
        "(output.float() * features.grad.float()).sum().backward()",
    },
    "a plain term after unscaling": {
        "between": "scaler.unscale_(optimizer)\n(0.01 * model[0].weight.square().sum()).backward()"
    },
    "a plain loss of a head after unscaling": {
        "setup": HEAD_TOO,
        "between": f"scaler.unscale_(optimizer)\n{HEAD_LOSS}",
    },
    "a batch in five that overflows": {
        "steps": "60",
        "loss": "if step % 5 == 1:\n    loss = loss * 1e35",
    },
    "a long search for the scale": {
        "steps": "60",
        "scaler": DEFAULTS["scaler"].replace("1024.0", "2.0**62"),
    },
    "a scale that tries its limit": {
        "steps": "60",
        "scaler": "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**15, growth_interval=1)",
    },
    "a warm-up from zero": {
        "setup": SCHEDULE.format("LambdaLR(optimizer, lambda s: s / 20)"),
        "after": "schedule.step()",
    },
    "a rate of zero for a part": {
        "optimizer": "torch.optim.SGD([{'params': model[0].parameters(), 'lr': 0.0},\n"
        "    {'params': model[2].parameters()}], lr=0.1)"
    },
    "a rate that ends at zero": {
        "setup": SCHEDULE.format("LinearLR(optimizer, 1.0, 0.0, 4)"),
        "after": "schedule.step()",
    },
    "a second look at the same batch": {
        "zero": "for turn in range(2):\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cpu', torch.float16):\n"
        "        loss = F.cross_entropy(model(x), y)\n"
        "    scaler.scale(loss).backward()\n"
        "    if turn == 0:\n        scaler.unscale_(optimizer)\n"
        "        old = [p.detach().clone() for p in model.parameters()]\n"
        "        with torch.no_grad():\n"
        "            for p in model.parameters(): p.add_(p.grad, alpha=0.01)\n"
        "        scaler.update()\n"
        "with torch.no_grad():\n    for p, o in zip(model.parameters(), old): p.copy_(o)",
        "backward": "pass",
    },
    "gradients of two tasks put together": {
        "zero": "kept = []\nfor task in range(2):\n    optimizer.zero_grad()\n"
        "    with torch.autocast('cpu', torch.float16):\n"
        "        loss = F.cross_entropy(model(x + task), y)\n"
        "    scaler.scale(loss).backward()\n"
        "    kept.append([p.grad.clone() for p in model.parameters()])\n"
        "for p, a, b in zip(model.parameters(), *kept): p.grad = 0.5 * (a + b)",
        "backward": "pass",
    },
    "a schedule after the accumulation": {
        **ACCUMULATE,
        "loss": "loss = loss / 2",
        "setup": SCHEDULE.format("StepLR(optimizer, 2)"),
        "step": SECOND_STEP + "; schedule.step()",
    },
    "a schedule planned in batches": {
        **ACCUMULATE,
        "loss": "loss = loss / 2",
        "setup": SCHEDULE.format("OneCycleLR(optimizer, 0.1, total_steps=12)"),
        "step": SECOND_STEP,
        "after": "schedule.step()",
    },
    "a schedule of what is stepped every second time": {
        "setup": f"{SECOND}\n" + SCHEDULE.format("StepLR(heads, 6)"),
        "after": "if step % 2:\n    heads.zero_grad(); F.cross_entropy(head(x), y).backward()\n"
        "    heads.step()\nschedule.step()",
    },
    "resumed": {**RESUME, "end": RESUMED.format(f"{OPTIMIZER_BACK}\n{SCALER_BACK}", "path")},
    "tuned from a checkpoint's weights": {**RESUME, "end": RESUMED.format("", "path + '.tuned'")},
    "sums divided by as many as the scale": {
        "loss": "loss = F.cross_entropy(output.float(), y, reduction='sum')",
        "between": "for p in model.parameters():\n    p.grad.div_(1024.0)",
    },
    "a part frozen, no gradients": {
        "optimizer": DECAY,
        "loss": "if step == 3:\n    model[0].requires_grad_(False)",
    },
    "a part frozen from the beginning": {
        "optimizer": DECAY,
        "zero": IN_PLACE,
        "setup": "model[0].requires_grad_(False)",
    },
    "a part's gradients dropped": {"optimizer": DECAY, "between": "model[0].zero_grad()"},
    "a part that is not reached decays": {
        "optimizer": DECAY,
        "model": "model[0].bias.data.fill_(-1e3)",
    },
}

RIGHT_TEXTS: dict[str, str] = {
    "autocast for the evaluation only": script(
        HAND,
        dtype="float32",
        after="with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):\n    model(x)",
    ),
    "bfloat16 weights at a large rate": script(HAND, optimizer=SGD.replace("0.1", "2.0")),
    "bfloat16 weights without a rate": script(
        HAND, optimizer=SGD.replace("0.1", "2.0"), setup="head = nn.Linear(2, 2)"
    ),
    "masters": script(MASTERS),
    "masters in one tensor": script(
        MASTERS,
        masters="[nn.utils.parameters_to_vector(model.parameters()).detach().float()"
        ".requires_grad_()]",
        between="masters[0].grad = torch.cat([p.grad.reshape(-1) for p in model.parameters()])"
        ".float() / 128.0",
        after="with torch.no_grad():\n"
        "    nn.utils.vector_to_parameters(masters[0].half(), model.parameters())",
    ),
    "float16 scaled by hand": script(
        HAND, dtype="float16", backward="(loss * 128.0).backward()", between=UNDO
    ),
    "float16 scaled by hand, by a thousand": script(
        HAND,
        dtype="float16",
        backward="(loss * 1000.0).backward()",
        between=UNDO.replace("128", "1000"),
    ),
    "float16 scaled by hand, undone in hooks": script(
        HAND,
        dtype="float16",
        setup="for p in model.parameters():\n    p.register_hook(lambda g: g / 128.0)",
        backward="(loss * 128.0).backward()",
    ),
    "float16 scaled by hand, undone in the rate": script(
        HAND,
        dtype="float16",
        optimizer=SGD.replace("0.1", "0.5 / 128"),
        backward="(loss * 128.0).backward()",
    ),
    "a heavy loss in float32": script(
        HAND,
        dtype="float32",
        backward="(loss * 1024.0).backward()",
        optimizer=SGD.replace("0.1", "0.0001"),
    ),
    "O1, two losses": script(
        AMP,
        level="O1",
        setup="other = lambda: (model(x).float() ** 2).mean()",
        backward=SCALED + "\nwith amp.scale_loss(other(), optimizer) as scaled_loss:\n"
        "    scaled_loss.backward()",
    ),
    "O2, accumulation": script(
        AMP, **ACCUMULATE, loss="loss = loss / 2", step=EVERY_SECOND.format("optimizer.step()")
    ),
    "O2, clipping": script(
        AMP, between="torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)"
    ),
    "O2, a checkpoint": script(AMP, end=SAVE.format(f"{STATE}, 'amp': amp.state_dict()")),
    "O5, an average": script(
        AMP,
        level="O5",
        setup="ema = torch.optim.swa_utils.AveragedModel(model)\n"
        "import preamp\nengine = preamp.engine_of(model)",
        after="with engine.exact_weights():\n    ema.update_parameters(model)",
    ),
    "O2, SAM through data": script(
        AMP,
        between="params = [p for p in amp.master_params(optimizer)]\n"
        "old = [p.detach().clone() for p in params]\n"
        "for p in params:\n    p.data.add_(p.grad, alpha=0.05)\noptimizer.zero_grad()\n"
        "with amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as again:\n"
        "    again.backward()\nfor p, value in zip(params, old):\n    p.data.copy_(value)",
    ),
    "O5, Lookahead through data": script(
        AMP,
        level="O5",
        setup="slow = [p.detach().clone() for p in amp.master_params(optimizer)]",
        after="if step % 3 == 2:\n"
        "    for s, p in zip(slow, amp.master_params(optimizer)):\n"
        "        p.data.copy_(s.lerp_(p.detach(), 0.5))",
    ),
    "O2, SAM": script(
        AMP,
        between="params = [p for p in amp.master_params(optimizer)]\n"
        "old = [p.detach().clone() for p in params]\n"
        "with torch.no_grad():\n    for p in params:\n        p.add_(p.grad, alpha=0.05)\n"
        "optimizer.zero_grad()\n"
        "with amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as again:\n"
        "    again.backward()\n"
        "with torch.no_grad():\n"
        "    for p, value in zip(params, old):\n        p.copy_(value)",
    ),
}


def right_cases() -> list[Case]:
    """Scripts without a bug."""
    cases: dict[str, str] = {}
    optimizers = {
        "SGD": SGD,
        "momentum": SGD.replace("lr=0.1", "lr=0.1, momentum=0.9"),
        "Adam": adam(),
        "AdamW fused": "torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)",
    }
    for name, optimizer in optimizers.items():
        cases[f"torch, {name}"] = script(TORCH, optimizer=optimizer)
        for level in ("O0", "O1", "O2", "O4", "O5"):
            cases[f"{level}, {name}"] = script(AMP, level=level, optimizer=optimizer)
    for level in ("O2", "O4", "O5"):
        cases[f"{level}, its default scale"] = script(AMP, level=level, scale="None")
    cases["O3 with an eps"] = script(AMP, level="O3", scale="1024.0", optimizer=adam(1e-4))
    cases |= {f"torch, {name}": script(TORCH, **s) for name, s in RIGHT_TORCH.items()}
    cases |= RIGHT_TEXTS
    found = [Case(f"right: {name}", text) for name, text in cases.items()]
    found += [case for row in FURTHER for case in _right(row[0], row[1], row[3])]
    idioms = doctor_idioms.right_scripts()
    return found + [Case(f"right: idioms, {name}", text) for name, text in idioms.items()]


NAN_DATA = "data = [(x * float('nan'), y) for x, y in data]"


WRONG_TORCH: dict[str, tuple[str, dict[str, str]]] = {
    "all steps skipped": ("PA601", {"loss": "loss = loss * 1e30", "steps": "24"}),
    "all steps skipped, by nan": (
        "PA601|PA603+PA601+PA603",
        {"loss": "loss = loss * float('nan')", "steps": "24"},
    ),
    "all steps skipped, fused": (
        "PA601",
        {"loss": "loss = loss * 1e30", "optimizer": adam()[:-1] + ", fused=True)"},
    ),
    "skipped from the middle on": (
        "PA601|PA603+PA601+PA603",
        {"steps": "24", "loss": "if step > 9:\n    loss = loss * float('inf')"},
    ),
    "nan loss without a look": (
        "PA602|PA603+PA602+PA603",
        {
            "dtype": "bfloat16",
            "backward": "loss.backward()",
            "step": "optimizer.step()",
            "loss": "if step == 4:\n    loss = loss * float('nan')",
        },
    ),
    "weights far too far": (
        "PA602|PA603+PA602+PA603+PA601",
        {"optimizer": SGD.replace("0.1", "1e30")},
    ),
    "a loop that swallows nan": (
        "PA603|PA602+PA603+PA602+PA601",
        {"setup": NAN_DATA, "loss": "if not torch.isfinite(loss):\n    continue"},
    ),
    "a loop that makes nan zero": (
        "PA603|PA604+PA603+PA604+PA601",
        {"setup": NAN_DATA, "loss": "loss = torch.nan_to_num(loss)"},
    ),
    "nan swallowed late": (
        "PA603",
        {
            "steps": "24",
            "setup": "data = data[:12] + [(x * float('inf'), y) for x, y in data[12:]]",
            "loss": "if loss != loss:\n    continue",
        },
    ),
    "a scale of one": ("PA102", {"scaler": "scaler = torch.amp.GradScaler('cpu', init_scale=1.0)"}),
    "a second step": ("PA103", {"after": "optimizer.step()"}),
    "a second step, Adam": ("PA103", {"after": "optimizer.step()", "optimizer": adam()}),
    "a step before the scaler's": ("PA103+PA602+PA603", {"between": "optimizer.step()"}),
    "clamped by hand": (
        "PA101",
        {"between": "for p in model.parameters():\n    p.grad.clamp_(-1, 1)"},
    ),
    "clamped by hand through data": (
        "PA101",
        {"between": "for p in model.parameters():\n    p.grad.data.clamp_(-0.5, 0.5)"},
    ),
    "clamped in hooks": (
        "PA101",
        {"setup": "for p in model.parameters():\n    p.register_hook(lambda g: g.clamp(-1, 1))"},
    ),
    "clipped by hand": ("PA101", {"between": OWN_CLIP}),
    "never scaled": ("PA105", {"backward": "loss.backward()"}),
    "scaled in vain": ("PA105", {"backward": "scaled = scaler.scale(loss)\nloss.backward()"}),
    "never scaled, clipped": (
        "PA105",
        {
            "backward": "loss.backward()",
            "between": "scaler.unscale_(optimizer)\n"
            "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        },
    ),
    "a second loss unscaled": (
        "PA106",
        {
            "loss": "other = output.float().square().mean()",
            "backward": "scaler.scale(loss).backward(retain_graph=True)\nother.backward()",
        },
    ),
    "a first loss unscaled": (
        "PA106",
        {
            "loss": "other = output.float().square().mean()",
            "backward": "other.backward(retain_graph=True)\nscaler.scale(loss).backward()",
        },
    ),
    "an unscaled term": (
        "PA106",
        {
            "loss": "other = output.float().square().mean()",
            "backward": "(scaler.scale(loss) + other).backward()",
        },
    ),
    "accumulation onto unscaled gradients": (
        "PA106+PA601+PA603",
        {
            "loss": "again = F.cross_entropy(model(x + 1), y)",
            "backward": "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)\n"
            "scaler.scale(again).backward()",
        },
    ),
    "the scale changes before the step": (
        "PA107",
        {"between": "scaler.update(scaler.get_scale() * 2)", "step": "scaler.step(optimizer)"},
    ),
    "the scale changes between two steps": (
        "PA107",
        {
            "setup": SECOND,
            "loss": "heads.zero_grad()\nloss = loss + F.cross_entropy(head(x), y)",
            "step": f"{STEP}\nscaler.step(heads)\nscaler.update()",
        },
    ),
    "the scale changes within an accumulation": (
        "PA107|PA106+PA406",
        {
            **ACCUMULATE,
            "loss": "loss = loss / 2",
            "setup": SECOND,
            "step": "heads.zero_grad()\nscaler.scale(F.cross_entropy(head(x), y)).backward()\n"
            "scaler.step(heads)\nif step % 2:\n    scaler.step(optimizer)\nscaler.update()",
        },
    ),
    "a new scaler every step": ("PA108", {"zero": "optimizer.zero_grad()\n" + DEFAULTS["scaler"]}),
    "a new scaler in a function": (
        "PA108",
        {
            "setup": "def make():\n    return torch.amp.GradScaler('cpu', init_scale=1024.0)",
            "zero": "optimizer.zero_grad()\nscaler = make()",
        },
    ),
    "zeros between backward and step": (
        "PA403+PA604",
        {"between": "optimizer.zero_grad(set_to_none=False)"},
    ),
    "zeros after unscaling": (
        "PA403",
        {"between": "scaler.unscale_(optimizer)\noptimizer.zero_grad()"},
    ),
    "no gradients at the step": (
        "PA403",
        {
            "between": "optimizer.zero_grad()",
            "step": "try:\n    scaler.step(optimizer)\nexcept AssertionError:\n    break",
        },
    ),
    "no zeros at all": ("PA404", {"zero": "pass"}),
    "no zeros at all, Adam": ("PA404", {"zero": "pass", "optimizer": adam()}),
    "accumulation without division": (
        "PA406",
        {**ACCUMULATE, "step": EVERY_SECOND.format("scaler.step(optimizer); scaler.update()")},
    ),
    "accumulation of losses in a list": (
        "PA406",
        {
            **ACCUMULATE,
            "loss": "loss = F.cross_entropy(output.float(), y) + 1e-4 * "
            "model[0].weight.square().mean()",
            "step": EVERY_SECOND.format("scaler.step(optimizer); scaler.update()"),
        },
    ),
    "a checkpoint without the scaler": ("PA110", {"end": SAVE.format(STATE)}),
    "a nested checkpoint without the scaler": (
        "PA110",
        {"end": "torch.save([1, {'state': {'opt': [optimizer.state_dict()]}}], io.BytesIO())"},
    ),
    "an average in half": (
        "PA204",
        {
            "steps": "20",
            "setup": "ema = copy.deepcopy(model).half()",
            "after": EMA.format("e.lerp_(p.half(), 0.001)"),
        },
    ),
    "an average in bfloat16": (
        "PA204",
        {
            "steps": "20",
            "setup": "ema = copy.deepcopy(model).bfloat16()",
            "after": EMA.format("e.mul_(0.999).add_(p, alpha=0.001)"),
        },
    ),
    "an average in half by lists": (
        "PA204",
        {
            "steps": "20",
            "setup": "ema = [p.detach().half() for p in model.parameters()]",
            "after": "torch._foreach_mul_(ema, 0.999)\ntorch._foreach_add_(ema, "
            "[p.detach().half() for p in model.parameters()], alpha=0.001)",
        },
    ),
    "a scaler with bfloat16": ("PA111", {"dtype": "bfloat16"}),
    "a scaler with bfloat16, accumulating": (
        "PA111",
        {
            **ACCUMULATE,
            "dtype": "bfloat16",
            "loss": "loss = loss / 2",
            "step": EVERY_SECOND.format("scaler.step(optimizer); scaler.update()"),
        },
    ),
    "weighted, never scaled": (
        "PA105",
        {"setup": FIRST_SCALED, "backward": "(0.5 * loss).backward()"},
    ),
    "weighted by ten, never scaled": (
        "PA105",
        {"setup": FIRST_SCALED, "backward": "(loss * 10).backward()"},
    ),
    "scaled by hand by another scale": (
        "PA105",
        {"setup": FIRST_SCALED, "backward": "(loss * 128.0).backward()"},
    ),
    "a head never scaled": (
        "PA105",
        {"setup": HEAD_TOO, "backward": f"scaler.scale(loss).backward()\n{HEAD_LOSS}"},
    ),
    "a weighted loss unscaled": (
        "PA106",
        {
            "loss": "other = output.float().square().mean()",
            "backward": "scaler.scale(loss).backward(retain_graph=True)\n(0.5 * other).backward()",
        },
    ),
    "a heavy loss unscaled": (
        "PA106",
        {
            "loss": "other = output.float().square().mean()",
            "backward": "(100 * other).backward(retain_graph=True)\nscaler.scale(loss).backward()",
        },
    ),
    "weighted, without a scaler": (
        "PA102",
        {"backward": "(0.5 * loss).backward()", "step": "optimizer.step()"},
    ),
    "a seed of one, without a scaler": (
        "PA102",
        {"backward": "loss.backward(torch.ones(()))", "step": "optimizer.step()"},
    ),
    "two steps after unscaling": (
        "PA103",
        {"between": "scaler.unscale_(optimizer)\noptimizer.step()"},
    ),
    "four steps of five skipped": (
        "PA601",
        {"steps": "60", "loss": "if (step + 1) % 5:\n    loss = loss * 1e35"},
    ),
    "a rate of zero": ("PA202", {"optimizer": SGD.replace("0.1", "0.0")}),
    "a rate of zero, Adam": ("PA202", {"optimizer": adam(lr=0.0)}),
    "a rate below rounding": ("PA202", {"optimizer": SGD.replace("0.1", "1e-14")}),
    "zeros of a part": ("PA404", {"zero": "model[0].zero_grad()"}),
    "a part's gradients deleted": (
        "PA404",
        {"zero": "for p in model[0].parameters():\n    p.grad = None"},
    ),
    "zeros once in five steps": (
        "PA404",
        {"steps": "40", "zero": "if step % 5 == 0:\n    optimizer.zero_grad()"},
    ),
    "zeros in every batch of two": ("PA403", {"loss": "loss = loss / 2", "step": SECOND_STEP}),
    "zeros in place in every batch of two": (
        "PA403",
        {"zero": IN_PLACE, "loss": "loss = loss / 2", "step": SECOND_STEP},
    ),
    "gradients deleted in every batch of three": (
        "PA403",
        {
            "zero": "for p in model.parameters():\n    p.grad = None",
            "steps": "24",
            "loss": "loss = loss / 3",
            "step": "if step % 3 == 2:\n    scaler.step(optimizer); scaler.update()",
        },
    ),
    "a schedule in every batch of two": (
        "PA104",
        {
            **ACCUMULATE,
            "loss": "loss = loss / 2",
            "setup": SCHEDULE.format("StepLR(optimizer, 2)"),
            "step": SECOND_STEP,
            "after": "schedule.step()",
        },
    ),
    "a schedule in every batch of two, past its end": (
        "PA104",
        {
            **ACCUMULATE,
            "loss": "loss = loss / 2",
            "setup": SCHEDULE.format("CosineAnnealingLR(optimizer, T_max=6)"),
            "step": SECOND_STEP,
            "after": "schedule.step()",
        },
    ),
    "resumed without the scaler": (
        "PA113",
        {**RESUME, "end": RESUMED.format(OPTIMIZER_BACK, "path")},
    ),
    "resumed without the optimizer": (
        "PA113",
        {**RESUME, "end": RESUMED.format(SCALER_BACK, "path")},
    ),
    "unscaled by hand, and by the scaler": ("PA105", {"between": BY_SCALE}),
    "unscaled by the scaler, and by hand": (
        "PA105",
        {"between": f"scaler.unscale_(optimizer)\n{BY_SCALE}"},
    ),
    "a part frozen with zeros": (
        "PA408",
        {
            "optimizer": DECAY,
            "zero": IN_PLACE,
            "loss": "if step == 3:\n    model[0].requires_grad_(False)",
        },
    ),
    "a part's gradients made zero": (
        "PA408",
        {"optimizer": DECAY, "between": "model[0].zero_grad(set_to_none=False)"},
    ),
}
WRONG_HAND: dict[str, tuple[str, dict[str, str]]] = {
    "bfloat16 weights that do not move": ("PA202", {"optimizer": SGD.replace("0.1", "1e-4")}),
    "bfloat16 weights under Adam": ("PA202", {"optimizer": adam(lr=1e-6)}),
    "bfloat16 weights with a warm-up": (
        "PA202",
        {
            "optimizer": adam(lr=1e-5),
            "setup": "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / 20)",
            "after": "schedule.step()",
        },
    ),
    "float16 weights that do not move": (
        "PA202",
        {
            "dtype": "float16",
            "optimizer": SGD.replace("0.1", "1e-5"),
            "backward": "(loss * 128.0).backward()",
            "between": UNDO,
        },
    ),
    "an unscaled scale": (
        "PA109",
        {
            "dtype": "float16",
            "backward": "(loss * 128.0).backward()",
            "optimizer": SGD.replace("0.1", "0.01"),
        },
    ),
    "an unscaled scale, in a seed": (
        "PA109",
        {
            "dtype": "float16",
            "backward": "loss.backward(torch.tensor(256.0))",
            "optimizer": SGD.replace("0.1", "0.001"),
        },
    ),
    "an unscaled scale, clipped": (
        "PA109",
        {
            "dtype": "float16",
            "backward": "(256.0 * loss).backward()",
            "between": "nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        },
    ),
    "a scale undone twice": (
        "PA109+PA202",
        {"dtype": "float16", "backward": "(loss * 128.0).backward()", "between": f"{UNDO}\n{UNDO}"},
    ),
    "weighted, without a scale": (
        "PA102",
        {"dtype": "float16", "backward": "(2 * loss).backward()"},
    ),
    "autocast around nothing": (
        "PA303",
        {
            "dtype": "float32",
            "zero": "optimizer.zero_grad()\nwith torch.autocast('cpu', torch.bfloat16):\n    pass",
        },
    ),
    "autocast around the loss": (
        "PA303",
        {
            "dtype": "float32",
            "loss": "with torch.autocast('cpu', torch.bfloat16):\n"
            "    loss = F.cross_entropy(model[2].bias.expand(8, 4), y) + loss",
        },
    ),
    "autocast switched off inside": (
        "PA303",
        {
            "dtype": "float32",
            "setup": "inner = model\nclass Off(nn.Module):\n"
            "    def __init__(self):\n        super().__init__(); self.inner = inner\n"
            "    def forward(self, x):\n        with torch.autocast('cpu', enabled=False):\n"
            "            return self.inner(x)\nouter = Off()\n"
            "def model(x):\n    with torch.autocast('cpu', torch.bfloat16):\n"
            "        return outer(x)",
        },
    ),
    "no zeros at all": ("PA404", {"dtype": "float32", "zero": "pass"}),
    "zeros before the step": ("PA403", {"dtype": "float32", "between": "optimizer.zero_grad()"}),
    "zeros before the step, model": (
        "PA403",
        {"optimizer": SGD.replace("0.1", "2.0"), "between": "model.zero_grad()"},
    ),
    "weights that become nan": (
        "PA602|PA603+PA603+PA602+PA201",
        {
            "dtype": "float16",
            "optimizer": adam(),
            "backward": "(loss * 128.0).backward()",
            "between": UNDO,
        },
    ),
    "gradients that vanish": (
        "PA604+PA102+PA202",
        {"dtype": "float16", "loss": "loss = loss * 1e-8", "optimizer": SGD.replace("0.1", "1e8")},
    ),
    "nan from the data": ("PA603+PA602", {"setup": NAN_DATA}),
    "no step is taken": ("PA601", {"step": "pass", "dtype": "float32"}),
}
WRONG_MASTERS: dict[str, tuple[str, dict[str, str]]] = {
    "the scale is undone twice": (
        "PA109",
        {"between": OF[MASTERS]["between"].replace("128.0", "128.0 / 128.0")},
    ),
    "never copied back": ("PA405", {"after": "pass"}),
    "never copied back, one tensor": (
        "PA405",
        {
            "masters": "[nn.utils.parameters_to_vector(model.parameters()).detach().float()"
            ".requires_grad_()]",
            "between": "masters[0].grad = torch.cat([p.grad.reshape(-1) for p in "
            "model.parameters()]).float() / 128.0",
            "after": "pass",
        },
    ),
    "copied the wrong way": (
        "PA405",
        {"after": "for m, p in zip(masters, model.parameters()):\n    m.data.copy_(p.data)"},
    ),
    "the scale is left on": (
        "PA109+PA602+PA603",
        {"between": "for m, p in zip(masters, model.parameters()):\n    m.grad = p.grad.float()"},
    ),
}
STATIC = {"scale": "2.0**30", "level": "O2"}
WRONG_AMP: dict[str, tuple[str, dict[str, str]]] = {
    "a static scale far too large": ("PA602+PA603", STATIC),
    "a static scale far too large, O1": ("PA602+PA603", {**STATIC, "level": "O1"}),
    "a static scale far too large, O3": ("PA602+PA603", {**STATIC, "level": "O3"}),
    "gradients that vanish at O3": (
        "PA604+PA102+PA202",
        {"level": "O3", "scale": "1.0", "loss": "loss = loss * 1e-8"},
    ),
    "all steps skipped": ("PA601", {"steps": "24", "loss": "loss = loss * 1e33"}),
    "a swallowed error": (
        "PA601|PA603+PA603+PA601",
        {
            "steps": "60",
            "loss": "loss = loss * float('nan')",
            "step": "optimizer.step()",
            "backward": "try:\n    "
            + SCALED.replace("\n", "\n    ")
            + "\nexcept Exception:\n    continue",
        },
    ),
    "no zeros at all, O1": ("PA404", {"level": "O1", "zero": "pass"}),
    "no zeros at all, O2": ("PA404", {"zero": "pass"}),
    "zeros before the step": ("PA403", {"between": "optimizer.zero_grad()"}),
    "accumulation without division": (
        "PA406",
        {**ACCUMULATE, "step": EVERY_SECOND.format("optimizer.step()")},
    ),
    "accumulation without division, O1": (
        "PA406",
        {**ACCUMULATE, "level": "O1", "step": EVERY_SECOND.format("optimizer.step()")},
    ),
    "zeros in every batch of two": (
        "PA403",
        {"loss": "loss = loss / 2", "step": EVERY_SECOND.format("optimizer.step()")},
    ),
    "clamped in the block": (
        "PA101",
        {
            "level": "O1",
            "backward": SCALED + "\n    for p in model.parameters():\n        p.grad.clamp_(-1, 1)",
        },
    ),
    "a plain backward at O4": ("PA112", {"level": "O4", "backward": "loss.backward()"}),
    "a plain backward at O5": ("PA112", {"level": "O5", "backward": "loss.backward()"}),
    "a plain backward at O2": ("PA102|PA112", {"backward": "loss.backward()"}),
    "a checkpoint without amp": ("PA110", {"end": SAVE.format(STATE)}),
    "O5, an average of rounded weights": (
        "PA407",
        {
            "level": "O5",
            "setup": "ema = torch.optim.swa_utils.AveragedModel(model)",
            "after": "ema.update_parameters(model)",
        },
    ),
    "O5, half shadows of weights": (
        "PA407",
        {
            "level": "O5",
            "scale": "None",
            "setup": "shadows = [p.clone().detach() for p in model.parameters()]",
            "after": "with torch.no_grad():\n    for s, p in zip(shadows, model.parameters()):\n"
            "        s.sub_((s - p).mul_(0.5))",
        },
    ),
    "O3, an average in half": (
        "PA204",
        {
            "level": "O3",
            "scale": "128.0",
            "steps": "20",
            "setup": "ema = copy.deepcopy(model)",
            "after": EMA.format("e.lerp_(p, 0.001)"),
        },
    ),
}


def wrong_cases() -> list[Case]:
    """Scripts with one bug each."""
    return [
        *_wrong("torch", TORCH, WRONG_TORCH),
        *_wrong("by hand", HAND, WRONG_HAND),
        *_wrong("masters", MASTERS, WRONG_MASTERS),
        *_wrong("amp", AMP, WRONG_AMP),
        *(case for row in FURTHER for case in _wrong(row[0], row[1], row[4])),
        *(_flawed(f"idioms, {n}", *flaw) for n, flaw in doctor_idioms.wrong_scripts().items()),
    ]


def examine(text: str, folder: Path) -> tuple[list[str], str]:
    """Run a script under the doctor; return the ids found, and why they may be incomplete."""
    path = folder / "script.py"
    path.write_text(text, "utf-8")
    examination, trouble = Examination(select_rules()), ""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with examination.watching():
                exec(compile(text, str(path), "exec"), names)
    except Exception as error:  # a wrong script may end so; the doctor reports all the same
        trouble = f" ({type(error).__name__}: {str(error)[:100]})"
    return [finding.rule.id for finding in examination.findings], trouble + "".join(
        f" [{note}]" for note in examination.notes
    )


def is_right(case: Case, ids: list[str], trouble: str) -> bool:
    """Whether what was found is the bug, and nothing else but what it entails."""
    if not case.expected:
        return not ids and not trouble
    return bool(set(ids) & set(case.expected)) and set(ids) <= {*case.expected, *case.also}


def scores(every: int, offset: int) -> list[Score]:
    """Run each ``every``-th script, beginning with number ``offset``."""
    kinds = {"doctor, right scripts": right_cases(), "doctor, wrong scripts": wrong_cases()}
    found: list[Score] = []
    preamp.install_apex_alias()
    try:
        with tempfile.TemporaryDirectory() as folder:
            for kind, cases in kinds.items():
                score = Score(kind)
                for case in cases[offset::every]:
                    ids, trouble = examine(case.text, Path(folder))
                    if is_right(case, ids, trouble):
                        score.right += 1
                    else:
                        score.wrong.append(f"{case.name}: {', '.join(ids) or 'nothing'}{trouble}")
                found.append(score)
    finally:
        preamp.remove_apex_alias()
    return found
