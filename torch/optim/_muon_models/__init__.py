"""Rules about models: which parameters are for Muon, and how fused weights are split.

The rules read the names, the shapes and the classes of a model's layers. Only ``partition_named_parameters`` and
``split_of`` of :mod:`torch.optim.muon` import this package. The optimizer and its engine do not.
"""
