"""Accelerate's own checkpoint under FSDP2, of a combined optimizer: training goes on from it."""

import sys

import torch
from accelerate_order import local, made, split
from combined import Combined
from torch.optim import AdamW, Muon


def main(folder):
    accelerator, model = made(2)
    hidden, others = split(model)
    optimizer = Combined(
        Muon(hidden, lr=0.02, distributed_config="auto"), AdamW(others, lr=3e-4)
    )
    model, optimizer = accelerator.prepare(model, optimizer)

    def train():
        generator = torch.Generator().manual_seed(1)
        for tokens in torch.randint(64, (2, 4, 16), generator=generator):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
        return [local(p).clone() for p in model.parameters()]

    saved = train()
    accelerator.save_state(folder)
    expected = train()
    accelerator.load_state(folder)
    for param, value in zip(model.parameters(), saved, strict=True):
        if not torch.equal(local(param), value):
            raise AssertionError("the checkpoint brought other weights")
    for found, value in zip(train(), expected, strict=True):
        if not torch.equal(found, value):
            raise AssertionError("training did not go on from the checkpoint")


if __name__ == "__main__":
    main(sys.argv[1])
