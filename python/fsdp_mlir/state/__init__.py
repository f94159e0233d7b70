"""What compiled steps and eager code both train.

Parameters in the memory of a session, state dicts of models and optimizers, and torch's optimizers
in the form that a plan has them.

May include: support, modules.
"""
