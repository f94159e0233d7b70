"""The last stage of capture: the file.

capture.json, the IR texts and the weights, written; and the fingerprint of what was written.

May include: support, modules, view, record, check.
"""
