"""A recipe with another option: ``variant.py RECIPE [--config CONFIG] [--ram 0|1]``."""

import argparse
import importlib

import torch
from torch.optim.muon import create_auto_config, create_dtensor_config


CONFIGS = {
    "dtensor": create_dtensor_config,
    "fsdp": lambda: create_auto_config(
        fsdp_process_group=torch.distributed.group.WORLD
    ),
}


def replace(recipe, name, change):
    """Has ``recipe`` call ``name`` with what ``change`` makes of its options."""
    original = getattr(recipe, name)
    setattr(recipe, name, lambda *args, **options: original(*args, **change(options)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--config", choices=CONFIGS)
    parser.add_argument("--ram", type=int, choices=[0, 1])
    args = parser.parse_args()
    recipe = importlib.import_module(args.recipe)
    if args.config is not None:
        config = CONFIGS[args.config]
        replace(recipe, "Muon", lambda o: {**o, "distributed_config": config()})
    if args.ram is not None:
        ram = {"cpu_ram_efficient_loading": bool(args.ram)}
        if hasattr(recipe, "TrainingArguments"):

            def change(options):
                return {**options, "fsdp_config": {**options["fsdp_config"], **ram}}

            replace(recipe, "TrainingArguments", change)
        else:
            replace(recipe, "FullyShardedDataParallelPlugin", lambda o: {**o, **ram})
    recipe.main()


if __name__ == "__main__":
    main()
