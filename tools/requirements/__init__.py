"""Which test or example shows which requirement of the project's documents.

A test, class or example says it in a comment at its beginning::

    # Shows: testing/p0/fsdp, examples/1

``python -m tools.requirements`` writes docs/requirements.md from these comments;
``--check`` says what is missing, unknown or out of date.
"""
