# SPDX-License-Identifier: BSD-3-Clause
"""Skeletons of training scripts for the doctor, and edits of them, right ones and bugs.

A case is ``## its name``. A bug's has the rules one of which must be found, after each ``+`` one
that it may lead to besides. Then come slots, ``name: content``; further lines of a content are
indented as its first one. ``@name`` takes the slots below ``## @name``, which those that follow
replace. What a slot usually has is below ``## usual``; one that has nothing is ``pass``.
"""

from __future__ import annotations

import textwrap
from typing import Final

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
USUAL = """
## usual
steps: 12
optimizer: torch.optim.SGD(model.parameters(), lr=0.1)
scaler: scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
zero: optimizer.zero_grad()
step: optimizer.step()
backward: loss.backward()
dtype: float16
start: 1024.0
"""
"""What the slots of `LOOP` have where nothing else is said; each kind below adds its own."""
TORCH_CASES = (
    USUAL
    + """\
backward: scaler.scale(loss).backward()
step: scaler.step(optimizer)
scaler.update()
## @every second, divided
zero: if step % 2 == 0: optimizer.zero_grad()
loss: loss = loss / 2
step: if step % 2: scaler.step(optimizer); scaler.update()
## @accumulate
zero: if step % 2 == 0: optimizer.zero_grad()
## @head
setup: head = nn.Linear(16, 4)
heads = torch.optim.SGD(head.parameters(), lr=0.1)
## @other
loss: other = output.float().square().mean()
## @resumed
optimizer: torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-08)
end: import os, tempfile
folder = tempfile.TemporaryDirectory()
path = os.path.join(folder.name, "last.pt")
def save(path, **more):
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "scaler": scaler.state_dict(), **more}, path)
save(path, epoch=1)
model = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
state = torch.load(path)
model.load_state_dict(state["model"])
{back}
for x, y in data:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16): loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer); scaler.update()
save({path})
folder.cleanup()
path: path
## bfloat16 with a disabled scaler
dtype: bfloat16
scaler: scaler = torch.amp.GradScaler('cpu', enabled=False)
## zeros in place
zero: optimizer.zero_grad(set_to_none=False)
## zeros after the step
zero: pass
after: optimizer.zero_grad()
## zeros by hand
zero: for p in model.parameters(): p.grad = None
## clips unscaled
between: scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
## clips unscaled by hand
between: scaler.unscale_(optimizer)
total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
for p in model.parameters(): p.grad.mul_(1.0 / (total + 1e-6))
## clamps unscaled
between: scaler.unscale_(optimizer)
for p in model.parameters(): p.grad.clamp_(-1e-3, 1e-3)
## noise on scaled gradients
between: for p in model.parameters(): p.grad.add_(torch.randn_like(p), alpha=1e-3)
## divided accumulation
@every second, divided
## accumulation divided in the gradients
@accumulate
step: if step % 2:
    for p in model.parameters(): p.grad.div_(2)
    scaler.step(optimizer); scaler.update()
## accumulation of sums
@every second, divided
loss: loss = F.cross_entropy(output.float(), y, reduction='sum') / 16
## two losses, both scaled
@other
backward: scaler.scale(loss).backward(retain_graph=True)
scaler.scale(other).backward()
## scaled losses added up
@other
backward: (scaler.scale(loss) + scaler.scale(other)).backward()
## a scaled loss divided
backward: (scaler.scale(loss) / 2).backward()
## a second optimizer without half
@head
after: heads.zero_grad(); F.cross_entropy(head(x), y).backward(); heads.step()
## two optimizers, one scaler
@head
loss: loss = loss + F.cross_entropy(head(x), y)
heads.zero_grad()
step: scaler.step(optimizer)
scaler.step(heads)
scaler.update()
## overflows at the beginning
scaler: scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
steps: 40
## one batch with nan
loss: if step == 5: loss = loss * float('nan')
## one batch left out
loss: if step == 5: continue
## a schedule per epoch of skipped steps
steps: 24
setup: schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
scaler: scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
after: if step % 4 == 3: schedule.step()
## gradients dropped after a bad norm
between: if step == 3:
    optimizer.zero_grad()
    continue
## a checkpoint with the scaler
end: states = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
torch.save({**states, 'scaler': scaler.state_dict()}, io.BytesIO())
## only weights are saved
end: torch.save(model.state_dict(), io.BytesIO())
## a float32 average
setup: ema = copy.deepcopy(model)
after: with torch.no_grad():
    for e, p in zip(ema.parameters(), model.parameters()): e.lerp_(p, 0.01)
## evaluation without gradients
after: with torch.no_grad(): model(torch.full((2, 16), float('nan')))
## a frozen layer
optimizer: torch.optim.SGD(model[2].parameters(), lr=0.1)
model: model[0].requires_grad_(False)
## a part of the gradients dropped
between: model[0].zero_grad()
## a scaler for each run
steps: 3
end: for _ in range(4):
    scaler = torch.amp.GradScaler('cpu', init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer); scaler.update()
## scaled by hand by the scaler's scale
setup: scaler.scale(torch.ones(()))
backward: (loss * scaler.get_scale()).backward()
## scaled by hand by the scaler's scale, divided
setup: scaler.scale(torch.ones(()))
backward: (loss * scaler.get_scale() / 4).backward()
## two losses, one scaled by hand
@other
backward: scaler.scale(loss).backward(retain_graph=True)
(other * scaler.get_scale()).backward()
## a weighted loss
loss: loss = 0.5 * loss
## gradients handed on from a scaled loss
loss: features = output.detach().requires_grad_()
loss = F.cross_entropy(features.float(), y)
backward: scaler.scale(loss).backward()
output.backward(features.grad)
## a surrogate made of a scaled loss's gradients
loss: features = output.detach().requires_grad_()
loss = F.cross_entropy(features.float(), y)
backward: scaler.scale(loss).backward()
(output.float() * features.grad.float()).sum().backward()
## a plain term after unscaling
between: scaler.unscale_(optimizer)
(0.01 * model[0].weight.square().sum()).backward()
## a plain loss of a head after unscaling
setup: head = nn.Linear(16, 4)
optimizer.add_param_group({'params': head.parameters()})
between: scaler.unscale_(optimizer)
F.cross_entropy(head(x), y).backward()
## a batch in five that overflows
steps: 60
loss: if step % 5 == 1: loss = loss * 1e35
## a long search for the scale
steps: 60
scaler: scaler = torch.amp.GradScaler("cpu", init_scale=2.0**62)
## a scale that tries its limit
steps: 60
scaler: scaler = torch.amp.GradScaler('cpu', init_scale=2.0**15, growth_interval=1)
## a warm-up from zero
setup: schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / 20)
after: schedule.step()
## a rate of zero for a part
optimizer: torch.optim.SGD([{'params': model[0].parameters(), 'lr': 0.0},
    {'params': model[2].parameters()}], lr=0.1)
## a rate that ends at zero
setup: schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 4)
after: schedule.step()
## a second look at the same batch
zero: for turn in range(2):
    optimizer.zero_grad()
    with torch.autocast('cpu', torch.float16): loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if turn == 0:
        scaler.unscale_(optimizer)
        old = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters(): p.add_(p.grad, alpha=0.01)
        scaler.update()
with torch.no_grad():
    for p, o in zip(model.parameters(), old): p.copy_(o)
backward: pass
## gradients of two tasks put together
zero: kept = []
for task in range(2):
    optimizer.zero_grad()
    with torch.autocast('cpu', torch.float16):
        loss = F.cross_entropy(model(x + task), y)
    scaler.scale(loss).backward()
    kept.append([p.grad.clone() for p in model.parameters()])
for p, a, b in zip(model.parameters(), *kept): p.grad = 0.5 * (a + b)
backward: pass
## a schedule after the accumulation
@every second, divided
setup: schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
step: if step % 2: scaler.step(optimizer); scaler.update(); schedule.step()
## a schedule planned in batches
@every second, divided
setup: schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
after: schedule.step()
## a schedule of what is stepped every second time
setup: head = nn.Linear(16, 4)
heads = torch.optim.SGD(head.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(heads, 6)
after: if step % 2:
    heads.zero_grad(); F.cross_entropy(head(x), y).backward()
    heads.step()
schedule.step()
## resumed
@resumed
back: optimizer.load_state_dict(state['optimizer'])
scaler.load_state_dict(state['scaler'])
## tuned from a checkpoint's weights
@resumed
path: path + '.tuned'
## sums divided by as many as the scale
loss: loss = F.cross_entropy(output.float(), y, reduction='sum')
between: for p in model.parameters(): p.grad.div_(1024.0)
## a part frozen, no gradients
optimizer: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
loss: if step == 3: model[0].requires_grad_(False)
## a part frozen from the beginning
optimizer: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
zero: optimizer.zero_grad(set_to_none=False)
setup: model[0].requires_grad_(False)
## a part's gradients dropped
optimizer: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
between: model[0].zero_grad()
## a part that is not reached decays
optimizer: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
model: model[0].bias.data.fill_(-1e3)
## all steps skipped: PA601
loss: loss = loss * 1e30
steps: 24
## all steps skipped, by nan: PA601|PA603+PA601+PA603
loss: loss = loss * float('nan')
steps: 24
## all steps skipped, fused: PA601
loss: loss = loss * 1e30
optimizer: torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-08, fused=True)
## skipped from the middle on: PA601|PA603+PA601+PA603
steps: 24
loss: if step > 9: loss = loss * float('inf')
## nan loss without a look: PA602|PA603+PA602+PA603
dtype: bfloat16
backward: loss.backward()
step: optimizer.step()
loss: if step == 4: loss = loss * float('nan')
## weights far too far: PA602|PA603+PA602+PA603+PA601
optimizer: torch.optim.SGD(model.parameters(), lr=1e30)
## a loop that swallows nan: PA603|PA602+PA603+PA602+PA601
setup: data = [(x * float('nan'), y) for x, y in data]
loss: if not torch.isfinite(loss): continue
## a loop that makes nan zero: PA603|PA604+PA603+PA604+PA601
setup: data = [(x * float('nan'), y) for x, y in data]
loss: loss = torch.nan_to_num(loss)
## nan swallowed late: PA603
steps: 24
setup: data = data[:12] + [(x * float('inf'), y) for x, y in data[12:]]
loss: if loss != loss: continue
## a scale of one: PA102
scaler: scaler = torch.amp.GradScaler('cpu', init_scale=1.0)
## a second step: PA103
after: optimizer.step()
## a second step, Adam: PA103
after: optimizer.step()
optimizer: torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-08)
## a step before the scaler's: PA103+PA602+PA603
between: optimizer.step()
## clamped by hand through data: PA101
between: for p in model.parameters(): p.grad.data.clamp_(-0.5, 0.5)
## clamped in hooks: PA101
setup: for p in model.parameters(): p.register_hook(lambda g: g.clamp(-1, 1))
## clipped by hand: PA101
between: total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
for p in model.parameters(): p.grad.mul_(1.0 / (total + 1e-6))
## never scaled: PA105
backward: loss.backward()
## never scaled, clipped: PA105
backward: loss.backward()
between: scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
## an unscaled term: PA106
@other
backward: (scaler.scale(loss) + other).backward()
## accumulation onto unscaled gradients: PA106+PA601+PA603
loss: again = F.cross_entropy(model(x + 1), y)
backward: scaler.scale(loss).backward()
scaler.unscale_(optimizer)
scaler.scale(again).backward()
## the scale changes before the step: PA107
between: scaler.update(scaler.get_scale() * 2)
step: scaler.step(optimizer)
## the scale changes between two steps: PA107
@head
loss: heads.zero_grad()
loss = loss + F.cross_entropy(head(x), y)
step: scaler.step(optimizer)
scaler.update()
scaler.step(heads)
scaler.update()
## the scale changes within an accumulation: PA107|PA106+PA406
@every second, divided
@head
step: heads.zero_grad()
scaler.scale(F.cross_entropy(head(x), y)).backward()
scaler.step(heads)
if step % 2: scaler.step(optimizer)
scaler.update()
## a new scaler in a function: PA108
setup: def make(): return torch.amp.GradScaler('cpu', init_scale=1024.0)
zero: optimizer.zero_grad()
scaler = make()
## zeros between backward and step: PA403+PA604
between: optimizer.zero_grad(set_to_none=False)
## zeros after unscaling: PA403
between: scaler.unscale_(optimizer)
optimizer.zero_grad()
## no gradients at the step: PA403
between: optimizer.zero_grad()
step: try: scaler.step(optimizer)
except AssertionError: break
## no zeros at all, Adam: PA404
zero: pass
optimizer: torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-08)
## accumulation of losses in a list: PA406
@every second, divided
loss: loss = F.cross_entropy(output.float(), y) + 1e-4 * model[0].weight.square().mean()
## a nested checkpoint without the scaler: PA110
end: torch.save([1, {'state': {'opt': [optimizer.state_dict()]}}], io.BytesIO())
## an average in half: PA204
steps: 20
setup: ema = copy.deepcopy(model).half()
after: with torch.no_grad():
    for e, p in zip(ema.parameters(), model.parameters()): e.lerp_(p.half(), 0.001)
## an average in bfloat16: PA204
steps: 20
setup: ema = copy.deepcopy(model).bfloat16()
after: with torch.no_grad():
    for e, p in zip(ema.parameters(), model.parameters()):
        e.mul_(0.999).add_(p, alpha=0.001)
## an average in half by lists: PA204
steps: 20
setup: ema = [p.detach().half() for p in model.parameters()]
after: torch._foreach_mul_(ema, 0.999)
torch._foreach_add_(ema, [p.detach().half() for p in model.parameters()], alpha=0.001)
## a scaler with bfloat16, accumulating: PA111
@every second, divided
dtype: bfloat16
## scaled by hand by another scale: PA105
setup: scaler.scale(torch.ones(()))
backward: (loss * 128.0).backward()
## a head never scaled: PA105
setup: head = nn.Linear(16, 4)
optimizer.add_param_group({'params': head.parameters()})
backward: scaler.scale(loss).backward()
F.cross_entropy(head(x), y).backward()
## a weighted loss unscaled: PA106
@other
backward: scaler.scale(loss).backward(retain_graph=True)
(0.5 * other).backward()
## a heavy loss unscaled: PA106
@other
backward: (100 * other).backward(retain_graph=True)
scaler.scale(loss).backward()
## a seed of one, without a scaler: PA102
backward: loss.backward(torch.ones(()))
step: optimizer.step()
## two steps after unscaling: PA103
between: scaler.unscale_(optimizer)
optimizer.step()
## a rate of zero, Adam: PA202
optimizer: torch.optim.Adam(model.parameters(), lr=0.0, eps=1e-08)
## a rate below rounding: PA202
optimizer: torch.optim.SGD(model.parameters(), lr=1e-14)
## a part's gradients deleted: PA404
zero: for p in model[0].parameters(): p.grad = None
## zeros once in five steps: PA404
steps: 40
zero: if step % 5 == 0: optimizer.zero_grad()
## zeros in place in every batch of two: PA403
@every second, divided
zero: optimizer.zero_grad(set_to_none=False)
## gradients deleted in every batch of three: PA403
@every second, divided
zero: for p in model.parameters(): p.grad = None
steps: 24
loss: loss = loss / 3
step: if step % 3 == 2: scaler.step(optimizer); scaler.update()
## a schedule in every batch of two: PA104
@every second, divided
setup: schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
after: schedule.step()
## resumed without the scaler: PA113
@resumed
back: optimizer.load_state_dict(state['optimizer'])
## resumed without the optimizer: PA113
@resumed
back: scaler.load_state_dict(state['scaler'])
## unscaled by the scaler, and by hand: PA105
between: scaler.unscale_(optimizer)
for p in model.parameters(): p.grad.div_(scaler.get_scale())
## a part frozen with zeros: PA408
optimizer: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
zero: optimizer.zero_grad(set_to_none=False)
loss: if step == 3: model[0].requires_grad_(False)
"""
)

HAND_CASES = (
    USUAL
    + """\
dtype: bfloat16
## @128
dtype: float16
backward: (loss * 128.0).backward()
## autocast for the evaluation only
dtype: float32
after: with torch.no_grad(), torch.autocast('cpu', torch.bfloat16): model(x)
## bfloat16 weights at a large rate
optimizer: torch.optim.SGD(model.parameters(), lr=2.0)
## float16 scaled by hand
@128
between: for p in model.parameters(): p.grad.div_(128.0)
## float16 scaled by hand, by a thousand
dtype: float16
backward: (loss * 1000.0).backward()
between: for p in model.parameters(): p.grad.div_(1000.0)
## float16 scaled by hand, undone in hooks
@128
setup: for p in model.parameters(): p.register_hook(lambda g: g / 128.0)
## float16 scaled by hand, undone in the rate
@128
optimizer: torch.optim.SGD(model.parameters(), lr=0.5 / 128)
## a heavy loss in float32
dtype: float32
backward: (loss * 1024.0).backward()
optimizer: torch.optim.SGD(model.parameters(), lr=0.0001)
## bfloat16 weights that do not move: PA202
optimizer: torch.optim.SGD(model.parameters(), lr=1e-4)
## bfloat16 weights under Adam: PA202
optimizer: torch.optim.Adam(model.parameters(), lr=1e-06, eps=1e-08)
## bfloat16 weights with a warm-up: PA202
optimizer: torch.optim.Adam(model.parameters(), lr=1e-05, eps=1e-08)
setup: schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: s / 20)
after: schedule.step()
## float16 weights that do not move: PA202
@128
optimizer: torch.optim.SGD(model.parameters(), lr=1e-5)
between: for p in model.parameters(): p.grad.div_(128.0)
## an unscaled scale, in a seed: PA109
dtype: float16
backward: loss.backward(torch.tensor(256.0))
optimizer: torch.optim.SGD(model.parameters(), lr=0.001)
## an unscaled scale, clipped: PA109
dtype: float16
backward: (256.0 * loss).backward()
between: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
## a scale undone twice: PA109+PA202
@128
between: for p in model.parameters(): p.grad.div_(128.0)
for p in model.parameters(): p.grad.div_(128.0)
## weighted, without a scale: PA102
dtype: float16
backward: (2 * loss).backward()
## autocast around the loss: PA303
dtype: float32
loss: with torch.autocast('cpu', torch.bfloat16):
    loss = F.cross_entropy(model[2].bias.expand(8, 4), y) + loss
## autocast switched off inside: PA303
dtype: float32
setup: inner = model
class Off(nn.Module):
    def __init__(self): super().__init__(); self.inner = inner
    def forward(self, x):
        with torch.autocast('cpu', enabled=False): return self.inner(x)
outer = Off()
def model(x):
    with torch.autocast('cpu', torch.bfloat16): return outer(x)
## zeros before the step, model: PA403
optimizer: torch.optim.SGD(model.parameters(), lr=2.0)
between: model.zero_grad()
## weights that become nan: PA602|PA603+PA603+PA602+PA201
@128
optimizer: torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-08)
between: for p in model.parameters(): p.grad.div_(128.0)
## gradients that vanish: PA604+PA102+PA202
dtype: float16
loss: loss = loss * 1e-8
optimizer: torch.optim.SGD(model.parameters(), lr=1e8)
## nan from the data: PA603+PA602
setup: data = [(x * float('nan'), y) for x, y in data]
## no step is taken: PA601
step: pass
dtype: float32
"""
)

MASTERS_CASES = (
    USUAL
    + """\
masters: [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer: torch.optim.SGD(masters, lr=0.1, momentum=0.9)
zero: model.zero_grad()
backward: (loss * 128.0).backward()
between: for m, p in zip(masters, model.parameters()): m.grad = p.grad.float() / 128.0
after: for m, p in zip(masters, model.parameters()): p.data.copy_(m.data)
## plain
## masters in one tensor
masters: [nn.utils.parameters_to_vector(model.parameters()).detach().float().requires_grad_()]
between: grads = [p.grad.reshape(-1) for p in model.parameters()]
masters[0].grad = torch.cat(grads).float() / 128.0
after: with torch.no_grad():
    nn.utils.vector_to_parameters(masters[0].half(), model.parameters())
## the scale is undone twice: PA109
between: for m, p in zip(masters, model.parameters()):
    m.grad = p.grad.float() / 128.0 / 128.0
## never copied back, one tensor: PA405
masters: [nn.utils.parameters_to_vector(model.parameters()).detach().float().requires_grad_()]
between: grads = [p.grad.reshape(-1) for p in model.parameters()]
masters[0].grad = torch.cat(grads).float() / 128.0
after: pass
## copied the wrong way: PA405
after: for m, p in zip(masters, model.parameters()): m.data.copy_(p.data)
## the scale is left on: PA109+PA602+PA603
between: for m, p in zip(masters, model.parameters()): m.grad = p.grad.float()
"""
)

AMP_CASES = (
    USUAL
    + """\
backward: with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()
level: O2
scale: "dynamic"
## @accumulate
zero: if step % 2 == 0: optimizer.zero_grad()
## O1, two losses
level: O1
setup: other = lambda: (model(x).float() ** 2).mean()
backward: with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()
with amp.scale_loss(other(), optimizer) as scaled_loss: scaled_loss.backward()
## O2, accumulation
@accumulate
loss: loss = loss / 2
step: if step % 2: optimizer.step()
## O2, clipping
between: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
## O2, a checkpoint
end: states = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
torch.save({**states, 'amp': amp.state_dict()}, io.BytesIO())
## O5, an average
level: O5
setup: ema = torch.optim.swa_utils.AveragedModel(model)
import preamp
engine = preamp.engine_of(model)
after: with engine.exact_weights(): ema.update_parameters(model)
## O2, SAM through data
between: params = [p for p in amp.master_params(optimizer)]
old = [p.detach().clone() for p in params]
for p in params: p.data.add_(p.grad, alpha=0.05)
optimizer.zero_grad()
with amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as again:
    again.backward()
for p, value in zip(params, old): p.data.copy_(value)
## O5, Lookahead through data
level: O5
setup: slow = [p.detach().clone() for p in amp.master_params(optimizer)]
after: if step % 3 == 2:
    for s, p in zip(slow, amp.master_params(optimizer)):
        p.data.copy_(s.lerp_(p.detach(), 0.5))
## O2, SAM
between: params = [p for p in amp.master_params(optimizer)]
old = [p.detach().clone() for p in params]
with torch.no_grad():
    for p in params: p.add_(p.grad, alpha=0.05)
optimizer.zero_grad()
with amp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as again:
    again.backward()
with torch.no_grad():
    for p, value in zip(params, old): p.copy_(value)
## a static scale far too large: PA602+PA603
scale: 2.0**30
level: O2
## a static scale far too large, O3: PA602+PA603
scale: 2.0**30
level: O3
## gradients that vanish at O3: PA604+PA102+PA202
level: O3
scale: 1.0
loss: loss = loss * 1e-8
## a swallowed error: PA601|PA603+PA603+PA601
steps: 60
loss: loss = loss * float('nan')
step: optimizer.step()
backward: try:
    with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()
except Exception: continue
## accumulation without division, O1: PA406
@accumulate
level: O1
step: if step % 2: optimizer.step()
## zeros in every batch of two: PA403
loss: loss = loss / 2
step: if step % 2: optimizer.step()
## clamped in the block: PA101
level: O1
backward: with amp.scale_loss(loss, optimizer) as scaled_loss:
    scaled_loss.backward()
    for p in model.parameters(): p.grad.clamp_(-1, 1)
## a plain backward at O4: PA112
level: O4
backward: loss.backward()
## a plain backward at O2: PA102|PA112
backward: loss.backward()
## a checkpoint without amp: PA110
end: torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, io.BytesIO())
## O5, an average of rounded weights: PA407
level: O5
setup: ema = torch.optim.swa_utils.AveragedModel(model)
after: ema.update_parameters(model)
## O5, half shadows of weights: PA204
level: O5
scale: None
setup: shadows = [p.clone().detach() for p in model.parameters()]
after: with torch.no_grad():
    for s, p in zip(shadows, model.parameters()): s.sub_((s - p).mul_(0.001))
## O3, an average in half: PA204
level: O3
scale: 128.0
steps: 20
setup: ema = copy.deepcopy(model)
after: with torch.no_grad():
    for e, p in zip(ema.parameters(), model.parameters()): e.lerp_(p, 0.001)
"""
)

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
GAN_CASES = """
## usual
dzero: od.zero_grad()
fake: scaler.scale(loss_fake).backward()
dstep: scaler.step(od)
gzero: og.zero_grad()
gback: scaler.scale(lossg).backward()
gstep: scaler.step(og)
## plain
## both zeroed
gzero: og.zero_grad(); od.zero_grad()
## two updates
dstep: scaler.step(od); scaler.update()
## D every second
dstep: if step % 2: scaler.step(od)
## D unscaled and unscaled by hand: PA106
fake: loss_fake.backward()
dstep: scaler.unscale_(od); scaler.step(od)
## G unscaled: PA105+PA106
gback: lossg.backward()
## an unscaled term: PA106
gback: (scaler.scale(lossg) + 0.1 * fake.float().pow(2).mean()).backward()
## update between: PA107
gstep: scaler.update(); scaler.step(og)
## D never zeroed: PA404|PA106+PA106+PA404
dzero: pass
## D stepped past the scaler: PA103
dstep: od.step()
"""

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
CNN_CASES = """
## usual
dtype: float16
zero: opt.zero_grad(set_to_none=True)
backward: scaler.scale(loss).backward()
clip: scaler.unscale_(opt)
nn.utils.clip_grad_norm_(net.parameters(), 1.0)
step: scaler.step(opt)
scaler.update()
epoch: sched.step()
optimizer: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scale: 512.0
## plain
## Adam
optimizer: torch.optim.Adam(net.parameters())
## values clipped
clip: scaler.unscale_(opt)
nn.utils.clip_grad_value_(net.parameters(), 0.01)
## a checkpoint
end: torch.save(dict(opt=opt.state_dict(), scaler=scaler.state_dict()), io.BytesIO())
## a second phase
end: scaler = torch.amp.GradScaler('cpu', init_scale=512.0)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
train(net, opt, scaler, 1)
## a heavy loss
loss: loss = 128 * loss
## the norm of scaled gradients logged
clip: gn = sum(float(p.grad.norm()) for p in net.parameters())
scaler.unscale_(opt)
nn.utils.clip_grad_norm_(net.parameters(), 1.0)
## a guard
loss: if not math.isfinite(loss.item()): raise SystemExit
## half copies
epoch: sched.step()
last = copy.deepcopy(net).half()
## clamped into new tensors: PA101
clip: for p in net.parameters(): p.grad = p.grad.clamp(-0.1, 0.1)
## the norm by hand through data: PA101
clip: n = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in net.parameters()))
if n > 0.1:
    for p in net.parameters(): p.grad.data.mul_(0.1 / n)
## both steps: PA103
step: opt.step()
scaler.step(opt)
scaler.update()
## the wrong step: PA103
step: opt.step()
scaler.update()
## no scale: PA105
backward: scaler.scale(loss)
loss.backward()
## a schedule per skipped step: PA104+PA601
scale: 2.0**28
step: scaler.step(opt)
scaler.update()
sched.step()
epoch: pass
## a loss too hot: PA601|PA603+PA601+PA603
loss: loss = 1e38 * loss
## an infinite rate: PA602|PA603|PA601+PA602+PA603+PA601
optimizer: torch.optim.SGD(net.parameters(), lr=1e38)
## zeroed before unscaling: PA403+PA604
clip: net.zero_grad(set_to_none=False)
scaler.unscale_(opt)
nn.utils.clip_grad_norm_(net.parameters(), 1.0)
## the scaler remade: PA108
zero: opt.zero_grad()
scaler = torch.amp.GradScaler('cpu', init_scale=512.0)
## a checkpoint in a tuple: PA110
epoch: sched.step()
torch.save((net.state_dict(), opt.state_dict()), io.BytesIO())
## BatchNorm in half: PA301
setup: net[1].half()
## a scale below one: PA102
scale: 0.5
## bfloat16: PA111
dtype: bfloat16
## nan swallowed by a number: PA603
loss: loss = loss * float('nan')
if math.isnan(loss.item()): continue
## nan swallowed after a while: PA603
loss: if i > 3 or epoch: loss = loss / 0 * 0
if not math.isfinite(float(loss)): continue
## no step: PA601|PA404+PA601+PA404
step: pass
clip: pass
zero: pass
## autocast for a device that is not there: PA303|PA105+PA303+PA105
dtype: float16)if 0 else torch.autocast('cuda', torch.float16
backward: loss.backward()
clip: pass
step: opt.step()
"""

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
VIT_CASES = """
## usual
dtype: float32
optimizer: torch.optim.AdamW(s.groups, lr=3e-4)
zero: s.opt.zero_grad()
casts: True
backward: loss.backward()
step: s.opt.step()
## @copies
dtype: float16
casts: False
setup: s.M = [p.detach().float().requires_grad_() for p in s.model.parameters()]
optimizer: torch.optim.AdamW(s.M, lr=1e-3)
zero: s.model.zero_grad()
backward: (loss * 256.0).backward()
between: for m, p in zip(s.M, s.model.parameters()): m.grad = p.grad.float() / 256
after: for m, p in zip(s.M, s.model.parameters()): p.data.copy_(m)
## @bf16
dtype: bfloat16
casts: False
optimizer: torch.optim.AdamW(s.groups, lr=2e-2)
## @fourth
zero: if it % 4 == 0: s.opt.zero_grad()
step: if it % 4 == 3: s.opt.step()
## plain
## bfloat16 weights at a large rate
@bf16
## accumulation
@fourth
loss: loss = loss / 4
## accumulation, multiplied
@fourth
loss: loss = loss * 0.25
## accumulation of weighted sums
@fourth
loss: loss = loss * 168 / 700
## gradients divided by ranks
between: for p in s.model.parameters(): p.grad /= 1
## a float32 average of bfloat16
@bf16
setup: s.ema = copy.deepcopy(s.model).float()
after: with torch.no_grad():
    for e, p in zip(s.ema.parameters(), s.model.parameters()):
        e.lerp_(p.float(), 0.001)
## frozen layers
setup: for p in s.model[:2].parameters(): p.requires_grad_(False)
## zeros through data
zero: for p in s.model.parameters():
    if p.grad is not None: p.grad.data.zero_()
## decayed gradients
between: for p in s.model.parameters(): p.grad.mul_(0.5)
## masters
@copies
## masters, gradients zeroed early
@copies
zero: pass
between: for m, p in zip(s.M, s.model.parameters()): m.grad = p.grad.float() / 256
s.model.zero_grad()
## masters, a rate of almost nothing
@copies
optimizer: torch.optim.AdamW(s.M, lr=1e-9)
## bfloat16 weights at a small rate: PA202
@bf16
optimizer: torch.optim.AdamW(s.groups, lr=1e-4)
## float16 weights under Adam: PA201+PA102+PA602+PA603
@bf16
dtype: float16
optimizer: torch.optim.AdamW(s.groups, lr=1e-3)
## never zeroed: PA404
zero: pass
## zeroed in the wrong place: PA403
zero: pass
between: s.opt.zero_grad()
## accumulation of a written mean: PA406
@fourth
loss: loss = (s.model(x).float() - y).pow(2).mean()
## autocast around the data: PA303
casts: False
zero: s.opt.zero_grad()
with torch.autocast('cpu', torch.bfloat16): x = x + 0
## a bfloat16 average by copies: PA204
@bf16
setup: s.ema = copy.deepcopy(s.model)
after: with torch.no_grad():
    for e, p in zip(s.ema.parameters(), s.model.parameters()):
        e.copy_(0.9995 * e + 0.0005 * p)
## a bfloat16 average through data: PA204
@bf16
setup: s.ema = copy.deepcopy(s.model)
after: with torch.no_grad():
    for e, p in zip(s.ema.parameters(), s.model.parameters()):
        e.data.lerp_(p.data, 0.0005)
## torch's average of bfloat16: PA204
@bf16
setup: from torch.optim.swa_utils import AveragedModel as A
from torch.optim.swa_utils import get_ema_multi_avg_fn as f
s.ema = A(s.model, multi_avg_fn=f(0.9995))
after: s.ema.update_parameters(s.model)
## an average of new bfloat16 tensors: PA204
@bf16
setup: s.ema = {n: p.detach() for n, p in s.model.named_parameters()}
after: for n, p in s.model.named_parameters(): s.ema[n] = 0.999 * s.ema[n] + 0.001 * p.data
## a weight that is infinite: PA602|PA603+PA602+PA603
setup: s.model[0].weight.data[0, 0] = float('inf')
## a scale left on: PA109+PA202
@bf16
dtype: float16
optimizer: torch.optim.SGD(s.groups, lr=1e-5)
loss: loss = 2.0**10 * loss
## masters left alone: PA405
@copies
after: pass
## masters copied once: PA405
@copies
after: if it == 0:
    for m, p in zip(s.M, s.model.parameters()): p.data.copy_(m)
## masters, never zeroed: PA404
@copies
zero: pass
## masters with the scale: PA109
@copies
optimizer: torch.optim.SGD(s.M, lr=1e-4)
between: for m, p in zip(s.M, s.model.parameters()): m.grad = p.grad.detach().clone().float()
## a hot rate: PA602|PA603+PA602+PA603
optimizer: torch.optim.AdamW(s.groups, lr=1e20)
## nan gradients made zero: PA603+PA403+PA604
loss: loss = loss * float('nan')
between: for p in s.model.parameters(): p.grad.nan_to_num_(0.0)
## an own look at the norm: PA603|PA601+PA601+PA603
loss: loss = loss * float('inf')
between: n = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
step: if torch.isfinite(n): s.opt.step()
"""

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
PRE_CASES = """
## usual
zero: optimizer.zero_grad()
step: optimizer.step()
level: O2
scale: "dynamic"
backward: with preamp.scale_loss(loss, optimizer) as s: s.backward()
clip: preamp.clip_grad_norm_(optimizer, 1.0)
## @scaler
setup: scaler = preamp.GradScaler(optimizer)
backward: scaler.scale(loss).backward()
clip: scaler.unscale_(optimizer)
nn.utils.clip_grad_norm_(model.parameters(), 1.0)
step: scaler.step(optimizer)
scaler.update()
## @second
zero: if step % 2 == 0: optimizer.zero_grad()
clip: pass
step: if step % 2: optimizer.step()
## O1
level: O1
## O2
level: O2
## O4
level: O4
## O5
level: O5
## GradScaler, O1
@scaler
level: O1
## GradScaler, O2
@scaler
level: O2
## GradScaler, O5
@scaler
level: O5
## a checkpoint
after: states = {'o': optimizer.state_dict(), 'a': preamp.engine_of(model).state_dict()}
torch.save(states, io.BytesIO())
## a checkpoint without a scale
level: O5
scale: None
after: torch.save({'o': optimizer.state_dict()}, io.BytesIO())
## accumulation
@second
loss: loss = loss / 2
## GradScaler, accumulation
@scaler
@second
step: if step % 2: scaler.step(optimizer); scaler.update()
loss: loss = loss / 2
## never zeroed: PA404
zero: pass
## never zeroed, O1: PA404
zero: pass
level: O1
## never zeroed, GradScaler: PA404
@scaler
zero: pass
## a checkpoint without the scale: PA110
@scaler
after: torch.save({'o': optimizer.state_dict()}, io.BytesIO())
## zeroed before the step: PA403
clip: optimizer.zero_grad()
## zeroed before the step, O1: PA403
clip: optimizer.zero_grad()
level: O1
## zeroed before the step, O4: PA403
clip: model.zero_grad()
level: O4
## a plain backward: PA112
level: O5
backward: loss.backward()
clip: pass
## a plain backward, O1: PA102|PA112
level: O1
backward: loss.backward()
clip: pass
## a second backward outside: PA112
level: O4
clip: pass
backward: with preamp.scale_loss(loss, optimizer) as s: s.backward()
model(x).float().pow(2).mean().backward()
## accumulation without division: PA406
@second
## all skipped: PA601|PA603+PA601+PA603
loss: loss = loss * 1e34
## nan: PA601|PA603+PA601+PA603
loss: loss = loss * float('nan')
## nan at a static scale: PA602|PA603+PA602+PA603
level: O5
scale: 1.0
loss: loss = loss * float('nan')
## Adam in float16: PA201+PA602+PA603+PA301
level: O3
scale: 128.0
## an average of rounded weights: PA407
setup: ema = torch.optim.swa_utils.AveragedModel(model)
after: if step > 5: ema.update_parameters(model)
"""

KINDS: Final = {
    "torch": (TORCH, TORCH_CASES),
    "by hand": (HAND, HAND_CASES),
    "masters": (MASTERS, MASTERS_CASES),
    "amp": (AMP, AMP_CASES),
    "GAN": (GAN, GAN_CASES),
    "CNN": (CNN, CNN_CASES),
    "trainer": (VIT, VIT_CASES),
    "preamp": (PRE, PRE_CASES),
}
"""By name the skeleton and its cases."""
