"""A trace of fsdp-run with chosen times: 10 us an event, one after the other, 10 ms the step.

Arguments: the trace, the result, and replacements of the result's text, old=new.
"""

import json
import sys

source, target, *changes = sys.argv[1:]
with open(source, encoding="utf-8") as file:
    trace = json.load(file)
for rank in trace["otherData"]["ranks"]:
    rank["us"] = 10000.0
    events = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank["rank"]]
    for number, event in enumerate(events):
        event.update(ts=10.0 * number, dur=10.0)
text = json.dumps(trace)
for change in changes:
    old, _, new = change.partition("=")
    assert old in text, old
    text = text.replace(old, new, 1)
with open(target, "w", encoding="utf-8") as file:
    file.write(text)
