"""The gradients of a causal window, paved with causal tiles of cuDNN's kernel.

Over blocks as long as the window is wide, a window is a lower triangle in each block and an upper
one over the block before it, which is a lower one with rows and columns reversed. cuDNN knows no
windows, but its backward takes two thirds of the time of flash attention's (`windowed`), which
does. The lower triangles are views; the upper ones are copied, in one launch.
"""

from __future__ import annotations

from torch import Tensor

from longitude.ops import aten as operators
from longitude.ops import swa_flash as windowed
from longitude.ops.aten import CUDNN, Operator, Ran, cudnn_for
from longitude.ops.band import Gradients, Part
from longitude.ops.gather_windows import Windows, stacked, windows
from longitude.ops.rented import FLASHES, Rent, operations

LEAST = 2048  # rows of a tile from which on it pays for its launch
SHARE = 1.25  # what a call saves to each of the two plans, in forwards: a backward is 2.5 of them
RENT = Rent.of(FLASHES)
Three = tuple[Tensor, Tensor, Tensor]


def takes(part: Part) -> bool:
    """Whether a band is such a window over whole blocks, and cuDNN is there."""
    n, wide = part.q.shape[2], part.band.hi
    whole = LEAST <= wide < n and n % wide == 0
    return whole and windowed.takes(part) and cudnn_for(part.q) is not None


def due(part: Part) -> bool:
    """Whether its shape still pays rent to cuDNN's plans, which this call then does."""
    shape = (tuple(part.q.shape), part.k.shape[1], part.band.hi)
    return RENT.due(part.q, shape, SHARE * operations(part.q, part.band.hi, causal=False))


def backward(part: Part, grad: Tensor, out: Tensor, lse: Tensor, by: Operator = CUDNN) -> Gradients:
    """Gradients of a window, in the type of its tensors."""
    made = _lower(part, grad, Ran(out, lse), by)
    _add_upper(made, part, grad, Ran(out, lse), by)
    return Gradients(*made, None)


def _lower(part: Part, grad: Tensor, whole: Ran, by: Operator) -> Three:
    """Of the triangles on the diagonal, in rows of the whole."""
    given = (grad, part.q, part.k, part.v, whole.out, whole.lse[..., None])
    dout, q, k, v, out, lse = (_blocks(x, part.band.hi) for x in given)
    made = operators.backward(by, dout, q, k, v, Ran(out, lse[..., 0]), True, part.scale)
    dq, dk, dv = (x.unflatten(0, (grad.shape[0], -1)).transpose(1, 2).flatten(2, 3) for x in made)
    return dq, dk, dv


def _blocks(x: Tensor, size: int) -> Tensor:
    """(b h n d) as (b·t h size d): a view where tokens lie before heads."""
    return x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)


def _add_upper(totals: Three, part: Part, grad: Tensor, whole: Ran, by: Operator) -> None:
    """Add those of the triangles before the diagonal: run in reverse, and put right again."""
    wide, n = part.band.hi, part.q.shape[2]
    tops, size = list(range(wide, n, wide)), wide - 1
    lefts = [top - size for top in tops]
    rows = [Windows(x, tops, size) for x in (grad, whole.out, part.q)]
    columns = [Windows(x, lefts, size) for x in (part.k, part.v)]
    dout, out, q, k, v = stacked([*rows, *columns], flipped=True)
    (lse,) = stacked([Windows(whole.lse[..., None], tops, size)], flipped=True)
    made = operators.backward(by, dout, q, k, v, Ran(out, lse[..., 0]), True, part.scale)
    right = stacked([Windows(x, [0], size) for x in made], flipped=True)
    for total, one, starts in zip(totals, right, (tops, lefts, lefts), strict=True):
        windows(total, starts, size).add_(one.unflatten(0, (len(tops), -1)))
