# SPDX-License-Identifier: BSD-3-Clause
"""Policy gradients in float16 under ``fully_shard``: accumulation, clipping, warm-up, resuming.

The "language model" is a small network that picks one of four actions, and is rewarded if it is the
right one. Alone, or ``torchrun --nproc-per-node 2 examples/07_fp16_rl.py --folder runs``.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import preamp
from preamp.optimizers import FusedAdam

PARTS = 4  # backwards for each update
Rollout = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_policy(opt_level: str) -> nn.Module:
    """Shard the policy, whose weights are gathered in the level's half dtype."""
    torch.manual_seed(0)  # fully_shard sends no weights: all ranks begin with the same
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    half = preamp.OPT_LEVELS[opt_level].cast_model_type
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for layer in (policy[0], policy[2]):
        fully_shard(layer, mp_policy=precision)
    return fully_shard(policy, mp_policy=precision)


def reward_of(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return 1 for each right action."""
    return (states[:, :4].argmax(1) == actions).float()


def rollout(policy: nn.Module) -> Rollout:
    """Return states, actions, their log-probabilities and rewards."""
    states = torch.randn(64, 8)
    with torch.no_grad():
        choice = torch.distributions.Categorical(logits=policy(states))
        actions = choice.sample()
    return states, actions, choice.log_prob(actions), reward_of(states, actions)


def policy_loss(policy: nn.Module, states, actions, old, advantages) -> torch.Tensor:
    """Return PPO's clipped loss."""
    choice = torch.distributions.Categorical(logits=policy(states))
    ratio = (choice.log_prob(actions) - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def train(folder: str, updates: int, opt_level: str = "O2") -> dict[str, float]:
    """Train until ``updates`` have been made, from the newest checkpoint in ``folder`` on."""
    policy = make_policy(opt_level)
    optimizer = FusedAdam(policy.parameters(), lr=1e-2)
    policy, optimizer = preamp.initialize(policy, optimizer, opt_level=opt_level)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    torch.manual_seed(1 + dist.get_rank())  # each rank has rollouts of its own
    run = preamp.RunState(policy, optimizer, schedule, extra={"update": 0, "rewards": []})
    saved = [int(path.parent.name) for path in Path(folder).glob("*/.metadata")]
    if saved:  # the index is written last
        dcp.load({"run": run}, checkpoint_id=f"{folder}/{max(saved)}")

    for update in range(run.extra["update"], updates):
        states, actions, old, rewards = rollout(policy)
        parts = [part.chunk(PARTS) for part in (states, actions, old)]
        advantages = (rewards - rewards.mean()).chunk(PARTS)
        for index, batch in enumerate(zip(*parts, advantages, strict=True)):
            policy.set_requires_gradient_sync(index == PARTS - 1)
            loss = policy_loss(policy, *batch) / PARTS
            with preamp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        preamp.clip_grad_norm_(optimizer, max_norm=1.0)  # over all ranks
        optimizer.step()
        preamp.step_scheduler(schedule, optimizer)  # not after a skipped step
        optimizer.zero_grad()
        means = [*run.extra["rewards"], rewards.mean().item()]
        run.extra = {"update": update + 1, "rewards": means}
        if (update + 1) % 20 == 0:
            dcp.save({"run": run}, checkpoint_id=f"{folder}/{update + 1}")

    engine = preamp.engine_of(optimizer)
    return {
        "first": run.extra["rewards"][0],
        "reward": run.extra["rewards"][-1],
        "applied": engine.steps_applied,
        "skipped": engine.steps_skipped,
        "scale": engine.loss_scale(),
        "scheduled": schedule.last_epoch,
    }


def main() -> None:
    """Train on the ranks that torchrun has started, or alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--opt-level", default="O2", choices=["O2", "O5"])
    parser.add_argument("--folder", help="where the run is saved, and goes on from")
    args = parser.parse_args()
    folders = [args.folder or tempfile.mkdtemp()]
    alone = {"init_method": f"file://{tempfile.mkdtemp()}/meet", "rank": 0, "world_size": 1}
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, **({} if "WORLD_SIZE" in os.environ else alone))
    if torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    dist.broadcast_object_list(folders)  # all write into the first rank's
    found = train(folders[0], args.steps, args.opt_level)
    if dist.get_rank() == 0:
        wrong = f"{1 - found['first']:.3f} -> {1 - found['reward']:.3f}"
        print(f"wrong actions {wrong} in {args.steps} steps at {args.opt_level}")
        print(f"{found['skipped']:.0f} steps skipped, loss scale {found['scale']:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
