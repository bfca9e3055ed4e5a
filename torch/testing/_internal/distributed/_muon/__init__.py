"""What the tests of the distributed torch.optim.Muon share."""
