"""What becomes of an adapter's positions in a runtime that is given its base and the adapter.

peft has no place for a rotation, so a runtime turns by the base's own. What the adapter was trained
under stands in longitude.json beside it; where that is missing, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longitude.core.scheme import Scheme
from longitude.core.validate import UserError, short
from longitude.hf.faults import Fault
from longitude.hf.peft import ADAPTER_JSON, LONGITUDE_JSON
from longitude.hf.source import Source, find
from longitude.runtimes.checkpoint import opened
from longitude.runtimes.target import wanted

MISSING = (
    f"beside {ADAPTER_JSON} lies no {LONGITUDE_JSON}, and peft stores no rotation: on its base as "
    "it is the adapter may turn by other angles than it was trained with; save it by longitude.hf.save_adapter."
)


def beside(source: Source) -> dict[str, Any]:
    """What an adapter adds to its base's settings; nothing where there is no adapter."""
    if source.adapter is None:
        return {}
    return {
        ADAPTER_JSON: {"base": source.adapter.base, "target": source.adapter.held.get("target")}
    }


def trained_for(settings: Mapping[str, Any]) -> int | None:
    """The length that an adapter says it was trained for."""
    return (settings.get(ADAPTER_JSON) or {}).get("target")


def intended(name: str, revision: str | None) -> tuple[Scheme | None, tuple[Fault, ...]]:
    """The scheme that an adapter was trained under, or what is wrong: nothing of another model."""
    source = find(name, revision)
    if source.adapter is None:
        return None, ()
    if not source.adapter.held:
        return None, (Fault("adapter without its rotation", MISSING, True),)
    if source.adapter.entry is None:
        return None, ()
    text, place = source.adapter.entry["scheme"], opened(name, revision)
    try:
        scheme = place.asked(text).scheme
        if not isinstance(scheme, Scheme):
            raise UserError("its layers differ")
        wanted(scheme, place.model.config, trained_for(beside(source)) or place.trained or 1)
    except UserError as mistake:
        why = str(mistake).rstrip(".")
        told = f"it was trained under {short(text)}, which settings can't say ({why}): open it "
        return None, (Fault("scheme beyond settings", f"{told}by longitude.hf.loading.", True),)
    return scheme, ()
