"""The fourth stage of capture: whether the recording is what the model does.

Repeats the recording in different surroundings, checks Python state that a step leaves, and runs
the recorded calls beside eager PyTorch.

May include: support, modules, view, record.
"""
