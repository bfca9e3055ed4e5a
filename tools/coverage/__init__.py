"""How much of the optimizer the tests execute: lines, branches, and each error path.

``python -m tools.coverage`` by the environment's interpreter, after ``coverage run``;
``setup_overlay.py test`` does both.
"""
