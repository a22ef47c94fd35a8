"""A vector-quantised autoencoder, in the shape of ``vqvae.py`` and ``functions.py`` of ritheshkumar95/pytorch-vqvae.

The nearest code is found by an autograd function of its own over a distance by ``addmm``; its backward
passes the gradient straight through and gathers the codebook's by ``index_add_``.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch.autograd import Function

parser = argparse.ArgumentParser(description="VQ-VAE")
parser.add_argument("--hidden-size", type=int, default=24)
parser.add_argument("--k", type=int, default=64, help="number of latent vectors")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=250)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--beta", type=float, default=1.0, help="contribution of commitment loss")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--save", default="")


class VectorQuantization(Function):
    @staticmethod
    def forward(ctx, inputs, codebook):
        with torch.no_grad():
            inputs_flatten = inputs.reshape(-1, codebook.size(1))
            codebook_sqr = torch.sum(codebook**2, dim=1)
            inputs_sqr = torch.sum(inputs_flatten**2, dim=1, keepdim=True)
            distances = torch.addmm(
                codebook_sqr + inputs_sqr, inputs_flatten, codebook.t(), alpha=-2.0, beta=1.0
            )
            _, indices = torch.min(distances, dim=1)
            ctx.mark_non_differentiable(indices)
            return indices.view(*inputs.size()[:-1])

    @staticmethod
    def backward(ctx, grad_output):
        raise RuntimeError("Trying to call `.grad()` on graph containing `VectorQuantization`.")


class VectorQuantizationStraightThrough(Function):
    @staticmethod
    def forward(ctx, inputs, codebook):
        indices = VectorQuantization.apply(inputs, codebook).view(-1)
        ctx.save_for_backward(indices, codebook)
        ctx.mark_non_differentiable(indices)
        codes = torch.index_select(codebook, dim=0, index=indices).view_as(inputs)
        return codes, indices

    @staticmethod
    def backward(ctx, grad_output, grad_indices):
        grad_inputs, grad_codebook = None, None
        if ctx.needs_input_grad[0]:
            grad_inputs = grad_output.clone()
        if ctx.needs_input_grad[1]:
            indices, codebook = ctx.saved_tensors
            grad_output_flatten = grad_output.contiguous().view(-1, codebook.size(1))
            grad_codebook = torch.zeros_like(codebook)
            grad_codebook.index_add_(0, indices, grad_output_flatten)
        return grad_inputs, grad_codebook


class VQEmbedding(nn.Module):
    def __init__(self, K, D):
        super().__init__()
        self.embedding = nn.Embedding(K, D)
        self.embedding.weight.data.uniform_(-1.0 / K, 1.0 / K)

    def straight_through(self, z_e_x):
        z_e_x_ = z_e_x.permute(0, 2, 3, 1).contiguous()
        weight = self.embedding.weight
        z_q_x_, indices = VectorQuantizationStraightThrough.apply(z_e_x_, weight.detach())
        z_q_x = z_q_x_.permute(0, 3, 1, 2).contiguous()
        z_q_x_bar = torch.index_select(weight, dim=0, index=indices).view_as(z_e_x_)
        return z_q_x, z_q_x_bar.permute(0, 3, 1, 2).contiguous()


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(True),
            nn.Conv2d(dim, dim, 3, 1, 1),
            nn.BatchNorm2d(dim),
            nn.ReLU(True),
            nn.Conv2d(dim, dim, 1),
            nn.BatchNorm2d(dim),
        )

    def forward(self, x):
        return x + self.block(x)


class VectorQuantizedVAE(nn.Module):
    def __init__(self, dim, K):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, dim, 4, 2, 1),
            nn.BatchNorm2d(dim),
            nn.ReLU(True),
            nn.Conv2d(dim, dim, 4, 2, 1),
            ResBlock(dim),
        )
        self.codebook = VQEmbedding(K, dim)
        self.decoder = nn.Sequential(
            ResBlock(dim),
            nn.ReLU(True),
            nn.ConvTranspose2d(dim, dim, 4, 2, 1),
            nn.BatchNorm2d(dim),
            nn.ReLU(True),
            nn.ConvTranspose2d(dim, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, x):
        z_e_x = self.encoder(x)
        z_q_x_st, z_q_x = self.codebook.straight_through(z_e_x)
        return self.decoder(z_q_x_st), z_e_x, z_q_x


def patches():
    """Patches of 16 × 16 of two photographs; every eighth is for testing."""
    found = []
    for image in load_sample_images().images:
        picture = torch.tensor(image).float().permute(2, 0, 1) / 127.5 - 1
        grid = picture[:, :416, :640].unfold(1, 16, 16).unfold(2, 16, 16)
        found.append(grid.permute(1, 2, 0, 3, 4).reshape(-1, 3, 16, 16))
    found = torch.cat(found)
    test = torch.arange(len(found)) % 8 == 0
    return found[~test], found[test]


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train, test = patches()
    model = VectorQuantizedVAE(args.hidden_size, args.k)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        images = train[torch.randint(len(train), (args.batch_size,))]
        optimizer.zero_grad()
        x_tilde, z_e_x, z_q_x = model(images)
        loss_recons = F.mse_loss(x_tilde, images)
        loss_vq = F.mse_loss(z_q_x, z_e_x.detach())
        loss_commit = F.mse_loss(z_e_x, z_q_x.detach())
        loss = loss_recons + loss_vq + args.beta * loss_commit
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(
                f"{step} reconstruction {loss_recons.item():.4f} quantization {loss_vq.item():.4f}"
            )

    model.eval()
    with torch.no_grad():
        x_tilde, _, _ = model(test)
        psnr = 10 * torch.log10(4 / F.mse_loss(x_tilde, test))
    if args.save:
        torch.save(model.state_dict(), args.save)
    print(f"psnr: {psnr.item():.6f}")


if __name__ == "__main__":
    main()
