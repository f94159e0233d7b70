"""docs/config.md: the keys of the policy file, from policy_schema.json of the Python package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

from fsdp_mlir.support.policy_schema import SCHEMA, Key, described

HEAD = """
# The policy file

The policy file says what is sharded, gathered, kept and updated. It uses the names of FSDP2,
torch.optim and torchtitan. `fsdp-opt --config` and `python -m fsdp_mlir.capture --config` read it.
`fsdp_mlir.compile` makes one from what `fully_shard` did, and takes further keys as arguments.

```yaml
units: [{match: "layers.*"}]
mixed_precision: {param_dtype: bfloat16, reduce_dtype: float32}
optimizer: {name: adamw, lr: 3.0e-4, fused: true}
clip_grad_norm: 1.0
```

The file is YAML, one document without anchors and block scalars, indented with spaces; JSON is
YAML. An unknown key, a key that is given twice, and a value that a key cannot have are errors with
file, line and column.

A *pattern* matches dotted names: `*` stays within one segment of the name, `**` crosses segments,
and `?` is one letter. A pattern that matches nothing is an error. A number of bytes can have a
unit: GB, GiB, MB, MiB, KB or KiB.
"""

COMPILE = {
    "fully_shard": "what `fully_shard` was given; not an argument of `compile`.",
    "argument": "other arguments of `compile` give it.",
}


def default_of(key: Key) -> str:
    if "absent" in key:
        return str(key["absent"])
    if key.get("required"):
        return "required"
    if "default" not in key:
        return "that of the mapping around"
    value = key["default"]
    if value == {}:
        return "the defaults of its keys"
    if isinstance(value, dict):
        return ", ".join(f"`{json.dumps(each)}` for `{name}`" for name, each in value.items())
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def meaning_of(key: Key) -> str:
    optimizers = key.get("optimizers", [])
    of = f" Of {', '.join(f'`{name}`' for name in optimizers)}." if optimizers else ""
    return f"{key['doc']}{of}"


def table(key: Key) -> Iterator[str]:
    shared = key.get("shared", [])
    yield from ("", "| key | value | without it | meaning |", "| --- | --- | --- | --- |")
    for each in key["keys"]:
        if each["key"] not in shared:
            default = "one of both is there" if each["key"] in key.get("one_of", []) else None
            cells = [f"`{each['key']}`", described(each), default or default_of(each)]
            yield "| " + " | ".join([*cells, meaning_of(each)]) + " |"
    if shared:
        names = ", ".join(f"`{name}`" for name in shared)
        yield from ("", f"Keys of the mapping around that may stand here too: {names}.")
    for each in key["keys"]:
        if each.get("keys") and each["key"] not in shared:
            yield from ("", f"### `{each['key']}` of `{key['key']}`", "", meaning_of(each))
            yield from table(each)


def section(key: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"## `{key['key']}`", "", key["doc"], "")
    yield f"- Value: {described(key)}."
    yield f"- Without it: {default_of(key)}."
    if "origin" in key:
        yield f"- From: {key['origin']}."
    if "needs" in key:
        yield f"- Needs: `{key['needs']}`."
    if key.get("capture"):
        yield "- Capture reads it too."
    if key.get("compile") in COMPILE:
        yield f"- In Python: {COMPILE[key['compile']]}"
    yield from ("", "```yaml", key["example"], "```")
    if key.get("keys"):
        yield from table(key)


def config_doc(note: str) -> str:
    lines = [note, *HEAD.rstrip().split("\n")]
    for key in SCHEMA["keys"]:
        lines += section(key)
    return "\n".join(lines) + "\n"
