"""The fourth stage of capture: whether the recording is what the model does.

Recordings in other surroundings, Python state that a step leaves, and the recorded calls beside
eager PyTorch.

May include: support, modules, view, record.
"""
