"""Rules about models: which parameters are for Muon, and how fused weights are split.

The rules go by the types and places of a model's layers, and by few names. Only ``partition_named_parameters`` and
``split_of`` of :mod:`torch.optim.muon` import this package. The optimizer and its engine do not.
"""
