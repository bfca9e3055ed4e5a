"""Helpers for the tests of the distributed torch.optim.Muon."""
