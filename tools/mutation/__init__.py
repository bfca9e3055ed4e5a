"""Whether the tests notice faults that somebody puts into the engine.

``python -m tools.mutation`` by an interpreter whose torch has the overlay tries one fault after another. Each
is in a copy of the optimizer that only the tests of that run import.
"""
