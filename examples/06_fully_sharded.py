# SPDX-License-Identifier: BSD-3-Clause
"""A small language model under ``fully_shard``, with the distributed checkpoints of torch.

The loop has the shape of torchtitan's: the model is sharded block by block, and
``torch.distributed.checkpoint`` writes files while training goes on. Half-way it starts anew from
them. Alone, or ``torchrun --nproc-per-node 2 examples/06_fully_sharded.py``.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import preamp
from preamp.optimizers import FusedAdam

VOCABULARY, LENGTH, WIDTH, BLOCKS = 32, 16, 32, 2


class Block(nn.Module):
    """Attention, and a network for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors of all tokens to others."""
        q, k, v = (part.unsqueeze(1) for part in self.mix(self.norm(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Tells the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Numbers of tokens to the logits of those that follow."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run(Stateful):
    """What a checkpoint holds: float32 weights, the optimizer's state, and the engine's."""

    def __init__(self, opt_level: str, device: torch.device) -> None:
        torch.manual_seed(0)  # ranks begin with the same weights
        model = Transformer().to(device)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = FusedAdam(model.parameters(), lr=3e-3)
        self.model, self.optimizer = preamp.initialize(model, optimizer, opt_level=opt_level)

    def state_dict(self) -> dict[str, Any]:
        """Weights in float32 and state, each rank's part, and the loss scale with all counters."""
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": state, "preamp": preamp.state_dict(self.optimizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        preamp.load_state_dict(self.optimizer, state_dict["preamp"])

    def step(self, number: int, device: torch.device) -> float:
        """Train on this rank's batch of step ``number``; returns its loss."""
        rank_and_step = dist.get_rank() + dist.get_world_size() * number
        generator = torch.Generator().manual_seed(rank_and_step)
        starts = torch.randint(VOCABULARY, (16, 1), generator=generator)
        tokens = ((starts + torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        with preamp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        preamp.clip_grad_norm_(self.optimizer, 1.0)  # over all ranks
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--opt-level", default="O5")
    args = parser.parse_args()

    if "WORLD_SIZE" not in os.environ:  # not started by torchrun
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # What writes files in the background meets in a group of its own, on the host
    writers = dist.new_group(backend="gloo")
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)

    run, middle = Run(args.opt_level, device), args.steps // 2
    losses = [run.step(number, device) for number in range(middle)]
    saving = dcp.async_save({"run": run}, checkpoint_id=folders[0], process_group=writers)
    losses += [run.step(number, device) for number in range(middle, args.steps)]
    saving.result()

    again = Run(args.opt_level, device)
    dcp.load({"run": again}, checkpoint_id=folders[0])
    same = [again.step(number, device) for number in range(middle, args.steps)] == losses[middle:]

    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps at {args.opt_level}")
        print(f"started anew after {middle} steps, went on bitwise as without: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
