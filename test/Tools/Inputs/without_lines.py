"""Prints a plan without its digest and the source lines of its calls: in a plan that was made from
text they are lines of the text."""

import json
import sys
from typing import Any


def stripped(value: Any) -> Any:
    if isinstance(value, dict):
        left = {key: x for key, x in value.items() if key not in ("digest", "line", "lines")}
        return {key: stripped(x) for key, x in left.items()}
    return [stripped(x) for x in value] if isinstance(value, list) else value


print(json.dumps(stripped(json.load(sys.stdin)), indent=1))
