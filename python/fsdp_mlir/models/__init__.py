"""Models to capture: our own Llama, and factories for those of `transformers`.

May include: no other room.
"""
