"""Fabric's ModelParallelStrategy, given the optimizers together with the plain model."""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.optim import Muon
from torch.optim.muon import partition_parameters


sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "frameworks"))
from fabric_fsdp2 import Model, ModelParallelStrategy, parallelize


def main():
    strategy = ModelParallelStrategy(parallelize, 2, 1)
    fabric = Fabric(strategy=strategy, devices=2)
    fabric.launch()
    plain = Model()
    muon = Muon(partition_parameters(plain.layers)[0], distributed_config="auto")
    model, muon = fabric.setup(plain, muon)
    for tokens in torch.randint(64, (3, 4, 16)):
        fabric.backward(model(tokens))
        muon.step()


if __name__ == "__main__":
    main()
