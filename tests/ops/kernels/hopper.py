"""Kernels compiled for a Hopper GPU on a machine that has none, and what came of it.

    python -m tests.ops.kernels.hopper < specs.json

It runs in a process of its own: here, in the tests' process, kernels belong to the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Spec:
    """A kernel `module:name`, the types of its arguments, and which of them 16 divides.

    A type is "*bf16", "i32", …, or a tuple of such; constants are all other arguments. `aligned`
    are paths: (2,) for argument 2, (0, 1) for the second of the tuple that argument 0 is.
    """

    kernel: str
    types: dict[str, Any]
    constants: dict[str, Any]
    aligned: tuple[tuple[int, ...], ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


_specs: list[Spec] = []  # what tests will ask for: all of it is compiled in one process
_results: dict[str, dict[str, Any]] = {}


def together(specs: list[Spec]) -> list[Spec]:
    """Announce specs when a test file is imported, so that one process compiles those of all."""
    _specs.extend(specs)
    return specs


def compiled(specs: list[Spec]) -> list[dict[str, Any]]:
    """For each its PTX, and the bytes of shared memory it needs (a block has 227 KiB at most)."""
    keys = [json.dumps(asdict(spec)) for spec in specs]
    if not all(key in _results for key in keys):
        wanted = {*keys, *(json.dumps(asdict(spec)) for spec in _specs)} - {*_results}
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        ran = subprocess.run(
            [sys.executable, "-m", "tests.ops.kernels.hopper"],
            input=f"[{', '.join(wanted)}]",
            capture_output=True, text=True, env=env, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        _results.update(zip(wanted, json.loads(ran.stdout), strict=True))
    return [_results[key] for key in keys]


def main() -> None:
    json.dump([_compile(Spec(**spec)) for spec in json.load(sys.stdin)], sys.stdout)


def _compile(spec: Spec) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = spec.kernel.split(":")
    kernel = getattr(import_module(module), name)
    source_of = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_of
    source = source_of(
        fn=kernel,
        signature={n: _tuples(t) for n, t in spec.types.items()}
        | dict.fromkeys(spec.constants, "constexpr"),
        constexprs={(kernel.arg_names.index(n),): value for n, value in spec.constants.items()},
        attrs={_tuples(path): [["tt.divisibility", 16]] for path in spec.aligned},
    )
    options = {"enable_fp_fusion": True, **spec.options}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"ptx": made.asm["ptx"], "shared": made.metadata.shared}


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list | tuple) else x


if __name__ == "__main__":
    main()
