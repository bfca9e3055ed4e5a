"""Whether the tests notice faults that are put into the engine deliberately.

``python -m tools.mutation`` by an interpreter whose torch has the overlay tries one after another,
each in a copy of the optimizer that only the tests of that run import.
"""
