# SPDX-License-Identifier: BSD-3-Clause
"""A GAN on handwritten digits: two models, two optimizers, three losses with a scale each.

Prints how far the pixel means of generated digits are from those of real ones, before and after.
Needs scikit-learn, which has the digits.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

import preamp

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("The digits are scikit-learn's: pip install scikit-learn") from None

NOISE = 16


def perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--opt-level", default="O1")
    args = parser.parse_args()

    torch.manual_seed(0)
    digits = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    gen, dis = perceptron(NOISE, 128, 128, 64), perceptron(64, 128, 128, 1)
    opt_gen = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.99))
    opt_dis = torch.optim.Adam(dis.parameters(), lr=1e-3, betas=(0.5, 0.99))
    (gen, dis), (opt_gen, opt_dis) = preamp.initialize(
        [gen, dis], [opt_gen, opt_dis], opt_level=args.opt_level, num_losses=3
    )

    def distance() -> float:
        with torch.no_grad():
            fake = gen(torch.randn(1024, NOISE)).float().tanh()
        return (fake.mean(0) - digits.mean(0)).abs().mean().item()

    def judge(images: torch.Tensor, is_real: bool) -> torch.Tensor:
        verdict = dis(images)
        return F.binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, is_real))

    before = distance()
    for _ in range(args.steps):
        real = digits[torch.randint(len(digits), (64,))]
        fake = gen(torch.randn(64, NOISE)).tanh()

        opt_dis.zero_grad()
        with preamp.scale_loss(judge(real, True), opt_dis, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        with preamp.scale_loss(judge(fake.detach(), False), opt_dis, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        opt_dis.step()

        opt_gen.zero_grad()
        with preamp.scale_loss(judge(fake, True), opt_gen, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        opt_gen.step()

    print(f"distance {before:.3f} -> {distance():.3f} in {args.steps} steps at {args.opt_level}")


if __name__ == "__main__":
    main()
