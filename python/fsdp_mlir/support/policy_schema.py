"""The keys of the policy file, as policy_schema.json defines them for fsdp-opt, capture and docs.

`read` returns what capture needs from a file. What a key may hold, and the wording of messages
about that, are those of lib/Import/PolicySchema.h.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fsdp_mlir.support.errors import CaptureError
from fsdp_mlir.support.files import read_text

Key = dict[str, Any]

_MOST_BYTES = 16 << 20  # of a file, as kMaxYamlBytes
_TEXTS = ("pattern", "operator", "path", "name")
_BOUNDS = {
    "least": ("of at least", lambda x, bound: x >= bound),
    "above": ("above", lambda x, bound: x > bound),
    "most": ("at most", lambda x, bound: x <= bound),
    "below": ("below", lambda x, bound: x < bound),
}


def _resolved(key: Key, around: Sequence[Key]) -> Key:
    """`key` with the keys that it shares with the mapping around it, without their defaults."""
    own = key.get("keys", [])
    keys = [_resolved(each, own) for each in own]
    for name in key.get("shared", []):
        (shared,) = (each for each in around if each["key"] == name)
        shared = _resolved(shared, around)
        keys.append({k: v for k, v in shared.items() if k not in ("default", "absent", "required")})
    return {**key, "keys": keys} if keys else key


_FILE = Path(__file__).with_name("policy_schema.json")
SCHEMA = _resolved({"key": "", "types": ["mapping"], **json.loads(_FILE.read_text())}, [])


def key_of(mapping: Key, name: str) -> Key | None:
    return next((key for key in mapping.get("keys", []) if key["key"] == name), None)


def key_at(*names: str) -> Key:
    """That of a path of keys, which is there."""
    key = SCHEMA
    for name in names:
        (key,) = (each for each in key["keys"] if each["key"] == name)
    return key


def keys_where(field: str, value: Any) -> tuple[str, ...]:
    """The keys of the policy whose `field` is `value`, in order."""
    return tuple(key["key"] for key in SCHEMA["keys"] if key.get(field) == value)


# FSDP2's settings of dtypes, and the dtypes that they can be.
DTYPE_KEYS = tuple(key["key"] for key in key_at("mixed_precision")["keys"] if "values" in key)
DTYPES = tuple(key_at("mixed_precision", "param_dtype")["values"])


def hyperparameters(optimizer: str) -> tuple[str, ...]:
    """The keys that a parameter group of a torch.optim optimizer can have of its own."""
    keys = key_at("optimizer", "groups")["keys"]
    return tuple(key["key"] for key in keys if optimizer in key.get("optimizers", ()))


def _named(key: Key) -> str:
    return f'"{key["key"]}"' if key["key"] else "the config"


def unknown(name: str, mapping: Key = SCHEMA) -> str:
    """What is said of a key that a mapping does not have."""
    known = [key["key"] for key in mapping["keys"]]
    near = difflib.get_close_matches(name, known, 1)
    meant = f', did you mean "{near[0]}"?' if near else f"; known ones are: {', '.join(known)}"
    return f'unknown key "{name}" in {_named(mapping)}{meant}'


def described(key: Key) -> str:
    """What is expected, as "an integer of at least 1 or auto"."""
    types = key["types"]
    alternatives = [words for each in types if each != "null" for words in _described(key, each)]
    alternatives += key.get("values", [])
    alternatives += ["null"] if "null" in types else []
    *others, last = alternatives
    return f"{', '.join(others)} or {last}" if others else last


def _described(key: Key, kind: str) -> list[str]:
    bounds = " and ".join(f"{words} {key[b]}" for b, (words, _) in _BOUNDS.items() if b in key)
    if kind.startswith("list of "):
        count = f"{key['length']} " if "length" in key else ""
        return [f"a sequence of {count}{kind.removeprefix('list of ')}s {bounds}".rstrip()]
    return {
        "bool": ["true", "false"],
        "false": ["false"],
        "integer": [f"an integer {bounds}".rstrip()],
        "number": [f"a number {bounds}".rstrip()],
        "bytes": ["a positive number of bytes such as 40GB or 37.5GiB"],
        "operator": ["an operator"],
    }.get(kind, [f"a {kind.partition(' ')[0]}"])


# ---------------------------------------------------------------------------
# A file
# ---------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The keys that capture needs, as plain values; CaptureError for a value that a key cannot
    have."""
    try:
        root = yaml.compose(read_text(path, _MOST_BYTES), Loader=yaml.SafeLoader)
    except OSError as error:
        raise CaptureError(f"cannot read '{path}': {(error.strerror or '').lower()}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise CaptureError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from error
    if root is None or _is_null(root):
        return {}
    if not isinstance(root, MappingNode):
        raise _wrong(path, root, SCHEMA)
    captured = keys_where("capture", True)
    entries = ((key, value) for key, value in root.value if key.value in captured)
    return dict(_entries(path, entries, SCHEMA))


def _is_null(node: Node) -> bool:
    return isinstance(node, ScalarNode) and not node.value and not node.style


def _at(path: Path, node: Node, message: str) -> CaptureError:
    mark = node.start_mark
    return CaptureError(f"{path}:{mark.line + 1}:{mark.column + 1}: {message}")


def _text(node: Node) -> str:
    """That of a scalar, as a line shows it."""
    text = " ".join(node.value.split()) if isinstance(node, ScalarNode) else ""
    return text if len(text) <= 80 else text[:80] + "…"


def _wrong(path: Path, node: Node, key: Key) -> CaptureError:
    if isinstance(node, ScalarNode):
        got = "nothing" if _is_null(node) else f'"{_text(node)}"'
    else:
        got = "a sequence" if node.value else "an empty sequence"
        got = "a mapping" if isinstance(node, MappingNode) else got
    return _at(path, node, f"expected {described(key)} for {_named(key)}, got: {got}")


def _value(path: Path, node: Node, key: Key) -> Any:
    """The checked value of a key: a bool, None, a text, or a list or mapping of such."""
    types = key["types"]
    if isinstance(node, MappingNode) and "mapping" in types:
        return _mapping(path, node, key)
    if isinstance(node, SequenceNode):
        element = next((x for x in types if x.startswith("list of ")), "")
        if element and (node.value or element != "list of pattern"):
            inner = {**key, "types": [element.removeprefix("list of ")], "values": []}
            return [_value(path, each, inner) for each in node.value]
    if isinstance(node, ScalarNode):
        is_null = _is_null(node)
        if "null" in types and (is_null or node.value == "null"):
            return None
        if node.value in key.get("values", []):
            return node.value
        if not is_null and any(_is(key, kind, node.value) for kind in types):
            has_words = "bool" in types or "false" in types
            return (
                {"true": True, "false": False}.get(node.value, node.value)
                if has_words
                else node.value
            )
    raise _wrong(path, node, key)


def _is(key: Key, kind: str, text: str) -> bool:
    if kind in ("bool", "false"):
        return text == "false" or (text == "true" and kind == "bool")
    if kind in ("integer", "number"):
        try:
            value = int(text) if kind == "integer" else float(text)
        except ValueError:
            return False
        within = (holds(value, key[bound]) for bound, (_, holds) in _BOUNDS.items() if bound in key)
        return math.isfinite(value) and all(within)
    return kind in _TEXTS and text != ""


def _mapping(path: Path, node: MappingNode, key: Key) -> dict[str, Any]:
    found = dict(_entries(path, iter(node.value), key))
    one_of = key.get("one_of", [])
    given = [entry for entry in node.value if entry[0].value in one_of]
    choice = '" or "'.join(one_of)
    if len(given) > 1:
        message = f'expected "{choice}" in "{key["key"]}", got both'
        raise _at(path, given[1][1], message)
    if one_of and not given:
        raise _at(path, node, f'expected a key "{choice}" in "{key["key"]}"')
    return found


def _entries(
    path: Path, entries: Iterator[tuple[Node, Node]], key: Key
) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for name, value in entries:
        known = key_of(key, name.value)
        if known is None:
            raise _at(path, name, unknown(_text(name), key))
        if name.value in seen:
            raise _at(path, name, f'key "{name.value}" is given twice')
        seen.add(name.value)
        yield name.value, _value(path, value, known)
