"""A checker of small programs against the memory consistency model of PTX (ISA 7.5 and later).

``program`` reads litmus tests, ``paths`` follows their threads, ``relations`` and ``axioms`` are
the model, ``search`` finds all executions that it allows, and ``variants`` breaks programs.
"""
