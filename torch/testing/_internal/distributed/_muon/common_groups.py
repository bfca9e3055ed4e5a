"""Helpers for tests of torch.optim.Muon over process groups."""

import math

from torch.optim.muon import create_auto_config
from torch.testing._internal.distributed._muon.common_muon import Cut


def sizes_of(size, count, how):
    """How ``size`` rows or columns are cut into ``count`` pieces."""
    if how == "last":
        return (0,) * (count - 1) + (size,)
    sizes = [0] * count
    if how == "balanced":
        for line in range(size):
            sizes[line % count] += 1
    else:
        # As torch.chunk: all but the last pieces have the same size.
        step = math.ceil(size / count)
        for line in range(size):
            sizes[line // step] += 1
    return tuple(sizes)


class Strategy:
    """A mesh, each of whose dimensions is one kind of parallelism: "fsdp", "tp", "ddp" or "cp"."""

    def __init__(self, mesh, *kinds):
        self.mesh, self.kinds = mesh, kinds

    def group(self, kind):
        return self.mesh.get_group(self.kinds.index(kind))

    def config(self, **options):
        groups = {f"{kind}_process_group": self.group(kind) for kind in self.kinds}
        return create_auto_config(**{**groups, **options})

    def cut(self, shape, tp_dim=None, how="chunk"):
        """TP cuts first, and FSDP the rows of its piece."""
        sizes, cuts = list(shape), []
        for kind, dim in (("tp", tp_dim), ("fsdp", 0)):
            if kind not in self.kinds or dim is None:
                continue
            # A group has its ranks in their own order, not in the mesh's.
            which = self.group(kind).rank()
            parts = sizes_of(sizes[dim], self.group(kind).size(), how)
            # A dimension may count from the end.
            cuts.append((dim % len(shape), parts, which))
            sizes[dim] = parts[which]
        return Cut(tuple(shape), tuple(cuts))
