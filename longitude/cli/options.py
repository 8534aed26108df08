"""The options that training commands share, each with its help."""

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
Json = Annotated[bool, typer.Option("--json", help="Print data.")]
