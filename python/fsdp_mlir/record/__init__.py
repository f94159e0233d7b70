"""The third stage of capture: the calls that a step makes.

The recorder below autograd with all that it knows about operators, values and random numbers; the
graphs of a step, of its evaluation and of a model's initialisation.

May include: support, modules, view.
"""
