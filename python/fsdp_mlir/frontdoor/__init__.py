"""`compile`: the step of a sharded model in this process.

Which plan a call gets, how ranks agree on it, what a plan is compiled from, whether a plan still
fits the model, and the plans that are kept between processes.

May include: support, modules, step, view, record, check, archive, capture, state.
"""
