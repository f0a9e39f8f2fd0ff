# SPDX-License-Identifier: BSD-3-Clause
"""An adversarial pair on pictures of digits: two models, two optimizers, three losses.

python dcgan.py --opt_level O1
"""

import argparse

import torch
from apex import amp
from sklearn.datasets import load_digits
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=64)
parser.add_argument("--nz", type=int, default=16, help="size of the latent vector")
parser.add_argument("--ngf", type=int, default=16)
parser.add_argument("--ndf", type=int, default=16)
parser.add_argument("--niter", type=int, default=40)
parser.add_argument("--lr", type=float, default=0.001)
parser.add_argument("--beta1", type=float, default=0.5)
parser.add_argument("--manualSeed", type=int, default=2809)
parser.add_argument("--opt_level", default="O1", help="O0 to O3")
opt = parser.parse_args()
print(opt)

torch.manual_seed(opt.manualSeed)


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        m.weight.data.normal_(0.0, 0.05)
    elif name.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, opt.ngf * 2, 2, 1, 0, bias=False),
            nn.BatchNorm2d(opt.ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(opt.ngf * 2, opt.ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(opt.ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(opt.ngf, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, opt.ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf, opt.ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(opt.ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(opt.ndf * 2, 1, 2, 1, 0, bias=False),
        )

    def forward(self, image):
        return self.main(image).view(-1, 1).squeeze(1)


netG = Generator()
netG.apply(weights_init)
netD = Discriminator()
netD.apply(weights_init)

# Not BCELoss over a sigmoid, which fp16 cannot represent near 0 and 1.
criterion = nn.BCEWithLogitsLoss()
real_label = 1.0
fake_label = 0.0

optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
)

images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 8 - 1
errors = []
for _ in range(opt.niter):
    # The discriminator: raise log D(x) + log(1 - D(G(z))).
    netD.zero_grad()
    real = images[torch.randint(len(images), (opt.batchSize,))]
    label = torch.full((opt.batchSize,), real_label)
    errD_real = criterion(netD(real), label)
    with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
        errD_real_scaled.backward()

    noise = torch.randn(opt.batchSize, opt.nz, 1, 1)
    fake = netG(noise)
    label.fill_(fake_label)
    errD_fake = criterion(netD(fake.detach()), label)
    with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
        errD_fake_scaled.backward()
    errD = errD_real + errD_fake
    optimizerD.step()

    # The generator: raise log D(G(z)).
    netG.zero_grad()
    label.fill_(real_label)
    errG = criterion(netD(fake), label)
    with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
        errG_scaled.backward()
    optimizerG.step()
    errors.append((errD.item(), errG.item()))

for loss_id, scaler in enumerate(amp._amp_state.loss_scalers):
    print(f"loss {loss_id}: scale {scaler.loss_scale()}")
last = torch.tensor(errors[-10:]).mean(0)
print(f"final loss {last[0]:.6f} final metric {last[1]:.6f}")
