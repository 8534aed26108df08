"""The options that commands share, each with its help: of training, then of a model."""

from typing import Annotated

from typer import Argument, Option

from longitude.core.validate import UserError

Text = Annotated[
    list[str] | None,
    Option(
        "--text",
        help="A file, a folder or a `datasets` name (owner/name:config:split); as often as you "
        "like. Without: the sources of the standard library and the help topics of this Python.",
    ),
]
Length = Annotated[int, Option(help="Tokens (bytes) in a training window.")]
Size = Annotated[str, Option(help="nano, tiny, small or 125m.")]
Steps = Annotated[int | None, Option(help="As suits the size if not given.")]
Batch = Annotated[int | None, Option(help="Sequences a step, over all processes.")]
Rate = Annotated[float | None, Option(help="The highest learning rate.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.")]
ModelDevice = Annotated[str, Option("--device", help="auto, cpu, cuda or mps.")]
DType = Annotated[str, Option(help="auto (bfloat16 on CUDA), float32 or bfloat16.")]
Every = Annotated[float, Option(help="Seconds between two checkpoints.")]
Deterministic = Annotated[
    bool, Option("--deterministic", help="Bit for bit on CUDA too, at a price.")
]
Compile = Annotated[
    bool | None, Option("--compile/--no-compile", help="torch.compile; by default on CUDA.")
]
Model = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A name on the Hub, a folder, a .gguf file, or tiny-rope, tiny-alibi or tiny-learned.",
    ),
]
ModelDType = Annotated[
    str,
    Option(
        "--dtype",
        help="auto (the file's own on CUDA; on a CPU float32, or the file's bfloat16 where that is "
        "faster), float32, bfloat16, float16 or float64.",
    ),
]
Revision = Annotated[str | None, Option(help="A branch, tag or commit on the Hub.")]
Trust = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Json = Annotated[bool, Option("--json", help="Print data.")]
Quiet = Annotated[bool, Option("--quiet", help="Print nothing but the result.")]
SamplingSeed = Annotated[int | None, Option("--seed", help="Of the sampling.")]


def names(text: str) -> tuple[str, ...]:
    """Names joined by commas; none of them where the text is none."""
    items = (item.strip() for item in text.split(","))
    return () if text.strip() == "none" else tuple(item for item in items if item)


def integers(option: str, text: str | None) -> tuple[int, ...]:
    """Integers, each once, in rising order."""
    try:
        return tuple(sorted({int(item) for item in text.split(",")})) if text else ()
    except ValueError:
        example = f"--{option} takes whole numbers, but got {text!r}: write 512,2048."
        raise UserError(example) from None
