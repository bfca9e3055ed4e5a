"""What the names, shapes and classes of a model's layers say about its parameters.

This package chooses the parameters that Muon gets and the ``split`` of each fused weight. All rules about well-known
models are in it. The optimizer and its engine import nothing of it: :mod:`torch.optim.muon` imports it when a user calls
``partition_named_parameters`` or ``split_of``.
"""
