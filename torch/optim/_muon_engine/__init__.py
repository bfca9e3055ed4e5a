"""The engine behind ``distributed_config``; ``torch.optim.muon`` is its public face.

[Note: distributed Muon]

Muon orthogonalizes whole momentum matrices, and ranks hold pieces of them. So each matrix has one
*owner* rank. The holders send it their shards, the owner orthogonalizes the matrix once, and it sends
each holder its part of the result::

    rank 0: shard of A, shard of B --+-- gather -->  owns A: assemble, orthogonalize --+-- scatter --> apply
    rank 1: shard of A, shard of B --+-- gather -->  owns B: assemble, orthogonalize --+-- scatter --> apply

Who sends what to whom is decided once, when the optimizer is built. A step fills buffers and starts
collectives, and no gradient ever changes which collectives these are.

The words, in the order of the data:

- *region*: a rectangle of a matrix, and where a rank's local storage holds it.
- *shard*: all regions of one matrix on one rank. Ranks with equal shards are *replicas*.
- *layout*: one matrix: its global shape, and the shard of each of its ranks.
- *owner*: the rank that orthogonalizes a matrix, out of its whole grid of shards and replicas.
- *bucket*: matrices of one group of ranks that take the step together; every owner works in each.
- *gather* and *scatter*: one packed all-to-all each, to the owners and back.
- *relay*: of many replicas one, the *source*, exchanges a shard with the owner, and broadcasts what comes
  back to the others.
- *hop*: one of the two all-to-alls of a gather or scatter where a rank would have too many peers: one
  within its *node*, one along its *rail*, the ranks at its place of each node.
- *split*: what one rank sends another in it. *Spec*: which region stands where in its *buffer*.
- *slot*: the memory of one bucket in flight. *Prefetch*: later buckets whose gathers are in flight.
- *grad status*: whether a holder has a gradient; where holders differ, that is a *mismatch*.
- *signature*: what ranks compare when the optimizer is built.

The imports go one way, which a test shows::

    layouts <- schedule <- runtime <- engine <- torch.optim._muon
                           callbacks <- engine

``config``, ``agreement`` and ``process_groups`` import none of these. Whatever is special to a framework
is in ``layouts``, so a new kind of parallelism is a new reader and nothing else. The formulas come with
the parameters (:class:`runtime.Formulas`), so the engine serves any optimizer of this shape.
"""
