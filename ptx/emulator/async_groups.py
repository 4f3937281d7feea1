"""Groups of bulk copies of a thread: commit_group and wait_group (warp_copies keeps those of cp.async).

Groups belong to threads, but lanes nearly always act together; a ``Groups`` object keeps one history for each
set of lanes that has acted alike so far, and splits it when they part.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Operation:
    """One asynchronous operation inside a group: what a waiter may learn from it, and when."""

    label: str
    agent: object = None
    read_done: bool = False
    done: bool = False
    read_row: object = None
    row: object = None


@dataclass
class _History:
    open: list = field(default_factory=list)
    committed: list = field(default_factory=list)

    def copy(self):
        return _History(list(self.open), [list(group) for group in self.committed])


class Groups:
    """The groups of one warp, per set of lanes."""

    def __init__(self):
        self._histories: dict[int, _History] = {0xFFFFFFFF: _History()}

    def _of(self, mask):
        found = []
        for lanes in list(self._histories):
            common = lanes & mask
            if not common:
                continue
            history = self._histories[lanes]
            if common != lanes:
                self._histories[lanes & ~mask] = history.copy()
                del self._histories[lanes]
                self._histories[common] = history
            found.append(history)
        return found

    def add(self, mask, operation):
        """The lanes start an operation; it joins their open group."""
        for history in self._of(mask):
            history.open.append(operation)

    def commit(self, mask):
        """Close the open group (it may be empty)."""
        for history in self._of(mask):
            history.committed.append(history.open)
            history.open = []

    def pending(self, mask, keep, *, read):
        """Operations that are to finish before at most ``keep`` newest groups are left running.

        Args:
            read: only their reads of the source need be over (``.read``).

        Returns:
            (unfinished operations, operations that count as waited for).
        """
        unfinished, waited = [], []
        for history in self._of(mask):
            for group in history.committed[:max(len(history.committed) - keep, 0)]:
                for operation in group:
                    waited.append(operation)
                    if not (operation.read_done if read else operation.done):
                        unfinished.append(operation)
        return unfinished, waited

    def forget(self, mask, keep):
        """Drop groups that were waited for completely."""
        for history in self._of(mask):
            del history.committed[:max(len(history.committed) - keep, 0)]
