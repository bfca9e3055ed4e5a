"""The cost of a distributed Muon step: measured, counted and simulated.

``python -m tools.bench`` needs an interpreter whose torch has the overlay. Times depend on the machine,
so ``step`` reports ratios of times from the same processes and the same repetition.
"""
