# SPDX-License-Identifier: BSD-3-Clause
"""Whole training scripts in forms of real life for the doctor, and bugs planted in them.

No rule was written with their forms in view.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

PRELUDE = """
import copy, io, math
import torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
def half(): return torch.autocast("cpu", torch.float16)
def bf16(): return torch.autocast("cpu", torch.bfloat16)
def net(i=16, o=4): return nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, o))
def conv(): return nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
def images(): return torch.randn(6, 3, 8, 8), torch.randint(4, (6,))
def batch(n=8): return torch.randn(n, 16), torch.randint(4, (n,))
def Scaler(scale=1024.0): return torch.amp.GradScaler("cpu", init_scale=scale)
"""
STEPS: Final = {
    "@scaled": (
        "opt.zero_grad()",
        "scaler.scale(loss).backward()",
        "scaler.step(opt)",
        "scaler.update()",
    ),
    "@plain": ("opt.zero_grad()", "loss.backward()", "opt.step()"),
}
"""What stands for a whole step in a script, and its lines."""

SCRIPTS: Final = """
## the best weights restored
def train():
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    best, kept = math.inf, copy.deepcopy(model.state_dict())
    for epoch in range(12):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        if float(loss) < best:
            best, kept = float(loss), copy.deepcopy(model.state_dict())
        opt.zero_grad()
        loss.backward()
        if epoch == 8:
            opt.param_groups[0]["lr"] = 1e30
        opt.step()
    model.load_state_dict(kept)
    return model
model = train()
print(model(batch()[0]).sum().item())
## a snapshot put back by hand
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    x, y = batch()
    kept = [p.detach().clone() for p in model.parameters()]
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.param_groups[0]["lr"] = 0.1 if step < 8 else math.inf
    opt.step()
if not all(p.isfinite().all() for p in model.parameters()):
    for p, value in zip(model.parameters(), kept):
        p.data = value
## the best copy used
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
best, least = copy.deepcopy(model), math.inf
for step in range(12):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    if loss.item() < least:
        best, least = copy.deepcopy(model), loss.item()
    opt.param_groups[0]["lr"] = 0.1 if step < 7 else 1e30
    @plain
with torch.no_grad():
    x, y = batch()
    print(F.cross_entropy(best(x), y))
## a sweep of rates
def trial(rate):
    torch.manual_seed(1)
    model, scaler = net(), Scaler()
    opt = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(16):
        x, y = batch()
        opt.zero_grad()
        with half():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return loss.item()
results = {rate: trial(rate) for rate in (1e-2, 1e30, 1e-1)}
best = min(results, key=lambda rate: results[rate] if results[rate] == results[rate] else 1e9)
## a sweep of rates, the last one too hot
best = (math.inf, None)
for rate in (1e-2, 1e-1, 1e30):
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(8):
        x, y = batch()
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    best = min(best, (loss.item(), rate))
## a sweep whose models are kept
runs = []
for rate in (1e25, 1e-1):
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(8):
        x, y = batch()
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    runs.append((loss.item(), model, opt))
## a first try thrown away
def fit(model, rate):
    opt = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(10):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            return None
        @plain
    return model
model = fit(net(), 1e30)
if model is None:
    model = fit(net(), 0.1)
## a finder of the learning rate
model = net()
start = copy.deepcopy(model.state_dict())
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
rates = torch.optim.lr_scheduler.ExponentialLR(opt, 1e3)
losses = []
for step in range(20):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    losses.append(loss.item())
    if not losses[-1] < 4 * min(losses):
        break
    @plain
    rates.step()
model.load_state_dict(start)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = batch()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
## rolled back and cooled
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
good = copy.deepcopy((model.state_dict(), opt.state_dict()))
for step in range(14):
    x, y = batch()
    if step == 6:
        opt.param_groups[0]["lr"] = 1e30
    loss = F.cross_entropy(model(x), y)
    if not math.isfinite(loss.item()):
        model.load_state_dict(good[0])
        opt.load_state_dict(good[1])
        continue
    @plain
## a metric that is nan
model, scaler = net(), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = batch()
    with half():
        out = model(x)
        loss = F.cross_entropy(out, y)
    recall = (out.softmax(1)[:, 0] * (y == 9)).sum() / (y == 9).sum()
    @scaled
    print(f"{loss.item():.3f} {recall.item():.3f}")
## metrics written by one function
log = {}
def write(name, value): log.setdefault(name, []).append(float(value))
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = batch()
    out = model(x)
    loss = F.cross_entropy(out, y)
    values = {"loss": loss, "a": out[y == 9].mean(), "b": out[:0].mean(), "c": out[:0].std(),
              "d": (out - out).sum() / 0}
    for name, value in values.items():
        write(name, value)
    @plain
## a model that returns a metric
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, x, y):
        out = self.body(x)
        return {"loss": F.cross_entropy(out, y), "rare": out[y == 9].mean()}
model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    opt.zero_grad()
    model(*batch())["loss"].backward()
    opt.step()
## outputs that are nan where nothing is
class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
    def forward(self, x, mask):
        score = self.embed(x) @ x.transpose(1, 2)
        score = score.masked_fill(~mask[:, None, :], -math.inf)
        out = self.head(score.softmax(-1) @ x)
        return torch.where(mask[..., None], out, torch.full_like(out, math.nan))
model = Padded()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, mask = torch.randn(4, 5, 16), torch.ones(4, 5, dtype=torch.bool)
    mask[1:, 3:] = False
    out = model(x, mask)
    opt.zero_grad()
    F.cross_entropy(out[mask], torch.randint(4, (int(mask.sum()),))).backward()
    opt.step()
## a term without members made zero
model, scaler = net(), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = batch()
    with half():
        out = model(x)
        rare = F.cross_entropy(out[y == 9], y[y == 9])
        loss = F.cross_entropy(out, y) + torch.nan_to_num(rare)
    print(rare.item())
    @scaled
## a look at the end with gradients on
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = batch()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
for group in range(4):
    x, y = batch()
    print(F.cross_entropy(model(x)[y == 9], y[y == 9]).item())
## a satisfied hinge
model, scaler = net(16, 1), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, _ = batch()
    with half():
        score = model(x)
    loss = F.relu(score.float() - 100.0).mean() + 0.25
    @scaled
## a satisfied hinge in half
model, scaler = net(16, 1), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, _ = batch(2048)
    with half():
        loss = (F.relu(model(x) - 100.0) + 0.5).float().mean()
    @scaled
## fitted to the last digit
model, scaler = net(), Scaler(2.0**16)
opt = torch.optim.Adam(model.parameters(), lr=0.5)
x = torch.randn(4, 16)
y = torch.arange(4)
for step in range(60):
    with half():
        out = model(20 * x)
    loss = F.cross_entropy(out.float(), y) + 1e-30
    @scaled
## triplets without a hard one
model, scaler = net(), Scaler(2.0**16)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    x, _ = batch()
    with half():
        a, p, n = (F.normalize(model(v).float(), dim=1) for v in (x, x + 1e-3, -x))
        loss = F.triplet_margin_loss(a, p, n, margin=1e-6) + 0.1
    @scaled
## a weight of zero in the warm-up
model, scaler = net(), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x, y = batch()
    with half():
        loss = F.cross_entropy(model(x), y)
    loss = min(1.0, max(0, step - 7) / 10) * loss + 1.0
    @scaled
## statistics of gradients
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
norms = []
for step in range(10):
    x, y = batch()
    F.cross_entropy(model(x), y).backward()
    norms.append([p.grad.norm().item() for p in model.parameters()])
    opt.zero_grad()
## statistics of unscaled gradients
model, scaler = net(), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x, y = batch()
    with half():
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    print(max(p.grad.abs().max().item() for p in model.parameters()))
    scaler.update()
    opt.zero_grad()
## Fisher information
model = net()
opt = torch.optim.Adam(model.parameters())
fisher = [torch.zeros_like(p) for p in model.parameters()]
for step in range(12):
    x, y = batch(1)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for f, p in zip(fisher, model.parameters()):
        f += p.grad.square() / 12
## an attack
model = net()
opt = torch.optim.Adam(model.parameters())
model.eval()
x, y = batch()
x = x.requires_grad_()
for step in range(12):
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        x += 0.01 * x.grad.sign()
        x.grad = None
## gradients looked at in hooks
model, seen = net(), []
opt = torch.optim.Adam(model.parameters())
for p in model.parameters():
    p.register_hook(lambda g: seen.append(g.abs().max().item()))
for step in range(12):
    x, y = batch()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
## a gradient penalty
G, D, scaler = net(8, 16), net(16, 1), Scaler(256.0)
og = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
od = torch.optim.Adam(D.parameters(), lr=1e-4, betas=(0.0, 0.9))
for step in range(10):
    real, z = torch.randn(8, 16), torch.randn(8, 8)
    od.zero_grad(set_to_none=True)
    with half():
        fake = G(z).detach()
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        out = D(mixed)
        critic = D(fake).mean() - D(real).mean()
    grads = torch.autograd.grad(scaler.scale(out.float().sum()), mixed, create_graph=True)[0]
    grads = grads / scaler.get_scale()
    with half():
        penalty = ((grads.float().norm(dim=1) - 1) ** 2).mean()
    scaler.scale(critic.float() + 10 * penalty).backward()
    scaler.step(od)
    if step % 5 == 4:
        og.zero_grad(set_to_none=True)
        with half():
            loss = -D(G(z)).mean()
        scaler.scale(loss.float()).backward()
        scaler.step(og)
    scaler.update()
## an average in float32, with evaluation
model, scaler = conv(), Scaler()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
ema = copy.deepcopy(model).eval().requires_grad_(False)
for step in range(16):
    x, y = images()
    with half():
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    with torch.no_grad():
        for e, p in zip(ema.state_dict().values(), model.state_dict().values()):
            e.copy_(e.float().mul(0.99).add(p.float(), alpha=0.01)) if e.is_floating_point() else 0
    if step % 4 == 3:
        model.eval()
        with torch.no_grad(), half():
            accuracy = (ema(x).argmax(1) == y).float().mean()
        model.train()
## SWA
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
model = conv()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
swa, flat = AveragedModel(model), SWALR(opt, swa_lr=0.01)
data = [images() for _ in range(6)]
for epoch in range(4):
    for x, y in data:
        opt.zero_grad()
        with bf16():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
    if epoch > 1:
        swa.update_parameters(model)
        flat.step()
update_bn(data, swa)
## early stopping
model, scaler = net(), Scaler()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
best, patience, kept = math.inf, 0, None
for epoch in range(20):
    for _ in range(3):
        x, y = batch()
        with half():
            loss = F.cross_entropy(model(x), y)
        @scaled
    with torch.no_grad():
        x, y = batch()
        value = F.cross_entropy(model(x), y).item()
    plateau.step(value)
    if value < best:
        best, patience, kept = value, 0, copy.deepcopy(model.state_dict())
    else:
        patience += 1
    if patience > 2:
        break
model.load_state_dict(kept)
## a curriculum
model, scaler = net(), Scaler()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(20):
    x, y = batch(4 + 4 * (step // 5))
    weight = torch.tensor([1.0, step / 20, 0.0, 0.0])
    if not (weight[y] > 0).any():
        continue
    with half():
        loss = F.cross_entropy(model(x), y, weight=weight)
    @scaled
## policy gradients
policy, value = net(), net(16, 1)
opt = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-4)
scaler = Scaler()
for episode in range(12):
    states, _ = batch(16)
    with half():
        dist = torch.distributions.Categorical(logits=policy(states).float())
        baseline = value(states).float().squeeze(1)
    actions = dist.sample()
    reward = (actions == 1).float() * (episode % 3 > 0)
    advantage = reward - reward.mean()
    loss = -(dist.log_prob(actions) * advantage).mean() - 0.01 * dist.entropy().mean()
    loss = loss + 0.5 * F.mse_loss(baseline, reward)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_([p for g in opt.param_groups for p in g["params"]], 0.5)
    scaler.step(opt)
    scaler.update()
## a policy without a reward
policy, scaler = net(), Scaler()
opt = torch.optim.Adam(policy.parameters(), lr=3e-4)
for episode in range(10):
    states, _ = batch(16)
    with half():
        dist = torch.distributions.Categorical(logits=policy(states).float())
    loss = -(dist.log_prob(dist.sample()) * torch.zeros(16)).sum()
    @scaled
## PPO
policy, value = net(), net(16, 1)
opt = torch.optim.Adam([{"params": policy.parameters()}, {"params": value.parameters()}], lr=1e-3)
for rollout in range(4):
    states, actions = batch(32)
    with torch.no_grad():
        old = F.log_softmax(policy(states), 1).gather(1, actions[:, None])
        gain = torch.randn(32, 1) - value(states)
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    for epoch in range(3):
        for part in torch.randperm(32).split(8):
            with bf16():
                logp = F.log_softmax(policy(states[part]), 1).gather(1, actions[part][:, None])
                ratio = (logp - old[part]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.min(ratio * gain[part], clipped * gain[part]).mean()
                loss = loss + 0.5 * (value(states[part]).float() - gain[part]).square().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            nn.utils.clip_grad_norm_(value.parameters(), 0.5)
            opt.step()
            if (old[part] - logp.detach()).mean().item() > 0.5:
                break
## Q learning with a slow target
q = net()
target = copy.deepcopy(q)
for p in target.parameters():
    p.requires_grad = False
opt, scaler = torch.optim.RMSprop(q.parameters(), lr=1e-3), Scaler()
for step in range(16):
    s, a = batch(16)
    n, r = torch.randn(16, 16), torch.randn(16)
    with torch.no_grad(), half():
        goal = r + 0.99 * target(n).float().max(1).values
    with half():
        loss = F.smooth_l1_loss(q(s).float().gather(1, a[:, None]).squeeze(1), goal)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    for p in q.parameters():
        p.grad.data.clamp_(-1, 1)
    scaler.step(opt)
    scaler.update()
    for t, p in zip(target.parameters(), q.parameters()):
        t.data.mul_(0.995).add_(0.005 * p.data)
## contrastive
tower, other = net(16, 8), net(16, 8)
logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
opt = torch.optim.AdamW([*tower.parameters(), *other.parameters(), logit_scale], lr=5e-4)
scaler = Scaler()
for step in range(12):
    x, _ = batch(16)
    with half():
        a, b = F.normalize(tower(x).float()), F.normalize(other(x + 0.1).float())
        logits = logit_scale.exp() * a @ b.t()
        own = (a @ a.t() / 0.07).masked_fill(torch.eye(16, dtype=torch.bool), -math.inf)
        loss = F.cross_entropy(logits.float(), torch.arange(16))
        loss = loss + 0.1 * own.float().logsumexp(1).mean()
    @scaled
    with torch.no_grad():
        logit_scale.clamp_(0, math.log(100))
## a frozen backbone
body, head, scaler = conv()[:4].eval().requires_grad_(False), nn.Linear(288, 4), Scaler()
opt = torch.optim.SGD(head.parameters(), lr=0.01)
for step in range(10):
    x, y = images()
    with torch.no_grad(), half():
        features = body(x)
    with half():
        loss = F.cross_entropy(head(features), y)
    @scaled
## adapters on bfloat16 weights
class LoRA(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).float() + x.float() @ self.a.t() @ self.b.t()
model = net().to(torch.bfloat16)
model[0], model[2] = LoRA(model[0]), LoRA(model[2])
opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(12):
    x, y = batch()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()
## losses with learnt weights
model, scaler = net(16, 5), Scaler()
spread = nn.Parameter(torch.zeros(2))
opt = torch.optim.Adam([{"params": model.parameters()}, {"params": [spread], "lr": 1e-2}], lr=1e-3)
for step in range(12):
    x, y = batch()
    with half():
        out = model(x).float()
    parts = torch.stack([F.cross_entropy(out[:, :4], y), F.mse_loss(out[:, 4], x[:, 0])])
    loss = (parts * (-spread).exp() + spread).sum()
    @scaled
## a loss for each layer
model, scaler = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]), Scaler()
heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
opt = torch.optim.SGD([*model.parameters(), *heads.parameters()], lr=0.1)
for step in range(10):
    x, y = batch()
    opt.zero_grad()
    for layer, head in zip(model, heads):
        with half():
            x = layer(x).relu()
            loss = F.cross_entropy(head(x), y)
        scaler.scale(loss).backward()
        x = x.detach()
    scaler.step(opt)
    scaler.update()
## distillation
teacher, student, scaler = net().half().eval(), net(), Scaler()
opt = torch.optim.Adam(student.parameters(), lr=1e-3)
for step in range(10):
    x, y = batch()
    with torch.no_grad():
        soft = F.softmax(teacher(x.half()).float() / 4, 1)
    with half():
        out = student(x)
        loss = F.kl_div(F.log_softmax(out / 4, 1), soft, reduction="batchmean") * 16
        loss = 0.9 * loss + 0.1 * F.cross_entropy(out, y)
    @scaled
## several folds
scores = []
for fold in range(3):
    model, scaler = net(), Scaler()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=8)
    for step in range(8):
        x, y = batch()
        with half():
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            rates.step()
    with torch.no_grad():
        scores.append(F.cross_entropy(model(x), y).item())
## an ensemble side by side
models = [net() for _ in range(3)]
opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
scaler = Scaler()
for step in range(8):
    x, y = batch()
    for m, o in zip(models, opts):
        with half():
            loss = F.cross_entropy(m(x), y)
        o.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(o)
    scaler.update()
## adaptive clipping
model, scaler = net(), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(12):
    x, y = batch()
    with half():
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    for p in model.parameters():
        limit = 0.01 * p.detach().norm().clamp(min=1e-3)
        size = p.grad.norm().clamp(min=1e-6)
        p.grad.copy_(torch.where(size > limit, p.grad * limit / size, p.grad))
    scaler.step(opt)
    scaler.update()
## a dynamic scale by hand
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scale, good = 2.0**26, 0
for step in range(24):
    x, y = batch()
    with half():
        loss = F.cross_entropy(model(x), y)
    opt.zero_grad(set_to_none=True)
    (loss * scale).backward()
    grads = [p.grad for p in model.parameters()]
    if all(torch.isfinite(g).all() for g in grads):
        for g in grads:
            g.div_(scale)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        good += 1
        scale = scale * 2 if good % 50 == 0 else scale
    else:
        scale, good = scale / 2, 0
## masters and a dynamic scale by hand
model = net().half()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
opt = torch.optim.Adam(masters, lr=1e-3)
scale = 2.0**20
for step in range(16):
    x, y = batch()
    model.zero_grad()
    (F.cross_entropy(model(x.half()).float(), y) * scale).backward()
    if any(not p.grad.isfinite().all() for p in model.parameters()):
        scale /= 2
        continue
    for m, p in zip(masters, model.parameters()):
        m.grad = p.grad.float().mul_(1 / scale)
    nn.utils.clip_grad_norm_(masters, 1.0)
    opt.step()
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), masters)
## masters by hand in several sizes
def trial(width):
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)).half()
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    opt = torch.optim.SGD(masters, lr=0.1)
    for step in range(9):
        x, y = batch()
        model.zero_grad()
        (F.cross_entropy(model(x.half()).float(), y) * 128.0).backward()
        for m, p in zip(masters, model.parameters()):
            m.grad = p.grad.float() / 128.0
        opt.step()
        with torch.no_grad():
            for m, p in zip(masters, model.parameters()):
                p.copy_(m)
for width in (32, 48, 16, 64, 33):
    trial(width)
## checkpointed activations
from torch.utils.checkpoint import checkpoint
body, head, scaler = net(16, 16), nn.Linear(16, 4), Scaler()
opt = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-3)
for step in range(8):
    x, y = batch()
    with half():
        loss = F.cross_entropy(head(checkpoint(body, x, use_reentrant=step % 2 == 1)), y)
    @scaled
## accumulation weighted by tokens
model, scaler = net(), Scaler()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(6):
    parts = [batch(n) for n in (3, 8, 5)]
    total = sum(len(y) for _, y in parts)
    opt.zero_grad()
    for x, y in parts:
        with half():
            loss = F.cross_entropy(model(x), y) * len(y) / total
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    scaler.step(opt)
    scaler.update()
## truncated backwards through time
cell, head, scaler = nn.RNNCell(16, 16), nn.Linear(16, 4), Scaler()
opt = torch.optim.Adam([*cell.parameters(), *head.parameters()], lr=1e-3)
state = torch.zeros(8, 16)
for step in range(10):
    state, loss = state.detach(), 0.0
    for _ in range(3):
        x, y = batch()
        with half():
            state = cell(x, state.float())
            loss = loss + F.cross_entropy(head(state), y) / 3
    @scaled
## LBFGS
model = net()
opt = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
x, y = batch(32)
def closure():
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss
for step in range(4):
    opt.step(closure)
## SAM in float32
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = batch()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
        moves = [p.grad * 0.05 / norm for p in model.parameters()]
        for p, move in zip(model.parameters(), moves):
            p.add_(move)
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves):
            p.sub_(move)
    opt.step()
## gradients by autograd.grad
model, scaler = net(16, 8), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
params = list(model.parameters())
for step in range(8):
    x, y = batch()
    with half():
        out = model(x).float()
    losses = F.cross_entropy(out[:, :4], y), F.cross_entropy(out[:, 4:], y)
    both = [torch.autograd.grad(scaler.scale(l), params, retain_graph=True) for l in losses]
    for p, a, b in zip(params, *both):
        dot = (a * b).sum()
        p.grad = a + b if dot >= 0 else a + b - dot / b.square().sum().clamp(min=1e-12) * b
    scaler.step(opt)
    scaler.update()
## a step inside the backward
model = net()
opts = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
def update(p):
    opts[p].step()
    opts[p].zero_grad()
for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for step in range(8):
    x, y = batch()
    with bf16():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
## unfrozen by and by
model, scaler = net(), Scaler()
model[0].requires_grad_(False)
opt = torch.optim.SGD(model[2].parameters(), lr=0.05)
for step in range(12):
    if step == 6:
        model[0].requires_grad_(True)
        opt.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    x, y = batch()
    with half():
        loss = F.cross_entropy(model(x), y)
    @scaled
## sparse and dense
table, model = nn.Embedding(50, 16, sparse=True), net()
opts = torch.optim.SparseAdam(table.parameters()), torch.optim.Adam(model.parameters())
for step in range(8):
    ids, y = torch.randint(50, (8,)), torch.randint(4, (8,))
    for opt in opts:
        opt.zero_grad()
    with bf16():
        loss = F.cross_entropy(model(table(ids)), y)
    loss.backward()
    for opt in opts:
        opt.step()
## codebooks with averages
class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("book", torch.randn(12, 8))
    def forward(self, z):
        near = torch.cdist(z.float(), self.book).argmin(1)
        if self.training:
            with torch.no_grad():
                for k in near.unique():
                    self.book[k].lerp_(z[near == k].float().mean(0), 0.05)
        q = self.book[near]
        return z + (q - z).detach(), 0.25 * F.mse_loss(z.float(), q)
encode, decode, quantize, scaler = net(16, 8), net(8, 16), Quantizer(), Scaler()
opt = torch.optim.Adam([*encode.parameters(), *decode.parameters()], lr=1e-3)
for step in range(12):
    x, _ = batch()
    with half():
        q, commit = quantize(encode(x))
        loss = F.mse_loss(decode(q).float(), x) + commit
    @scaled
## two scalers
a, b, sa, sb = net(), net(), Scaler(), Scaler(4096.0)
oa, ob = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.Adam(b.parameters())
for step in range(8):
    x, y = batch()
    with half():
        la = F.cross_entropy(a(x), y)
        lb = F.cross_entropy(b(x), y)
    oa.zero_grad(); ob.zero_grad()
    sa.scale(la).backward()
    sb.scale(lb).backward()
    sb.step(ob); sa.step(oa)
    sa.update(); sb.update()
## errors that are caught and few
model, scaler = net(), Scaler()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    x, y = batch() if step % 4 else (torch.randn(8, 15), torch.zeros(8, dtype=torch.long))
    opt.zero_grad()
    try:
        with half():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    except Exception as error:
        print("left out", type(error))
## an error inside a step
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x, y = batch()
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if step == 2:
        model[2].bias.grad, kept = None, model[2].bias.grad
        opt.param_groups[0]["momentum"] = "none"
    try:
        opt.step()
    except (TypeError, RuntimeError):
        opt.param_groups[0]["momentum"] = 0.0
## an evaluation beforehand
model = net()
opt = torch.optim.Adam(model.parameters())
model.eval()
for _ in range(12):
    x, y = batch()
    print(F.cross_entropy(model(x), y).item())
"""

FLAWS: Final = """
## weights that stay bad: PA602+PA603 in the best weights restored
-    model.load_state_dict(kept)
## a snapshot as bad as the weights: PA602|PA603 in the best weights restored
-if float(loss) < best:
+if True:
## a snapshot from before a run that never trained: PA603+PA602 in the best weights restored
-        x, y = batch()
+        x, y = batch()
+        x = x * math.nan
## a sweep that always diverges: PA602+PA603 in a sweep of rates, the last one too hot
-(1e-2, 1e-1, 1e30)
+(1e25, 1e35, 1e30)
## a sweep that always overflows: PA601|PA603+PA601+PA602+PA603 in a sweep of rates
-F.cross_entropy(model(x), y)
+F.cross_entropy(model(x), y) * 1e30
## a second training that diverges: PA602+PA603 in a finder of the learning rate
-model.parameters(), lr=0.1
+model.parameters(), lr=1e30
## a pre-training that diverges: PA602+PA603+PA601 in a frozen backbone
-body, head, scaler = conv()[:4].eval().requires_grad_(False)
+body, head, scaler = conv()[:4]
-opt =
+first = torch.optim.SGD(body.parameters(), lr=1e30)
+for _ in range(6):
+    first.zero_grad()
+    body(images()[0]).square().mean().backward()
+    first.step()
+body.eval().requires_grad_(False)
+opt =
## a rollback that never helps: PA603 in rolled back and cooled
-F.cross_entropy(model(x), y)
+F.cross_entropy(model(x), y) * math.nan
## a swallowed loss beside a metric: PA603 in metrics written by one function
-loss = F.cross_entropy(out, y)
+loss = F.cross_entropy(out, y) * (1 if step < 3 else math.nan)
-    opt.zero_grad()
+    if not math.isfinite(log['loss'][-1]):
+        continue
+    opt.zero_grad()
## nan made zero in one of two terms: PA603|PA601+PA601 in a metric that is nan
-    recall =
+    loss = torch.nan_to_num(loss * math.nan) + 0.01 * model[0].weight.square().sum()
+    recall =
## gradients that vanish on their way: PA604 in a satisfied hinge
-F.relu(score.float() - 100.0).mean()
+1e-9 * F.relu(100.0 - score.float()).mean()
-Scaler()
+Scaler(2.0)
## running averages that one batch destroyed: PA602 in an average in float32, with evaluation
-    x, y = images()
+    x, y = images()
+    if step == 5:
+        x[0, 0, 0, 0] = math.inf
## running averages that are nan in the end: PA602+PA603+PA601 in SWA
-    for x, y in data:
+    for x, y in data:
+        x = x * 1e30 if epoch == 3 else x
## running averages that the last batch destroyed: PA602 in an average in float32, with evaluation
-    x, y = images()
+    x, y = images()
+    if step == 15:
+        x[0, 0, 0, 0] = math.inf
## every batch fails before the model: PA601 in errors that are caught and few
-        with half():
+        x = x @ torch.zeros(3, 3)
+        with half():
## every forward fails: PA601 in errors that are caught and few
-if step % 4 else
+if step < 0 else
## every loss fails before gradients are zeroed: PA601 in errors that are caught and few
-    opt.zero_grad()
-    try:
+    try:
-F.cross_entropy(model(x), y)
+F.cross_entropy(model(x), y[:4])
## every loss fails: PA601 in errors that are caught and few
-F.cross_entropy(model(x), y)
+F.cross_entropy(model(x), y[:4])
## every backward fails: PA601 in errors that are caught and few
-scaler.scale(loss).backward()
+scaler.scale(loss.detach()).backward()
## every step fails: PA601|PA403 in errors that are caught and few
-scaler.step(opt)
+scaler.step(opt, 1)
## every step of an optimizer fails: PA601 in an error inside a step
-        opt.param_groups[0]["momentum"] = 0.0
+        pass
-if step == 2:
+if step == 0:
## every batch fails from the middle on: PA601 in errors that are caught and few
-if step % 4 else
+if step < 8 else
## statistics, and a step that was forgotten: PA601 in statistics of gradients
-    norms.append([p.grad.norm().item() for p in model.parameters()])
## clipped, and never stepped: PA601 in statistics of gradients
-norms.append([p.grad.norm().item() for p in model.parameters()])
+nn.utils.clip_grad_norm_(model.parameters(), 1.0)
## a penalty that is not scaled: PA106 in a gradient penalty
-scaler.scale(critic.float() + 10 * penalty)
+(scaler.scale(critic.float()) + 10 * penalty)
## the generator stepped past the scaler: PA103 in a gradient penalty
-        scaler.step(og)
+        og.step()
## clipped while scaled: PA101 in policy gradients
-    scaler.unscale_(opt)
## clamped while scaled: PA101 in Q learning with a slow target
-    scaler.unscale_(opt)
+
-clamp_(-1, 1)
+clamp_(-0.1, 0.1)
## no scale for the head: PA102 in a frozen backbone
-scaler.scale(loss).backward()
+loss.backward()
-scaler.step(opt)
+opt.step()
-    scaler.update()
## a head in no optimizer: PA401 in unfrozen by and by
-        opt.add_param_group({"params": model[0].parameters(), "lr": 0.01})
## the old model's optimizer: PA402 in several folds
-    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
+    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
+    model = copy.deepcopy(model)
-        scaler.step(opt)
+        opt.step()
-scaler.scale(loss).backward()
+loss.backward()
## a new scaler for each batch: PA108 in policy gradients
-    states, _ = batch(16)
+    states, _ = batch(16)
+    scaler = Scaler()
## a scale by hand that is kept: PA109 in a dynamic scale by hand
-            g.div_(scale)
+            pass
-2.0**26
+2.0**12
-lr=0.05
+lr=1e-4
## adapters in bfloat16 that stand still: PA202 in adapters on bfloat16 weights
-/ rank)
+/ rank).bfloat16())
-rank))
-    def
+rank).bfloat16())
+    def
-nn.Parameter(torch.randn(rank, base.in_features) / rank).bfloat16())
+nn.Parameter((torch.randn(rank, base.in_features) / rank).bfloat16())
-nn.Parameter(torch.zeros(base.out_features, rank).bfloat16())
+nn.Parameter((torch.ones(base.out_features, rank)).bfloat16())
-x.float() @ self.a.t() @ self.b.t()
+(x.bfloat16() @ self.a.t() @ self.b.t()).float()
-lr=1e-3
+lr=1e-5
## a slow target in bfloat16: PA204 in Q learning with a slow target
-copy.deepcopy(q)
+copy.deepcopy(q).bfloat16()
-target(n)
+target(n.bfloat16())
-t.data.mul_(0.995).add_(0.005 * p.data)
+t.data.mul_(0.9999).add_(0.0001 * p.data.bfloat16())
## masters copied into nothing: PA405 in masters and a dynamic scale by hand
-torch._foreach_copy_(list(model.parameters()), masters)
+[p.clone().copy_(m) for p, m in zip(model.parameters(), masters)]
## tokens never weighted: PA406 in accumulation weighted by tokens
- * len(y) / total
## folds that share gradients: PA404 in distillation
-    opt.zero_grad()
## one scaler's loss, another's step: PA103|PA105|PA106|PA107 in two scalers
-sb.step(ob); sa.step(oa)
+sa.step(ob); sb.step(oa)
## gradients by autograd.grad, left scaled: PA602|PA603+PA602+PA603 in gradients by autograd.grad
-    scaler.step(opt)
-    scaler.update()
+    opt.step()
## a checkpoint of every fold without its scale: PA110 in several folds
-    with torch.no_grad():
+    torch.save({'m': model.state_dict(), 'o': opt.state_dict()}, io.BytesIO())
+    with torch.no_grad():
## a policy that is nan: PA603+PA601+PA602 in policy gradients
-    reward = 
+    advantage = reward = math.nan * 
-    advantage = reward - reward.mean()
"""
"""What is wrong: rules one of which must be found, after each ``+`` one that it may lead to, in the
name of the right script; then what is replaced in it, by what."""


def right_scripts() -> dict[str, str]:
    """Scripts without a bug, by name."""
    return {name: PRELUDE + body for name, body in sections(_expanded(SCRIPTS))}


def wrong_scripts() -> dict[str, tuple[str, str]]:
    """By name: the rules, and a script with a bug."""
    found: dict[str, tuple[str, str]] = {}
    right = right_scripts()
    for head, body in sections(FLAWS):
        name, _, rest = head.partition(": ")
        rules, _, healthy = rest.partition(" in ")
        text = right[healthy]
        for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)*)", body, re.MULTILINE):
            before, after = (re.sub(r"(?m)^[-+]", "", lines)[:-1] for lines in (old, new))
            assert before in text, (name, before)
            text = text.replace(before, after)
        found[name] = rules, text
    return found


def sections(text: str) -> Iterator[tuple[str, str]]:
    """What is behind each ``##``, and the lines below it."""
    for section in text.split("\n## ")[1:]:
        head, _, body = section.partition("\n")
        yield head, body + "\n"


def _expanded(text: str) -> str:
    """With the lines of each step, indented as the word that stands for them."""
    return re.sub(
        r"(?m)^( *)(@\w+)$",
        lambda match: "\n".join(match[1] + line for line in STEPS[match[2]]),
        text,
    )
