# SPDX-License-Identifier: BSD-3-Clause
"""Further skeletons of training scripts for the doctor, written after its rules; see `doctor`.

Each has its slots' usual contents, edits that are right, and edits that plant a bug with the rules
one of which must be found, and after a ``+`` what the bug may lead to besides.
"""

from __future__ import annotations

from typing import Final

Right = dict[str, dict[str, str]]
Wrong = dict[str, tuple[str, dict[str, str]]]

GAN = """
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
bce = F.binary_cross_entropy_with_logits
def main():
    G = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 16))
    D = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Linear(32, 1))
    og = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
    od = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(12):
        real, z = torch.randn(8, 16), torch.randn(8, 8)
        {dzero}
        with torch.autocast("cpu", torch.float16):
            fake = G(z)
            out_real, out_fake = D(real), D(fake.detach())
        loss_real = bce(out_real.float(), torch.ones(8, 1))
        loss_fake = bce(out_fake.float(), torch.zeros(8, 1))
        scaler.scale(loss_real).backward()
        {fake}
        {dstep}
        {gzero}
        with torch.autocast("cpu", torch.float16):
            out = D(fake)
        lossg = bce(out.float(), torch.ones(8, 1))
        {gback}
        {gstep}
        scaler.update()
main()
"""
GAN_SLOTS = {
    "dzero": "od.zero_grad()",
    "fake": "scaler.scale(loss_fake).backward()",
    "dstep": "scaler.step(od)",
    "gzero": "og.zero_grad()",
    "gback": "scaler.scale(lossg).backward()",
    "gstep": "scaler.step(og)",
}
GAN_RIGHT: Right = {
    "plain": {},
    "both zeroed": {"gzero": "og.zero_grad(); od.zero_grad()"},
    "two updates": {"dstep": "scaler.step(od); scaler.update()"},
    "D every second": {"dstep": "if step % 2: scaler.step(od)"},
}
GAN_WRONG: Wrong = {
    "a part of D unscaled": ("PA106", {"fake": "loss_fake.backward()"}),
    "D unscaled and unscaled by hand": (
        "PA106",
        {"fake": "loss_fake.backward()", "dstep": "scaler.unscale_(od); scaler.step(od)"},
    ),
    "G unscaled": ("PA105+PA106", {"gback": "lossg.backward()"}),
    "an unscaled term": (
        "PA106",
        {"gback": "(scaler.scale(lossg) + 0.1 * fake.float().pow(2).mean()).backward()"},
    ),
    "update between": ("PA107", {"gstep": "scaler.update(); scaler.step(og)"}),
    "D never zeroed": ("PA404|PA106+PA106+PA404", {"dzero": "pass"}),
    "D stepped past the scaler": ("PA103", {"dstep": "od.step()"}),
}

CNN = """
import torch, copy, io, math
from torch import nn
from torch.nn import functional as F
torch.manual_seed(1)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
{setup}
def train(net, opt, scaler, epochs=2):
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    for epoch in range(epochs):
        net.train()
        for i in range(8):
            x, y = torch.randn(6, 3, 10, 10), torch.randint(5, (6,))
            {zero}
            with torch.autocast("cpu", torch.{dtype}):
                loss = F.cross_entropy(net(x), y)
            {loss}
            {backward}
            {clip}
            {step}
        {epoch}
        net.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            net(x)
opt = {optimizer}
scaler = torch.amp.GradScaler("cpu", init_scale={scale})
train(net, opt, scaler)
{end}
"""
CNN_SLOTS = {
    "zero": "opt.zero_grad(set_to_none=True)",
    "backward": "scaler.scale(loss).backward()",
    "clip": "scaler.unscale_(opt)\nnn.utils.clip_grad_norm_(net.parameters(), 1.0)",
    "step": "scaler.step(opt)\nscaler.update()",
    "epoch": "sched.step()",
    "optimizer": "torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)",
    "scale": "512.0",
}
OWN_NORMS = "for p in net.parameters():\n    p.grad.div_(p.grad.norm())"
CNN_RIGHT: Right = {
    "plain": {},
    "Adam": {"optimizer": "torch.optim.Adam(net.parameters())"},
    "values clipped": {
        "clip": "scaler.unscale_(opt)\nnn.utils.clip_grad_value_(net.parameters(), 0.01)"
    },
    "a checkpoint": {
        "end": "torch.save(dict(opt=opt.state_dict(), scaler=scaler.state_dict()), io.BytesIO())"
    },
    "a second phase": {
        "end": "scaler = torch.amp.GradScaler('cpu', init_scale=512.0)\n"
        "opt = torch.optim.SGD(net.parameters(), lr=1e-2)\ntrain(net, opt, scaler, 1)"
    },
    "a logged loss": {"loss": "total = loss.item() + float(loss)"},
    "a heavy loss": {"loss": "loss = 128 * loss"},
    "the norm of scaled gradients logged": {
        "clip": "gn = sum(float(p.grad.norm()) for p in net.parameters())\n" + CNN_SLOTS["clip"]
    },
    "a guard": {"loss": "if not math.isfinite(loss.item()):\n    raise SystemExit"},
    "half copies": {"epoch": "sched.step()\nlast = copy.deepcopy(net).half()"},
}
CNN_WRONG: Wrong = {
    "clipped before unscaling": (
        "PA101",
        {"clip": "nn.utils.clip_grad_norm_(net.parameters(), 1.0)\nscaler.unscale_(opt)"},
    ),
    "clamped in a list": (
        "PA101",
        {"clip": "[p.grad.clamp_(min=-0.05, max=0.05) for p in net.parameters()]"},
    ),
    "clamped into new tensors": (
        "PA101",
        {"clip": "for p in net.parameters():\n    p.grad = p.grad.clamp(-0.1, 0.1)"},
    ),
    "norms by hand": ("PA101", {"clip": OWN_NORMS}),
    "the norm by hand through data": (
        "PA101",
        {
            "clip": "n = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in net.parameters()))\n"
            "if n > 0.1:\n    for p in net.parameters(): p.grad.data.mul_(0.1 / n)"
        },
    ),
    "both steps": ("PA103", {"step": "opt.step()\nscaler.step(opt)\nscaler.update()"}),
    "the wrong step": ("PA103", {"step": "opt.step()\nscaler.update()"}),
    "no scale": ("PA105", {"backward": "scaler.scale(loss)\nloss.backward()"}),
    "a schedule per skipped step": (
        "PA104+PA601",
        {"scale": "2.0**28", "step": CNN_SLOTS["step"] + "\nsched.step()", "epoch": "pass"},
    ),
    "a loss too hot": ("PA601|PA603+PA601+PA603", {"loss": "loss = 1e38 * loss"}),
    "an infinite rate": (
        "PA602|PA603|PA601+PA602+PA603+PA601",
        {"optimizer": "torch.optim.SGD(net.parameters(), lr=1e38)"},
    ),
    "zeroed before unscaling": (
        "PA403+PA604",
        {"clip": f"net.zero_grad(set_to_none=False)\n{CNN_SLOTS['clip']}"},
    ),
    "the scaler remade": (
        "PA108",
        {"zero": "opt.zero_grad()\nscaler = torch.amp.GradScaler('cpu', init_scale=512.0)"},
    ),
    "a checkpoint in a tuple": (
        "PA110",
        {"epoch": "sched.step()\ntorch.save((net.state_dict(), opt.state_dict()), io.BytesIO())"},
    ),
    "BatchNorm in half": ("PA301", {"setup": "net[1].half()"}),
    "a scale below one": ("PA102", {"scale": "0.5"}),
    "bfloat16": ("PA111", {"dtype": "bfloat16"}),
    "nan swallowed by an assertion": (
        "PA603",
        {
            "loss": "loss = (-loss).log()",
            "backward": "try:\n    assert not torch.isnan(loss)\nexcept AssertionError:\n"
            "    continue",
        },
    ),
    "nan swallowed by a number": (
        "PA603",
        {"loss": "loss = loss * float('nan')\nif math.isnan(loss.item()):\n    continue"},
    ),
    "nan swallowed after a while": (
        "PA603",
        {
            "loss": "if i > 3 or epoch:\n    loss = loss / 0 * 0\n"
            "if not math.isfinite(float(loss)):\n    continue"
        },
    ),
    "no step": ("PA601|PA404+PA601+PA404", {"step": "pass", "clip": "pass", "zero": "pass"}),
    "autocast for a device that is not there": (
        "PA303|PA105+PA303+PA105",
        {
            "dtype": "float16)if 0 else torch.autocast('cuda', torch.float16",
            "backward": "loss.backward()",
            "clip": "pass",
            "step": "opt.step()",
        },
    ),
}

VIT = """
import torch, copy, io
from torch import nn
from torch.nn import functional as F
torch.manual_seed(2)
class Block(nn.Module):
    def __init__(s, d):
        super().__init__()
        s.a, s.n = nn.MultiheadAttention(d, 4, batch_first=True), nn.LayerNorm(d)
        s.m = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
    def forward(s, x):
        y = s.n(x)
        x = x + s.a(y, y, y, need_weights=False)[0]
        return x + s.m(x)
class Trainer:
    def __init__(s):
        s.model = nn.Sequential(nn.Linear(12, 32), Block(32), nn.Linear(32, 6)).to(torch.{dtype})
        s.groups = [{'params': [p for p in s.model.parameters() if p.dim() > 1]},
                    {'params': [p for p in s.model.parameters() if p.dim() <= 1]}]
        {setup}
        s.opt = {optimizer}
    def fit(s):
        for it in range(16):
            x, y = torch.randn(4, 7, 12).to(torch.{dtype}), torch.randn(4, 7, 6)
            {zero}
            with torch.autocast("cpu", torch.bfloat16, enabled={casts}):
                loss = F.mse_loss(s.model(x).float(), y)
            {loss}
            {backward}
            {between}
            {step}
            {after}
Trainer().fit()
"""
VIT_SLOTS = {
    "dtype": "float32",
    "optimizer": "torch.optim.AdamW(s.groups, lr=3e-4)",
    "zero": "s.opt.zero_grad()",
    "casts": "True",
    "backward": "loss.backward()",
    "step": "s.opt.step()",
}
FOURTH = {
    "zero": "if it % 4 == 0:\n    s.opt.zero_grad()",
    "step": "if it % 4 == 3:\n    s.opt.step()",
}
BF16 = {"dtype": "bfloat16", "casts": "False", "optimizer": "torch.optim.AdamW(s.groups, lr=2e-2)"}
AVERAGED = "with torch.no_grad():\n    for e, p in zip(ema.parameters(), s.model.parameters()):\n"
EMA = "s.ema = copy.deepcopy(s.model)"
COPIES = {
    "dtype": "float16",
    "casts": "False",
    "setup": "s.M = [p.detach().float().requires_grad_() for p in s.model.parameters()]",
    "optimizer": "torch.optim.AdamW(s.M, lr=1e-3)",
    "zero": "s.model.zero_grad()",
    "backward": "(loss * 256.0).backward()",
    "between": "for m, p in zip(s.M, s.model.parameters()):\n    m.grad = p.grad.float() / 256",
    "after": "for m, p in zip(s.M, s.model.parameters()):\n    p.data.copy_(m)",
}


def average(line: str) -> str:
    """An average of a trainer's weights: ``line`` has ``e`` and ``p``."""
    return AVERAGED.replace("(ema", "(s.ema") + f"        {line}"


VIT_RIGHT: Right = {
    "plain": {},
    "bfloat16 weights at a large rate": BF16,
    "accumulation": {**FOURTH, "loss": "loss = loss / 4"},
    "accumulation, multiplied": {**FOURTH, "loss": "loss = loss * 0.25"},
    "accumulation of weighted sums": {**FOURTH, "loss": "loss = loss * 168 / 700"},
    "gradients divided by ranks": {"between": "for p in s.model.parameters():\n    p.grad /= 1"},
    "a float32 average of bfloat16": {
        **BF16,
        "setup": EMA + ".float()",
        "after": average("e.lerp_(p.float(), 0.001)"),
    },
    "frozen layers": {"setup": "for p in s.model[:2].parameters(): p.requires_grad_(False)"},
    "zeros through data": {
        "zero": "for p in s.model.parameters():\n    if p.grad is not None:\n"
        "        p.grad.data.zero_()"
    },
    "zeros after detaching": {
        "zero": "for p in s.model.parameters():\n    if p.grad is not None:\n"
        "        p.grad.detach_(); p.grad.zero_()"
    },
    "decayed gradients": {"between": "for p in s.model.parameters():\n    p.grad.mul_(0.5)"},
    "masters": COPIES,
    "masters, gradients zeroed early": {
        **COPIES,
        "zero": "pass",
        "between": COPIES["between"] + "\ns.model.zero_grad()",
    },
    "masters, a rate of almost nothing": {**COPIES, "optimizer": "torch.optim.AdamW(s.M, lr=1e-9)"},
}
VIT_WRONG: Wrong = {
    "bfloat16 weights at a tiny rate": (
        "PA202",
        {**BF16, "optimizer": "torch.optim.AdamW(s.groups, lr=1e-5)"},
    ),
    "bfloat16 weights at a small rate": (
        "PA202",
        {**BF16, "optimizer": "torch.optim.AdamW(s.groups, lr=1e-4)"},
    ),
    "float16 weights under Adam": (
        "PA201+PA102+PA602+PA603",
        {**BF16, "dtype": "float16", "optimizer": "torch.optim.AdamW(s.groups, lr=1e-3)"},
    ),
    "never zeroed": ("PA404", {"zero": "pass"}),
    "zeroed in the wrong place": ("PA403", {"zero": "pass", "between": "s.opt.zero_grad()"}),
    "accumulation without division": ("PA406", FOURTH),
    "accumulation of a written mean": (
        "PA406",
        {**FOURTH, "loss": "loss = (s.model(x).float() - y).pow(2).mean()"},
    ),
    "autocast around the data": (
        "PA303",
        {
            "casts": "False",
            "zero": "s.opt.zero_grad()\nwith torch.autocast('cpu', torch.bfloat16): x = x + 0",
        },
    ),
    "a bfloat16 average": (
        "PA204",
        {**BF16, "setup": EMA, "after": average("e.mul_(0.9995).add_(0.0005 * p)")},
    ),
    "a bfloat16 average by differences": (
        "PA204",
        {**BF16, "setup": EMA, "after": average("e.sub_((1 - 0.9995) * (e - p))")},
    ),
    "a bfloat16 average by copies": (
        "PA204",
        {**BF16, "setup": EMA, "after": average("e.copy_(0.9995 * e + 0.0005 * p)")},
    ),
    "a bfloat16 average through data": (
        "PA204",
        {**BF16, "setup": EMA, "after": average("e.data.lerp_(p.data, 0.0005)")},
    ),
    "torch's average of bfloat16": (
        "PA204",
        {
            **BF16,
            "setup": "from torch.optim.swa_utils import AveragedModel as A\n"
            "from torch.optim.swa_utils import get_ema_multi_avg_fn as f\n"
            "s.ema = A(s.model, multi_avg_fn=f(0.9995))",
            "after": "s.ema.update_parameters(s.model)",
        },
    ),
    "an average of new bfloat16 tensors": (
        "PA204",
        {
            **BF16,
            "setup": "s.ema = {n: p.detach() for n, p in s.model.named_parameters()}",
            "after": "for n, p in s.model.named_parameters():\n"
            "    s.ema[n] = 0.999 * s.ema[n] + 0.001 * p.data",
        },
    ),
    "a weight that is infinite": (
        "PA602|PA603+PA602+PA603",
        {"setup": "s.model[0].weight.data[0, 0] = float('inf')"},
    ),
    "a scale left on": (
        "PA109+PA202",
        {
            **BF16,
            "dtype": "float16",
            "loss": "loss = 2.0**10 * loss",
            "optimizer": "torch.optim.SGD(s.groups, lr=1e-5)",
        },
    ),
    "masters left alone": ("PA405", {**COPIES, "after": "pass"}),
    "masters copied once": (
        "PA405",
        {
            **COPIES,
            "after": "if it == 0:\n    for m, p in zip(s.M, s.model.parameters()):\n"
            "        p.data.copy_(m)",
        },
    ),
    "masters, never zeroed": ("PA404", {**COPIES, "zero": "pass"}),
    "masters with the scale": (
        "PA109",
        {
            **COPIES,
            "optimizer": "torch.optim.SGD(s.M, lr=1e-4)",
            "between": "for m, p in zip(s.M, s.model.parameters()):\n"
            "    m.grad = p.grad.detach().clone().float()",
        },
    ),
    "a hot rate": (
        "PA602|PA603+PA602+PA603",
        {"optimizer": "torch.optim.AdamW(s.groups, lr=1e20)"},
    ),
    "nan gradients made zero": (
        "PA603+PA403+PA604",
        {
            "loss": "loss = loss * float('nan')",
            "between": "for p in s.model.parameters():\n    p.grad.nan_to_num_(0.0)",
        },
    ),
    "an own look at the norm": (
        "PA603|PA601+PA601+PA603",
        {
            "loss": "loss = loss * float('inf')",
            "between": "n = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)",
            "step": "if torch.isfinite(n): s.opt.step()",
        },
    ),
}

PRE = """
import preamp, torch, io
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
                      nn.Linear(16 * 36, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = preamp.initialize(
    model, optimizer, opt_level="{level}", verbosity=0, loss_scale={scale}
)
if {scale} == "dynamic":
    preamp.engine_of(model).scaler(0).set_scale(1024.0)
{setup}
for step in range(10):
    x, y = torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
    {zero}
    loss = F.cross_entropy(model(x).float(), y)
    {loss}
    {backward}
    {clip}
    {step}
    {after}
"""
PRE_SLOTS = {
    "level": "O2",
    "scale": '"dynamic"',
    "backward": "with preamp.scale_loss(loss, optimizer) as s:\n    s.backward()",
    "clip": "preamp.clip_grad_norm_(optimizer, 1.0)",
}
PRE_SCALER = {
    "setup": "scaler = preamp.GradScaler(optimizer)",
    "backward": "scaler.scale(loss).backward()",
    "clip": "scaler.unscale_(optimizer)\nnn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "step": "scaler.step(optimizer)\nscaler.update()",
}
SECOND = {
    "zero": "if step % 2 == 0: optimizer.zero_grad()",
    "clip": "pass",
    "step": "if step % 2: optimizer.step()",
}
SAVED = "torch.save({'o': optimizer.state_dict()}, io.BytesIO())"
PRE_RIGHT: Right = {
    **{level: {"level": level} for level in ("O1", "O2", "O4", "O5")},
    **{f"GradScaler, {level}": {**PRE_SCALER, "level": level} for level in ("O1", "O2", "O5")},
    "a checkpoint": {"after": SAVED.replace("}", ", 'a': preamp.engine_of(model).state_dict()}")},
    "a checkpoint without a scale": {"level": "O5", "scale": "None", "after": SAVED},
    "accumulation": {**SECOND, "loss": "loss = loss / 2"},
    "GradScaler, accumulation": {
        **PRE_SCALER,
        **SECOND,
        "loss": "loss = loss / 2",
        "step": "if step % 2: scaler.step(optimizer); scaler.update()",
    },
}
PRE_WRONG: Wrong = {
    "never zeroed": ("PA404", {"zero": "pass"}),
    "never zeroed, O1": ("PA404", {"zero": "pass", "level": "O1"}),
    "never zeroed, GradScaler": ("PA404", {**PRE_SCALER, "zero": "pass"}),
    "a checkpoint without the scale": ("PA110", {**PRE_SCALER, "after": SAVED}),
    "zeroed before the step": ("PA403", {"clip": "optimizer.zero_grad()"}),
    "zeroed before the step, O1": ("PA403", {"clip": "optimizer.zero_grad()", "level": "O1"}),
    "zeroed before the step, O4": ("PA403", {"clip": "model.zero_grad()", "level": "O4"}),
    "a plain backward": ("PA112", {"level": "O5", "backward": "loss.backward()", "clip": "pass"}),
    "a plain backward, O1": (
        "PA102|PA112",
        {"level": "O1", "backward": "loss.backward()", "clip": "pass"},
    ),
    "a second backward outside": (
        "PA112",
        {
            "level": "O4",
            "clip": "pass",
            "backward": PRE_SLOTS["backward"] + "\nmodel(x).float().pow(2).mean().backward()",
        },
    ),
    "accumulation without division": ("PA406", SECOND),
    "all skipped": ("PA601|PA603+PA601+PA603", {"loss": "loss = loss * 1e34"}),
    "nan": ("PA601|PA603+PA601+PA603", {"loss": "loss = loss * float('nan')"}),
    "nan at a static scale": (
        "PA602|PA603+PA602+PA603",
        {"level": "O5", "scale": "1.0", "loss": "loss = loss * float('nan')"},
    ),
    "Adam in float16": ("PA201+PA602+PA603+PA301", {"level": "O3", "scale": "128.0"}),
    "an average of rounded weights": (
        "PA407",
        {
            "setup": "ema = torch.optim.swa_utils.AveragedModel(model)",
            "after": "if step > 5: ema.update_parameters(model)",
        },
    ),
}

Row = tuple[str, str, dict[str, str], Right, Wrong]
FURTHER: Final[tuple[Row, ...]] = (
    ("GAN", GAN, GAN_SLOTS, GAN_RIGHT, GAN_WRONG),
    ("CNN", CNN, CNN_SLOTS, CNN_RIGHT, CNN_WRONG),
    ("trainer", VIT, VIT_SLOTS, VIT_RIGHT, VIT_WRONG),
    ("preamp", PRE, PRE_SLOTS, PRE_RIGHT, PRE_WRONG),
)
"""Name, skeleton, the slots' usual contents, right edits, wrong edits."""
