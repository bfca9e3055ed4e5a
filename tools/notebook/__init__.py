"""Makes a notebook of a script in cells, so that the two cannot tell different stories.

``python -m tools.notebook examples/blueprint.py``, by any interpreter.
"""
