# SPDX-License-Identifier: BSD-3-Clause
"""Classify images: the trainer that most users of Apex began with, on small pictures of digits.

python imagenet.py --opt-level O2 --loss-scale 128.0 --keep-batchnorm-fp32 True
torchrun --nproc-per-node 2 imagenet.py --opt-level O1
"""

import argparse
import os
import random

import apex
import numpy as np
import torch
from apex import amp
from sklearn.datasets import load_digits
from torch import nn


def parse():
    parser = argparse.ArgumentParser(description="Train a small residual network on digits")
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("-b", "--batch-size", default=32, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--momentum", default=0.9, type=float)
    parser.add_argument("--wd", "--weight-decay", dest="weight_decay", default=1e-4, type=float)
    parser.add_argument("--resume", default="", help="checkpoint to go on from")
    parser.add_argument("--checkpoint", default="", help="file to write after each epoch")
    parser.add_argument("--stop-after", default=None, type=int, help="epochs before stopping")
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    return parser.parse_args()


def convolution(inputs, outputs):
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class SmallNet(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.stem = nn.Sequential(*convolution(1, 16), self.relu)
        self.block = nn.Sequential(*convolution(16, 16), self.relu, *convolution(16, 16))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(16 * 4, classes)

    def forward(self, x):
        x = self.stem(x)
        out = self.block(x)
        out += x
        return self.fc(torch.flatten(self.pool(self.relu(out)), 1))


def datasets():
    digits = load_digits()
    images = torch.from_numpy((digits.images - 4.9) / 6.0).float().unsqueeze(1)
    targets = torch.from_numpy(digits.target)
    cut = 640
    data = torch.utils.data.TensorDataset
    return data(images[:cut], targets[:cut]), data(images[-256:], targets[-256:])


def adjust_learning_rate(optimizer, base, epoch, step, steps):
    """Warm up over the first epoch, divide by ten in the last one."""
    factor = (step + 1) / steps if epoch == 0 else 0.1 if epoch >= 2 else 1.0
    for group in optimizer.param_groups:
        group["lr"] = base * factor


def train(args, loader, model, criterion, optimizer, epoch):
    total = 0.0
    model.train()
    for step, (images, target) in enumerate(loader):
        adjust_learning_rate(optimizer, args.lr, epoch, step, len(loader))
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def validate(loader, model, criterion):
    total, right = 0.0, 0.0
    model.eval()
    for images, target in loader:
        with torch.no_grad():
            output = model(images)
            total += criterion(output, target).item() / len(loader)
        right += (output.argmax(1) == target).float().mean().item() / len(loader)
    return total, right


def main():
    args = parse()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    args.distributed = "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    rank = 0
    if args.distributed:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
        rank = torch.distributed.get_rank()

    model = SmallNet()
    if args.sync_bn:
        model = apex.parallel.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        from apex.parallel import DistributedDataParallel as DDP

        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss()

    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location="cpu")
        start = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])
        print(f"=> loaded checkpoint '{args.resume}' (epoch {start})")

    train_set, val_set = datasets()
    sampler = None
    if args.distributed:
        sampler = torch.utils.data.distributed.DistributedSampler(train_set)
    val_loader = torch.utils.data.DataLoader(val_set, batch_size=args.batch_size)

    for epoch in range(start, min(args.epochs, args.stop_after or args.epochs)):
        # Each epoch shuffles by its number, so that a resumed run sees the same batches.
        order = torch.Generator().manual_seed(epoch)
        if sampler is not None:
            sampler.set_epoch(epoch)
        train_loader = torch.utils.data.DataLoader(
            train_set,
            batch_size=args.batch_size,
            shuffle=sampler is None,
            sampler=sampler,
            generator=order,
        )
        train_loss = train(args, train_loader, model, criterion, optimizer, epoch)
        loss, accuracy = validate(val_loader, model, criterion)
        if rank == 0:
            print(f"epoch {epoch} train {train_loss:.4f} val {loss:.4f} prec@1 {accuracy:.4f}")
        if rank == 0 and args.checkpoint:
            torch.save(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "amp": amp.state_dict(),
                },
                args.checkpoint,
            )
    if rank == 0:
        print(f"final loss {loss:.6f} final metric {accuracy:.6f}")
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
