"""Public models that need ``exclude``: brings the table of partition.md up to date.

    python docs/data/partition.py

The first two columns have the models and their patterns. The script makes each model on meta, and writes the
parameters that the patterns take from Muon into the third column.
"""

import re
from pathlib import Path

import diffusers
import timm
import torch
import torchvision
import transformers
from torch.optim.muon import partition_named_parameters


PAGE = Path(__file__).with_suffix(".md")
ROW = re.compile(r"^\| (\w+): ([\w, ]+) \| (`.*`) \| .* \|$", re.MULTILINE)


def from_transformers(name):
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class())


MAKERS = {
    "transformers": from_transformers,
    "diffusers": lambda name: getattr(diffusers, name)(),
    "timm": timm.create_model,
    "torchvision": torchvision.models.get_model,
}


def of_muon(model, exclude=()):
    matrices, _ = partition_named_parameters(model, exclude=exclude)
    return {name for name, _ in matrices}


def updated(row):
    package, models, exclude = row.groups()
    excluded = {}
    for name in models.split(", "):
        model = MAKERS[package](name)
        patterns = re.findall("`(.*?)`", exclude)
        for taken in sorted(of_muon(model) - of_muon(model, patterns)):
            excluded[re.sub(r"\.\d+\b", ".*", taken)] = None
    return f"| {package}: {models} | {exclude} | {', '.join(excluded)} |"


if __name__ == "__main__":
    with torch.device("meta"):
        PAGE.write_text(ROW.sub(updated, PAGE.read_text()))
