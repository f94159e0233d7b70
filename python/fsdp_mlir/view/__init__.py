"""The first two stages of capture: what is captured.

A model with its units, its state by name and a step on example inputs; then the same without data,
from which the step is recorded.

May include: support, modules, policy, step.
"""
