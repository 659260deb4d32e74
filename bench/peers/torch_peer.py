"""PyTorch: `torch.compile` if the order's options say `compile`."""

import torch
from safetensors.torch import load_file

from .. import configs
from . import torch_models
from .serve import serve


def make(order):
    torch.set_num_threads(order.threads)
    model = torch_models.model(order.config, configs.NORM_EPS, configs.ROPE_THETA)
    model.load(load_file(order.weights))
    a = order.adamw
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": a.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(a.beta1, a.beta2), eps=a.eps, fused=True)
    loss_of = torch.compile(model) if getattr(order.options, "compile", False) else model

    def step(batch):
        tokens = torch.from_numpy(batch).long()
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


if __name__ == "__main__":
    serve(make)
