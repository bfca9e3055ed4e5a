"""The engine behind ``distributed_config``. Its public part is ``torch.optim.muon``.

[Note: distributed Muon]

Muon orthogonalizes whole momentum matrices, but ranks hold pieces of them. So each matrix has one *owner*
rank. The ranks send it their shards. The owner orthogonalizes the matrix once and sends each rank its
part of the result::

    rank 0: shard of A, shard of B --+-- gather -->  owns A: assemble, orthogonalize --+-- scatter --> apply
    rank 1: shard of A, shard of B --+-- gather -->  owns B: assemble, orthogonalize --+-- scatter --> apply

The ranks decide the route of every element once, when they build the optimizer. A step fills memory and
starts collectives. Which of the engine's collectives run never depends on a gradient. DTensor's own may bring
a gradient to the placement of its parameter first.

The vocabulary, in the order of the data:

- *region*: a rectangle of a matrix, and its location in a rank's local storage.
- *shard*: all regions of one matrix on one rank. Ranks with equal shards are *replicas*.
- *grid*: the ranks that share a matrix. Its *rows* are the replicas of the whole matrix, its *columns* the replicas of
  one shard.
- *layout*: a grid, and the regions of each shard.
- *owner*: the rank that orthogonalizes a matrix. Gather and scatter stay in its row.
- *bucket*: matrices of one grid that are processed together. Its owners work at the same time.
- *gather* and *scatter*: one packed all-to-all each, to the owners of a row and back.
- *round*: one exchange along a column, in which each rank gets a piece of the updates of every other row.
- *batch*: an owner's matrices of one shape that share memory and calls. By default, a CPU orthogonalizes them one by one.
- *prefetch*: later buckets whose gathers are in flight.
- *status*: whether a rank has a gradient. If the ranks of a grid differ, nothing may move.

The modules, in the order of the data: ``dtensors``, ``groups`` (with ``tp_dims`` and ``fsdp``) read which matrices ``params``
have, and where they are, in the terms of ``regions``. ``plan`` makes buckets and exchanges of that, and ``step`` runs them,
with ``inputs``. ``engine`` builds all of it together with the other ranks, by ``agreement``, and tells them of each step, by
``statuses``. ``functions`` is the step through functions of the user. Imports go one way.
"""
