"""Terms that depend on positions alone: the distance of each pair, gathered once for all such
biases."""

from collections.abc import Callable

from torch import Tensor

from longitude.part import Index, Term


def by_distance(q_pos: Tensor, k_pos: Tensor, value: Callable[[Index, Tensor], Tensor]) -> Term:
    """The term value(h, i - j), with positions (b|1, n) gathered at the indices asked for."""

    def term(b: Index, h: Index, i: Index, j: Index) -> Tensor:
        return value(h, at(q_pos, b, i) - at(k_pos, b, j))

    return term


def at(pos: Tensor, b: Index, i: Index) -> Tensor:
    """Positions (b|1, n) at batch b and index i; one row serves every batch."""
    return pos[0][i] if pos.shape[0] == 1 else pos[b, i]
