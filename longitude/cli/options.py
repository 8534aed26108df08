"""The options that commands share, each with its help: of training, then of a model."""

from typing import Annotated

import typer

Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A file, a folder or a `datasets` name (owner/name:config:split); as often as you "
        "like. Without: the sources of the standard library and the help topics of this Python.",
    ),
]
Length = Annotated[int, typer.Option(help="Tokens (bytes) in a training window.")]
Size = Annotated[str, typer.Option(help="nano, tiny, small or 125m.")]
Block = Annotated[
    str, typer.Option(help="llama (RMSNorm, SwiGLU) or gpt (LayerNorm, GELU, biases).")
]
Steps = Annotated[int | None, typer.Option(help="As suits the size if not given.")]
Batch = Annotated[int | None, typer.Option(help="Sequences a step, over all processes.")]
Rate = Annotated[float | None, typer.Option(help="The highest learning rate.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DType = Annotated[str, typer.Option(help="auto (bfloat16 on CUDA), float32 or bfloat16.")]
Every = Annotated[float, typer.Option(help="Seconds between two checkpoints.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bit for bit on CUDA too, at a price.")
]
Compile = Annotated[
    bool | None, typer.Option("--compile/--no-compile", help="torch.compile; by default on CUDA.")
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name on the Hub, a folder, a .gguf file, or tiny-rope, tiny-alibi or tiny-learned.",
    ),
]
ModelDType = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="auto (the file's own on CUDA; on a CPU float32, or the file's bfloat16 where that is "
        "faster), float32, bfloat16, float16 or float64.",
    ),
]
Revision = Annotated[str | None, typer.Option(help="A branch, tag or commit on the Hub.")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
Json = Annotated[bool, typer.Option("--json", help="Print data.")]
