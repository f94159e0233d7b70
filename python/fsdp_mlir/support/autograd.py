"""The graph that autograd has made of a value."""

from __future__ import annotations

from torch.autograd.graph import Node


def nodes_from(node: Node | None) -> list[Node]:
    """All nodes that a backward from a node runs, each once."""
    found: dict[int, Node] = {}
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += [user for user, _ in each.next_functions]
    return list(found.values())
