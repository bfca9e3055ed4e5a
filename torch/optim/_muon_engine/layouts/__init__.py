"""Which rank stores which region of a matrix. Only this folder of the engine knows frameworks."""
