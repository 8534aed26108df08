"""The lab's tasks: each row read back as text and solved by other means."""

import ast
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from longitude import UserError
from longitude.training.distributed import generator
from longitude.training.lab.tasks import TASKS, Rows, Task, accuracy, task

LINES = [name for name in TASKS if name != "passkey"]


def texts(rows: Rows) -> list[str]:
    return [bytes(row.tolist()).decode() for row in rows.tokens]


def answers(rows: Rows) -> list[str]:
    pairs = zip(rows.tokens[:, 1:], rows.answer, strict=True)
    return [bytes(row[said].tolist()).decode() for row, said in pairs]


def precedence(problem: str) -> str:
    """By Python's own grammar; its % keeps the sign of the modulus, as is meant here."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Mult):
            return left * right
        return left + right if isinstance(node.op, ast.Add) else left - right

    return str(value(ast.parse(problem, mode="eval").body) % 5)


def evenness(problem: str) -> str:
    even = True
    for letter in problem:
        even = even != (letter == "b")
    return "y" if even else "n"


def looked_up(problem: str) -> str:
    pairs, key = problem.split("?")
    values = [v for k, v in re.findall(r"([a-z]{2})([0-9])", pairs) if k == key]
    assert len(values) == 1, "one answer"
    return values[0]


SOLVED: dict[str, tuple[str, Callable[[str], str]]] = {
    "recall": (r"([a-z]{2}[0-9])+\?[a-z]{2}", looked_up),
    "copy": (r"[a-z]+", str),
    "reverse": (r"[a-z]+", lambda s: s[::-1]),
    "sort": (r"[a-e]+", lambda s: "".join(sorted(s))),
    "arithmetic": (r"[0-4]([-+*][0-4])*", precedence),
    "parity": (r"[ab]+", evenness),
}


def symbols(name: str, problem: str) -> int:
    """How large a problem is."""
    counted = {"recall": len(problem) // 3 - 1, "arithmetic": (len(problem) + 1) // 2}
    return counted.get(name, len(problem))


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("vary", [True, False])
@pytest.mark.parametrize("length", [9, 40, 41, 42, 130])
def test_every_row_is_a_problem_and_its_answer(name: str, vary: bool, length: int) -> None:
    pattern, solve = SOLVED[name]
    rows = TASKS[name].rows(generator(1, length), 40, length, vary)
    assert rows.tokens.shape == (40, length + 1)
    assert rows.weights.shape == rows.answer.shape == (40, length)
    for text, answer in zip(texts(rows), answers(rows), strict=True):
        line = text.rstrip("\0")
        problem, solved = line.removesuffix("\n").split("=")
        assert re.fullmatch(pattern, problem)
        assert solved == solve(problem)
        assert answer == f"{solved}\n", "the newline ends the answer"
        assert text.index(line) == 0 and "\0" not in line, "padded on the right"
    assert torch.equal(rows.weights, rows.answer.float())


@pytest.mark.parametrize("name", LINES)
def test_tests_take_the_largest_that_fits_and_training_all_sizes(name: str) -> None:
    def sizes(vary: bool, length: int = 30) -> Counter[int]:
        rows = TASKS[name].rows(generator(0), 3000, length, vary)
        return Counter(symbols(name, text.split("=")[0]) for text in texts(rows))

    (largest,) = sizes(vary=False)
    line = texts(TASKS[name].rows(generator(0), 1, 30, False))[0].rstrip("\0")
    more = {"recall": 3, "parity": 1}.get(name, 2)
    assert len(line) <= 31 < len(line) + more, "one more would not fit"
    drawn = sizes(vary=True)
    assert sorted(drawn) == [*range(1, largest + 1)]
    assert min(drawn.values()) > 0.6 * 3000 / largest, "each as likely"


@pytest.mark.parametrize(
    ("name", "least"),
    [("copy", 3), ("reverse", 3), ("sort", 3), ("parity", 3), ("arithmetic", 3), ("recall", 8)],
)
def test_the_least_length(name: str, least: int) -> None:
    line = texts(TASKS[name].rows(generator(0), 1, least, True))[0]
    assert line.endswith("\n") and len(line) == least + 1
    with pytest.raises(UserError, match=f"{name} takes at least {least} tokens.* {least - 1}: "):
        TASKS[name].rows(generator(0), 1, least - 1, False)


@pytest.mark.parametrize("name", ["parity", "arithmetic", "recall"])
def test_short_answers_can_not_be_guessed(name: str) -> None:
    said = Counter(answers(TASKS[name].rows(generator(3), 4000, 60, True)))
    expected = {"parity": 2, "arithmetic": 5, "recall": 10}[name]
    assert len(said) == expected
    # products make 0 likelier than the rest; the paper draws them so too
    assert max(said.values()) < 4000 * (0.55 if name == "parity" else 1.7 / expected)


def test_recall_asks_for_every_place() -> None:
    rows = TASKS["recall"].rows(generator(3), 2000, 35, False)
    asked = Counter()
    for text in texts(rows):
        pairs, rest = text.split("?")
        asked[pairs.index(rest[:2]) // 3 if pairs.index(rest[:2]) % 3 == 0 else -1] += 1
    assert sorted(asked) == [*range(10)] and min(asked.values()) > 140


@pytest.mark.parametrize("vary", [True, False])
@pytest.mark.parametrize("length", [128, 256, 1023, 1024])
def test_passkeys_fill_the_window_and_end_with_a_full_stop(length: int, vary: bool) -> None:
    rows = task("passkey", length).rows(generator(2), 20, length, vary)
    assert rows.tokens.shape == (20, length + 1)
    for text, answer in zip(texts(rows), answers(rows), strict=True):
        key = re.search(r"The pass key is (\d+)\. Remember it\. \1 is the pass key\.", text)
        assert key and text.endswith(f"What is the pass key? The pass key is {key[1]}.")
        assert answer == f"{key[1]}."
        assert text.startswith("There is an important info") == (length >= 1024)
    key_bytes = rows.answer & (rows.tokens[:, 1:] != ord("."))
    assert torch.equal(rows.weights, torch.where(key_bytes, 10.0, 1.0))


def test_passkey_depths_are_drawn_to_train_and_even_in_a_test() -> None:
    def places(vary: bool) -> list[float]:
        rows = task("passkey", 512).rows(generator(0), 50, 512, vary)
        found = [text.index("The pass key") / (512 - 104) for text in texts(rows)]
        return found

    assert all(abs(at - (n + 0.5) / 50) < 0.03 for n, at in enumerate(places(False)))
    drawn = places(True)
    assert drawn != sorted(drawn) and min(drawn) < 0.2 and max(drawn) > 0.8


def test_the_form_is_that_of_the_trained_window_at_every_test_length() -> None:
    short, long = (task("passkey", window) for window in (256, 2048))
    for length in (512, 2048):
        starts = [texts(t.rows(generator(0), 1, length, False))[0][:24] for t in (short, long)]
        assert starts[0] != starts[1] == "There is an important in"


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("vary", [True, False])
def test_rows_are_a_function_of_the_generator(name: str, vary: bool) -> None:
    def made(seed: int, step: int) -> torch.Tensor:
        return task(name, 200).rows(generator(seed, step, name), 6, 200, vary).tokens

    one = made(1, 2)
    torch.manual_seed(5)
    assert torch.equal(one, made(1, 2))
    assert not torch.equal(one, made(1, 3)) and not torch.equal(one, made(2, 2))
    assert len({tuple(row) for row in one.tolist()}) == 6


@pytest.mark.parametrize("name", TASKS)
def test_accuracy_counts_rows_whose_whole_answer_is_right(name: str) -> None:
    rows = task(name, 200).rows(generator(0), 8, 200, True)
    predicted = rows.tokens[:, 1:].clone()
    assert accuracy(predicted, rows) == 1
    predicted[~rows.answer] = 7
    assert accuracy(predicted, rows) == 1, "what is not the answer does not count"
    first, last = (rows.answer[n].nonzero().flatten().tolist() for n in (0, 5))
    predicted[0, first[0]] += 1
    assert accuracy(predicted, rows) == 7 / 8
    predicted[5, last[-1]] += 1
    assert accuracy(predicted, rows) == 6 / 8, "nor does an answer without its end"


def test_tasks_are_known_by_name_and_paper() -> None:
    assert [*TASKS] == ["passkey", "recall", "copy", "reverse", "sort", "arithmetic", "parity"]
    for name, known in TASKS.items():
        assert known.name == name and "arXiv:" in known.paper
        found: Task = task(name, 512)
        assert found.name == name


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("paskey", "no task is called 'paskey': use passkey."),
        ("reversed", "no task is called 'reversed': use reverse."),
        ("text", "no task is called 'text': use one of passkey, recall, copy, .*, parity."),
    ],
)
def test_an_unknown_task_is_told_with_the_nearest(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        task(name, 256)
