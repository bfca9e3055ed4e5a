"""What a Muon tells its users beside errors: what a step costs, and probable mistakes."""
