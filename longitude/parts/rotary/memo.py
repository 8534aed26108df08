"""Tables made once: a memo bounded by how much it holds, not by how many.

Every layer of a model turns by the same tables, so they are worth keeping; but a decoder asks for a
longer one at each step, and a fixed number of tables would grow without bound with the context.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock

from torch import Tensor

Tables = tuple[Tensor, Tensor]
LEAST = 4096  # what a small table counts as: a decoder makes one at each step


class Memo:
    """What `make` gave for recent arguments, up to `limit` numbers in all; the oldest go first."""

    def __init__(self, make: Callable[..., Tables], limit: int) -> None:
        self.make, self.limit, self.size = make, limit, 0
        self.kept: OrderedDict[tuple[Hashable, ...], Tables] = OrderedDict()
        self.lock = Lock()

    def __call__(self, *key: Hashable) -> Tables:
        with self.lock:
            if key in self.kept:
                self.kept.move_to_end(key)
                return self.kept[key]
        made = self.make(*key)
        with self.lock:
            if key not in self.kept:
                self.kept[key] = made
                self.size += _numbers(made)
            while self.size > self.limit and len(self.kept) > 1:
                self.size -= _numbers(self.kept.popitem(last=False)[1])
        return made


def _numbers(tables: Tables) -> int:
    return max(LEAST, sum(t.numel() for t in tables))
