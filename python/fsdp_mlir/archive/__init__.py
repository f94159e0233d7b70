"""The last stage of capture: the file.

Writes capture.json, the IR texts and the weights, and computes the fingerprint of what was written.

May include: support, modules, view, record, check.
"""
