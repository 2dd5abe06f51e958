"""Nodes in an order that their inputs allow."""

from collections.abc import Container, Iterator

from torch.fx import Node


def needed(node: Node, done: Container[Node]) -> Iterator[Node]:
    """A node and all that it needs, inputs first, as far as they are not done.

    Who takes a node from here must have it done before the next one.
    """
    waiting = [node]
    while waiting:
        current = waiting[-1]
        missing = [x for x in current.all_input_nodes if x not in done]
        if current in done:
            waiting.pop()
        elif missing:
            waiting += sorted(missing, reverse=True)
        else:
            yield waiting.pop()
