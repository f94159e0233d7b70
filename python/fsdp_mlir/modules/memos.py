"""What functions of functools.lru_cache keep of their calls, which these functions do not tell."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import _lru_cache_wrapper, partial
from types import FunctionType, SimpleNamespace
from typing import Any

from fsdp_mlir.modules.place import ABSENT, SCALARS
from fsdp_mlir.support.errors import CaptureError

Memo = _lru_cache_wrapper


def held(memo: Memo[Any]) -> dict[Any, Any] | None:
    """The results by their keys, those that were used last at the end; None if `hold` cannot put
    results there."""
    parts = _parts(memo)
    if parts is None:
        return None
    stored, links, _ = parts
    if memo.cache_parameters()["maxsize"] is None:
        return dict(stored)
    # Each link of the list gives its key, its result and its class.
    found = dict(zip(links[::3], links[1::3], strict=False))
    return found if found.keys() == stored.keys() else None


def _parts(memo: Memo[Any]) -> tuple[dict[Any, Any], list[Any], object] | None:
    """What it refers to, as far as it is as expected: its dict, what comes before that except its
    class, and its mark in keys."""
    parts, function = gc.get_referents(memo), getattr(memo, "__wrapped__", None)
    at = next((i for i in reversed(range(len(parts))) if parts[i] is function), 0)
    if at < 2 or _function(memo) is None or type(parts[at - 1]) is not dict:
        return None
    mark = parts[at + 1 : at + 2]
    return (parts[at - 1], parts[1 : at - 1], mark[0]) if mark and type(mark[0]) is object else None


def _function(memo: Memo[Any]) -> FunctionType | None:
    """What it calls, which may have some arguments already."""
    function = getattr(memo, "__wrapped__", None)
    while type(function) is partial:
        function = function.func
    return function if type(function) is FunctionType else None


def get(memo: Memo[Any], key: Any) -> Any:
    """The result with a key; ABSENT without one."""
    return (held(memo) or {}).get(key, ABSENT)


def put(memo: Memo[Any], key: Any, result: Any) -> None:
    """Adds a result, or replaces it."""
    now = held(memo)
    if now is not None and now.get(key, ABSENT) is not result:
        hold(memo, now | {key: result})


def hold(memo: Memo[Any], results: Mapping[Any, Any]) -> None:
    """Makes it keep these results, and no others: it calls a function that returns them. No other
    thread may call it meanwhile."""
    now, parts, function = held(memo), _parts(memo), _function(memo)
    if now is None or parts is None or function is None or is_same(now, results):
        return
    memo.cache_clear()
    is_typed = memo.cache_parameters()["typed"]
    box, code = SimpleNamespace(), function.__code__
    function.__code__ = _given(box, code.co_freevars)
    try:
        for key, box.result in results.items():
            args, kwargs = _arguments(key, parts[2], is_typed)
            memo(*args, **kwargs)
    finally:
        function.__code__ = code


def is_same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    pairs = zip(now.items(), before.items(), strict=False)
    return len(now) == len(before) and all(
        a is b and _is_same_key(x, y) for (x, a), (y, b) in pairs
    )


def _is_same_key(now: Any, before: Any) -> bool:
    """By identity where they are not plain: tensors do not compare to one truth value."""
    if now is before:
        return True
    if isinstance(now, (tuple, list)) and type(now) is type(before):  # functools has lists, too
        return len(now) == len(before) and all(map(_is_same_key, now, before))
    return isinstance(now, SCALARS) and type(now) is type(before) and now == before


def named(memo: Memo[Any]) -> str:
    """As messages have it: an object that may be called has no name to give it."""
    return f"{memo.__module__}.{getattr(memo, '__qualname__', 'lru_cache')}"


def shown(key: Any) -> Any:
    """The key without what has another text in another process."""
    if type(key) is not tuple:
        return key
    return tuple("**" if type(item) is object else item for item in key)


def _given(box: SimpleNamespace, variables: tuple[str, ...]) -> Any:
    """The code of a function with such closure variables that returns what is in the box."""
    code = (lambda *args, **kwargs: ().result).__code__  # type: ignore[attr-defined]
    constants = tuple(box if each == () else each for each in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=variables)


def _arguments(key: Any, mark: object, is_typed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of a call that has this key: functools puts the positional ones, a mark, and names with
    values in a row, and then all their types if it tells these apart."""
    if type(key) is not tuple:
        return (key,), {}
    count = next((index for index, item in enumerate(key) if item is mark), -1)
    if count < 0:
        return key[: len(key) // 2] if is_typed else key, {}
    named = key[count + 1 :]
    if is_typed:  # two items for each keyword, and one type for each argument
        named = named[: (len(named) - count) // 3 * 2]
    return key[:count], dict(zip(named[::2], named[1::2], strict=True))


def refused(memo: Memo[Any]) -> CaptureError:
    return CaptureError(
        f"'{named(memo)}' keeps what it returned, which a capture cannot put back: expected "
        "functools.lru_cache of a function of Python"
    )
