"""`longitude export`: a scheme in the words of the runtime that is to serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longitude.cli import options as o

if TYPE_CHECKING:
    from longitude.runtimes.checkpoint import Opened
    from longitude.runtimes.export import Export, Wish
    from longitude.runtimes.prior_run import Advised
    from longitude.runtimes.verify import Verified

PRINTED = ("vllm", "sglang", "llama.cpp", "tensorrt-llm", "axolotl", "torchtitan")

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN",
        help="A name on the Hub, a folder, a .gguf file, tiny-rope; what `longitude tune` made, an "
        "adapter too, has its scheme with it; or a folder that `longitude extend` wrote: each "
        "runtime then gets the best scheme that it can serve.",
    ),
]
SchemeText = Annotated[
    str | None,
    typer.Option("--scheme", help='As in "rope(frequencies=yarn(4, original=8192))".'),
]
For = Annotated[
    str,
    typer.Option(
        "--for",
        help="transformers, vllm, sglang, llama.cpp, gguf, ollama, mlx, exllama, tensorrt-llm, "
        "axolotl, torchtitan, several of them joined by commas, or all.",
    ),
]
Version = Annotated[
    str | None, typer.Option(help="Of the runtime. [default: the newest that is known]")
]
To = Annotated[
    str | None,
    typer.Option(help="Tokens to serve: 32768, 32k, 4x. [default: what the scheme's factor says]"),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder to write. [default: NAME-TARGET where there are files to write; commands of "
        "one runtime are printed alone]"
    ),
]
Weights = Annotated[str, typer.Option(help="In folders: link, copy or none.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Run the new GGUF file in llama.cpp beside Hugging Face.")
]
Of = Annotated[
    str | None, typer.Option("--model", help="Where the model of a run is, if it was moved.")
]


def export(
    source: Source,
    scheme: SchemeText = None,
    runtime: For = "transformers",
    version: Version = None,
    to: To = None,
    out: Out = None,
    weights: Weights = "link",
    verify: Verify = False,
    model: Of = None,
    revision: o.Revision = None,
    as_json: o.Json = False,
) -> None:
    """Write a scheme as the runtime's own settings, after a look at what it will make of them.

    For transformers a folder with a config.json that versions 4 and 5 read alike, raised lengths
    and a model card; for the others the command or file of the version named. A scheme that a
    runtime can't serve is refused, with the nearest that it can. The model itself is not changed.
    """
    from longitude.core.validate import UserError
    from longitude.runtimes.checkpoint import opened
    from longitude.runtimes.export import names
    from longitude.runtimes.prior_run import advised, is_run

    advice = advised(source) if is_run(source) else None
    runtimes = names(runtime)
    if version is not None and len(runtimes) > 1:
        raise UserError(f"--version is of one runtime, but --for has {len(runtimes)}: give one.")
    place = opened(model or (advice.name if advice else source), revision)
    scheme = scheme or (None if advice else place.saved.get("scheme"))
    if scheme is None and advice is None:
        raise UserError(
            f"{source} is no run of `longitude extend` that would advise a scheme, nor was it "
            f"saved with one: add --scheme, as in --scheme "
            f'"rope(frequencies=yarn(4, original=8192))".'
        )
    if verify and (place.source.gguf is None or not {"gguf", "ollama"} & set(runtimes)):
        raise UserError("--verify runs a new GGUF file in llama.cpp: give a .gguf and --for gguf.")
    wishes = _wishes(runtimes, scheme, version, advice)
    done, target = _exported(place, wishes, to, advice)
    folder = out or _default(place, runtimes, target)
    _finish(place, done, folder, target, weights, advice, verify, as_json)


def _wishes(
    runtimes: Sequence[str], scheme: str | None, version: str | None, advice: Advised | None
) -> list[tuple[Wish, str | None]]:
    """What to ask for each runtime, and why nothing where a run advises nothing."""
    from longitude.core.validate import UserError
    from longitude.runtimes.export import Wish

    found: list[tuple[Wish, str | None]] = []
    for name in runtimes:
        try:
            text = scheme or (advice.scheme(name) if advice else "")
            found.append((Wish(name, text, version), None))
        except UserError as mistake:
            found.append((Wish(name, "", version), str(mistake)))
    return found


def _exported(
    place: Opened,
    wishes: Sequence[tuple[Wish, str | None]],
    to: str | None,
    advice: Advised | None,
) -> tuple[list[Export], int]:
    """Every wish spelt or refused, and the length it is for; raises where nothing was spelt."""
    from longitude.core.validate import UserError
    from longitude.runtimes.export import Export, exports

    asked = [wish for wish, refused in wishes if refused is None]
    target = _target(place, asked, to, advice)
    spelt = iter(exports(place, asked, target))
    done = [
        next(spelt) if refused is None else Export(wish, "", None, refused=refused)
        for wish, refused in wishes
    ]
    if advice is not None:
        done = [_with_cost(one, advice) for one in done]
    if not any(one.spelling for one in done):
        raise UserError(" ".join(dict.fromkeys(str(one.refused) for one in done)))
    return done, target


def _target(place: Opened, asked: Sequence[Wish], to: str | None, advice: Advised | None) -> int:
    from longitude.core.validate import UserError
    from longitude.extension.plan import target_length
    from longitude.runtimes.export import reach

    if to is not None:
        if place.trained is None and to.strip().lower().endswith("x"):
            raise UserError(
                f"{place.source.name} does not say how long its inputs may be, so that --to {to} "
                f"means nothing: give a number of tokens."
            )
        return max(1, target_length(to, place.trained or 1))
    if advice is not None:
        return advice.target
    if asked[0].scheme == place.saved.get("scheme") and place.saved.get("target"):
        return place.saved["target"]
    return reach(place, place.asked(asked[0].scheme).scheme)


def _with_cost(one: Export, advice: Advised) -> Export:
    """What a runtime's scheme costs against the best of all, among its notes."""
    cost = advice.cost(one.wish.runtime)
    if cost is None:
        return one
    advised = advice.scheme(one.wish.runtime) == one.wish.scheme
    if one.spelling is None and not advised:
        instead = f"of those measured it can serve {advice.scheme(one.wish.runtime)}, and {cost}"
        return replace(one, refused=f"{str(one.refused).rstrip('.')}; {instead}.")
    if one.spelling is None or not advised:
        return one
    notes = (*one.spelling.notes, f"{one.scheme}: {cost}.")
    return replace(one, spelling=replace(one.spelling, notes=notes))


def _default(place: Opened, runtimes: Sequence[str], target: int) -> Path | None:
    from longitude.runtimes.files import slug

    alone = len(runtimes) == 1 and runtimes[0] in PRINTED
    return None if alone else Path(f"{slug(place.source.name)}-{target}")


def _finish(
    place: Opened,
    done: list[Export],
    folder: Path | None,
    target: int,
    weights: str,
    advice: Advised | None,
    verify: bool,
    as_json: bool,
) -> None:
    from longitude.cli.output import print_json, say
    from longitude.runtimes.files import located, write, write_card

    if folder is not None:
        done = located(place, done, folder, target)
    made = [] if folder is None else write(place, done, folder, target, weights, advice)
    proofs = _verified(place, done, made) if verify else []
    if folder is not None and made != [folder]:
        made.append(write_card(place, done, folder, target, advice, [*map(str, proofs)]))
    if as_json:
        print_json({**_plain(done, made, target), "verified": [str(proof) for proof in proofs]})
    _fail_unless_all_hold(proofs)
    if as_json:
        return
    for one in done:
        _show(one, alone=len(done) == 1)
    notes = dict.fromkeys(note for one in done if one.spelling for note in one.spelling.notes)
    for line in (*notes, *(f"wrote {path}" for path in made), *map(str, proofs)):
        say(line)


def _show(one: Export, alone: bool) -> None:
    from longitude.cli.output import say
    from longitude.runtimes.settings import called

    if one.spelling is None:
        say(f"{called(one.wish.runtime)}: {one.refused}")
        return
    if not alone:
        print(f"# {called(one.spelling.runtime, one.spelling.version)}")
    print(one.spelling.text, end="" if alone else "\n")


def _plain(done: Sequence[Export], made: Sequence[Path], target: int) -> dict[str, Any]:
    return {
        "target": target,
        "exports": [
            {
                "runtime": one.wish.runtime,
                "version": one.spelling.version if one.spelling else one.wish.version,
                "scheme": one.scheme,
                "text": one.spelling.text if one.spelling else None,
                "notes": list(one.spelling.notes) if one.spelling else [],
                "refused": one.refused,
            }
            for one in done
        ],
        "wrote": [str(path) for path in made],
    }


def _verified(place: Opened, done: Sequence[Export], made: Sequence[Path]) -> list[Verified]:
    """What llama.cpp itself makes of the new file."""
    from longitude.runtimes.verify import verify

    before, files = place.source.gguf, [path for path in made if path.suffix == ".gguf"]
    one = next((e for e in done if e.wish.runtime in ("gguf", "ollama") and e.wanted), None)
    if before is None or one is None or one.wanted is None:
        return []  # it was refused, and that was said
    return [verify(before, file, one.wish.scheme, one.wanted) for file in files]


def _fail_unless_all_hold(proofs: Sequence[Verified]) -> None:
    from longitude.cli.output import say

    if all(proof.holds for proof in proofs):
        return
    for proof in proofs:
        say(str(proof))
    raise typer.Exit(1)
