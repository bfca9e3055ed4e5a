"""The engine behind ``distributed_config``. Its public part is ``torch.optim.muon``.

[Note: distributed Muon]

Muon orthogonalizes whole momentum matrices, but ranks hold pieces of them. So each matrix has one *owner*
rank. The holders send it their shards. The owner orthogonalizes the matrix once and sends each holder its
part of the result::

    rank 0: shard of A, shard of B --+-- gather -->  owns A: assemble, orthogonalize --+-- scatter --> apply
    rank 1: shard of A, shard of B --+-- gather -->  owns B: assemble, orthogonalize --+-- scatter --> apply

The ranks decide the route of every element once, when they build the optimizer. A step fills memory and
starts collectives. Which of the engine's collectives run never depends on a gradient. DTensor's own may bring
a gradient to the placement of its parameter first.

The vocabulary, in the order of the data:

- *region*: a rectangle of a matrix, and its location in a rank's local storage.
- *shard*: all regions of one matrix on one rank. Ranks with equal shards are *replicas*.
- *layout*: one matrix: its global shape, and the shard of each rank that holds a part of it.
- *holder*: a rank that holds a part of a matrix. *Owner*: the one of them that orthogonalizes it.
- *bucket*: matrices of one group of ranks that are processed together. Its owners work at the same time.
- *gather* and *scatter*: one packed all-to-all each, to the owners and back.
- *split sizes*: how many elements go to or come from each rank in an all-to-all. *Pack*: one side of it, with
  the place of each region. (The option *split* cuts a fused weight into *parts*, matrices of their own.)
- *source*: the replica of a shard that sends it to the owner. *Relay*: with many replicas, the owner sends a
  result only to the source, which broadcasts it.
- *batch*: an owner's matrices of one shape that it orthogonalizes together; on CPUs, usually one.
- *slot*: the memory of one bucket in flight. *Prefetch*: later buckets whose gathers are in flight.
- *status*: whether a holder has a gradient. If the holders of a matrix differ, that is a *mismatch*.
- *signature*: the values that ranks compare when they build the optimizer. *Serial*: its number among those over the
  same ranks.

Imports go one way, and a test checks it: ``layouts <- schedule <- runtime <- factory, functions <- building, changes <- engine <- _muon_install <- _muon``.
``config``, ``process_groups`` and ``agreement`` import none of these. Only ``layouts`` knows frameworks.
"""
