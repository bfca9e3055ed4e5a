"""Whether the tests notice faults in the engine: ``python -m tools.mutation --help``."""
