"""Immediate post-dominators: where the two sides of a branch meet again (Cooper, Harvey and Kennedy's
iteration)."""

from __future__ import annotations


def postdominators(successors: list[tuple]) -> list[int]:
    """For each row the row that every path from it must pass next, or -1 if paths only meet at the function's
    end."""
    size = len(successors)
    exit_node = size
    predecessors: list[list[int]] = [[] for _ in range(size + 1)]
    for node, following in enumerate(successors):
        for target in following or (exit_node,):
            predecessors[target].append(node)
    order, seen = [], [False] * (size + 1)
    stack = [(exit_node, 0)]
    seen[exit_node] = True
    while stack:
        node, index = stack.pop()
        if index < len(predecessors[node]):
            stack.append((node, index + 1))
            target = predecessors[node][index]
            if not seen[target]:
                seen[target] = True
                stack.append((target, 0))
        else:
            order.append(node)
    rank = {node: number for number, node in enumerate(order)}
    parent = [-1] * (size + 1)
    parent[exit_node] = exit_node

    def meet(a: int, b: int) -> int:
        while a != b:
            while rank[a] < rank[b]:
                a = parent[a]
            while rank[b] < rank[a]:
                b = parent[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            best = -1
            for target in successors[node] or (exit_node,):
                if parent[target] != -1:
                    best = target if best < 0 else meet(best, target)
            if best != parent[node]:
                parent[node] = best
                changed = True
    return [-1 if parent[node] in (exit_node, -1) else parent[node] for node in range(size)]
