"""English text that comes with every CPython, as bytes."""

import torch
from pydoc_data.topics import topics
from torch import Tensor


def load() -> tuple[Tensor, Tensor]:
    """Returns the text to train on (the first nine tenths) and the held-out text."""
    # Topics repeat paragraphs. Without duplicates, the held-out text is unseen.
    paragraphs = dict.fromkeys(
        part for name in sorted(topics) for part in topics[name].split("\n\n")
    )
    data = torch.frombuffer(
        bytearray("\n\n".join(paragraphs).encode()), dtype=torch.uint8
    )
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def sample(text: Tensor, count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns ``count`` random windows (the same for a given seed) and their next bytes."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
