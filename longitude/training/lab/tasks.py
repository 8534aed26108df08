"""The lab's generated tasks: passkey, recall, copy, reverse, sort, arithmetic and parity.

Ruoss et al. 2023, "Randomized Positional Encodings Boost Length Generalization of Transformers",
arXiv:2305.16843, trains on short strings and tests on long ones; its tasks are Delétang et al.'s
(arXiv:2207.02098). They were made for encoders with an output position per symbol; a decoder reads
them as a line of text, `problem=answer` and a newline. A model solves a row if it predicts every
byte of the answer, the newline included: an answer that does not end is wrong.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from string import ascii_lowercase

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from longitude.core.validate import UserError, shown
from longitude.eval.tasks.passkey import Form, form_for, passkey

KEY_WEIGHT = 10  # of a key's digits in the loss: few bytes among hundreds that hardly matter
MODULUS = 5
POWERS = torch.tensor([1, 2, 4, 3])  # of 2 modulo 5: all numbers but 0
LOGS = torch.tensor([0, 0, 1, 3, 2])  # exponent of each number (0 has none, and is handled apart)

Bytes = Int64[Tensor, "size _"]  # NUL marks gaps, which are removed later
Counts = Int64[Tensor, " size"]  # the number of symbols of each row


@dataclass(frozen=True, eq=False)
class Rows:
    """Windows of a task; `weights` and `answer` refer to the targets, `tokens[:, 1:]`."""

    tokens: Int64[Tensor, "size window"]
    weights: Float32[Tensor, "size length"]  # in the loss
    answer: Bool[Tensor, "size length"]  # which targets are the answer


@dataclass(frozen=True)
class Line:
    """A task written as `problem=answer` and a newline. It takes `each` tokens per symbol and
    `extra` more; `write` returns problems of n symbols (of at most `most`) and their answers."""

    name: str
    paper: str
    each: int
    extra: int
    write: Callable[[torch.Generator, Counts, int], tuple[Bytes, Bytes]]

    def rows(self, rng: torch.Generator, size: int, length: int, vary: bool) -> Rows:
        """Generate `size` windows of `length` + 1 tokens. In training, problems `vary` in size; in
        tests, each is the largest that fits."""
        max_symbols = (length + 1 - self.extra) // self.each
        if max_symbols < 1:
            raise UserError(
                f"{self.name} takes at least {self.each + self.extra - 1} tokens, but got a length "
                f"of {length}: give more."
            )
        n = torch.randint(1 if vary else max_symbols, max_symbols + 1, (size,), generator=rng)
        problem, answer = self.write(rng, n, max_symbols)
        equals, newline = (torch.full((size, 1), ord(symbol)) for symbol in "=\n")
        tokens, answers = _joined([problem, equals], [answer, newline], length + 1)
        return Rows(tokens, answers[:, 1:].float(), answers[:, 1:])


@dataclass(frozen=True)
class Passkeys:
    """The passkey of `longitude.eval.tasks.passkey`, then a full stop. Windows are always full; the
    loss is that of all text, the key's digits weighted 10. In training the key's depth varies; in a
    test the depths of a batch are evenly spread."""

    name: str = "passkey"
    paper: str = "Mohtashami & Jaggi 2023, arXiv:2305.16300"
    form: Form | None = None  # by default, the one that fits the length

    def rows(self, rng: torch.Generator, size: int, length: int, vary: bool) -> Rows:
        """Generate `size` windows of `length` + 1 tokens."""
        python_rng = random.Random(int(torch.randint(2**62, (), generator=rng)))
        depths = [None if vary else (n + python_rng.random()) / size for n in range(size)]
        questions = [passkey(length, rng=python_rng, depth=d, form=self.form) for d in depths]
        text = bytearray("".join(f"{q.prompt}{q.answer}." for q in questions).encode())
        tokens = torch.frombuffer(text, dtype=torch.uint8).view(size, length + 1).long()
        digits = torch.tensor([len(str(q.key)) for q in questions])[:, None]
        remaining = torch.arange(length).flip(0)  # 0 at the full stop
        is_digit = (remaining > 0) & (remaining <= digits)
        return Rows(tokens, 1 + (KEY_WEIGHT - 1) * is_digit.float(), is_digit | (remaining == 0))


Task = Line | Passkeys


def task(name: str, window: int) -> Task:
    """Return the task of a name, for a model trained on windows of this length: a passkey has the
    form that fits the trained window, whatever the test length."""
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.5)
        use = near[0] if near else f"one of {', '.join(TASKS)}"
        raise UserError(f"no task is called {shown(name)}: use {use}.")
    known = TASKS[name]
    return replace(known, form=form_for(window)) if isinstance(known, Passkeys) else known


def accuracy(predicted: Int64[Tensor, "size length"], rows: Rows) -> float:
    """Return the share of rows whose answer is right in every byte. Predictions are teacher-forced,
    so all are right exactly if greedy decoding would produce the answer."""
    right = predicted.to(rows.tokens.device) == rows.tokens[:, 1:]
    return (right | ~rows.answer).all(1).double().mean().item()


def copied(rng: torch.Generator, n: Counts, most: int) -> tuple[Bytes, Bytes]:
    """`qwe=qwe`: the letters repeated. The paper's "duplicate string", with 26 letters instead of
    two, so that a decoder can find its place by the surrounding letters."""
    letters = _drawn(ascii_lowercase, rng, n, most)
    return letters, letters


def reversed_(rng: torch.Generator, n: Counts, most: int) -> tuple[Bytes, Bytes]:
    """`qwe=ewq`: letters backwards; the paper's "reverse string", with 26 letters, not two."""
    letters = _drawn(ascii_lowercase, rng, n, most)
    return letters, letters.flip(1)


def sorted_(rng: torch.Generator, n: Counts, most: int) -> tuple[Bytes, Bytes]:
    """`cabeb=abbce`: letters in order; the paper's "bucket sort", with its five letters."""
    letters = _drawn("abcde", rng, n, most)
    return letters, letters.sort(1).values


def parity(rng: torch.Generator, n: Counts, most: int) -> tuple[Bytes, Bytes]:
    """`abbaa=y`: whether the number of b's is even, y or n; the paper's "parity check"."""
    letters = _drawn("ab", rng, n, most)
    remainder = (letters == ord("b")).sum(1, keepdim=True) % 2
    return letters, _symbols("yn")[remainder]


def arithmetic(rng: torch.Generator, n: Counts, most: int) -> tuple[Bytes, Bytes]:
    """`1+2*3-4=3`: digits from 0 to 4 joined by +, - and *, evaluated modulo 5 with the usual
    precedence; the paper's "modular arithmetic" without brackets."""
    digits, operators = _drawn("01234", rng, n, most), _drawn("+-*", rng, n, most)
    operators[:, 0] = 0
    # the number of + and - so far is the index of a digit's term; a product becomes a sum of
    # logarithms, which is computed for all terms at once
    signs = (operators == ord("+")) | (operators == ord("-"))
    term = signs.cumsum(1)
    number = (digits - ord("0")).clamp(min=0)
    zeros = torch.zeros_like(number)
    exponent = zeros.scatter_add(1, term, LOGS[number])
    # past a row's end there are no digits: its columns count as 0, its terms are not `present`
    vanish = zeros.scatter_add(1, term, ((number == 0) & (digits > 0)).long()) > 0
    sign = torch.ones_like(number).scatter_add(1, term, -2 * (operators == ord("-")).long())
    present = zeros.scatter_add(1, term, (digits > 0).long()) > 0
    value = torch.where(present & ~vanish, sign * POWERS[exponent % 4], 0).sum(1) % MODULUS
    return torch.stack([operators, digits], -1).flatten(1), _symbols("01234")[value][:, None]


def recall(rng: torch.Generator, n: Counts, most: int) -> tuple[Bytes, Bytes]:
    """`qf3zk8bm3?zk=8`: pairs of a key (two letters) and a value (a digit), then one of the keys:
    which value belongs to it? Ba et al.'s associative retrieval. No other pair has the queried key,
    so there is one answer; the others may repeat, which lets a problem have any length."""
    keys = torch.randint(26 * 26, (len(n), most), generator=rng)
    queried = (torch.rand(len(n), 1, generator=rng, dtype=torch.float64) * n[:, None]).long()
    key = keys.gather(1, queried)
    other = torch.arange(most) != queried
    keys = torch.where(other & (keys == key), (keys + 1) % 26**2, keys)
    values = _drawn("0123456789", rng, n, most)
    pairs = torch.cat([_two_letters(keys), values[..., None]], -1) * (values > 0)[..., None]
    mark = torch.full((len(n), 1), ord("?"))
    problem = torch.cat([pairs.flatten(1), mark, _two_letters(key).flatten(1)], 1)
    return problem, values.gather(1, queried)


_RUOSS = "Ruoss et al. 2023, arXiv:2305.16843"
TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        Passkeys(),
        Line("recall", "Ba et al. 2016, arXiv:1610.06258", 3, 6, recall),
        Line("copy", _RUOSS, 2, 2, copied),
        Line("reverse", _RUOSS, 2, 2, reversed_),
        Line("sort", _RUOSS, 2, 2, sorted_),
        Line("arithmetic", _RUOSS, 2, 2, arithmetic),
        Line("parity", _RUOSS, 1, 3, parity),
    )
}


def _joined(
    before: list[Tensor], after: list[Tensor], length: int
) -> tuple[Int64[Tensor, "size {length}"], Bool[Tensor, "size {length}"]]:
    """Remove the gaps of rows and pad them with NUL; also return which tokens are from `after`. In
    numpy, whose single thread is done before torch's threads have woken up."""
    tokens = torch.cat([*before, *after], 1).numpy()
    present = tokens > 0
    tail = present[:, -sum(piece.shape[1] for piece in after) :].sum(1, keepdims=True)
    count = present.sum(1, keepdims=True)
    column = np.arange(length)
    packed = np.zeros((len(tokens), length), np.int64)
    packed[column < count] = tokens[present]
    return torch.from_numpy(packed), torch.from_numpy((column < count) & (column >= count - tail))


def _drawn(symbols: str, rng: torch.Generator, n: Counts, most: int) -> Bytes:
    """Draw n of these symbols per row, uniformly, followed by NUL."""
    drawn = _symbols(symbols)[torch.randint(len(symbols), (len(n), most), generator=rng)]
    return drawn * (torch.arange(most) < n[:, None])


def _two_letters(keys: Int64[Tensor, "size some"]) -> Int64[Tensor, "size some 2"]:
    return torch.stack([keys // 26, keys % 26], -1) + ord("a")


def _symbols(symbols: str) -> Int64[Tensor, " count"]:
    return torch.tensor(list(symbols.encode()))
