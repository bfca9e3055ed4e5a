"""Helpers for tests of matrices that several owners orthogonalize together."""

import contextlib
import os
from unittest import mock

from torch.optim._muon_engine.runtime import divided
from torch.optim._muon_engine.schedule import buckets, division


@contextlib.contextmanager
def small_ones_divided(max_replicas=buckets.MAX_REPLICAS):
    """Small matrices have several owners."""
    with (
        mock.patch.object(division, "MIN_DIVIDED", 16),
        mock.patch.object(division, "MIN_LOAD", 0.0),
        # "auto" finds it worth the collectives.
        mock.patch.object(division, "FLOPS", 1),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"),
        mock.patch.object(buckets, "MAX_REPLICAS", max_replicas),
        # The rounding of few products shows in small matrices.
        mock.patch.object(divided, "_PARTS", 16),
    ):
        yield
