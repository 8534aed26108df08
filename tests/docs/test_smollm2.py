"""The page of SmolLM2 has a section of each text, from rows of its own."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from longitude.core.store import Store
from tests.viz import rows

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "smollm2.py"


@pytest.fixture(scope="module")
def smollm2() -> Any:
    spec = spec_from_file_location("smollm2_page", SCRIPT)
    assert spec is not None and spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_text_has_a_section_with_the_advice_for_every_goal(
    smollm2: Any, tmp_path: Path
) -> None:
    page = tmp_path / "smollm2.md"
    page.write_text("# A page\n\n<!-- rows -->\nold tables\n<!-- /rows -->\n\nThe end.\n")
    for text in ("prose", "code"):
        with Store(":memory:") as store:
            for one in rows.FOUND:
                store.put(one.key.to_json(), dict(one.value))
            store.export(tmp_path / f"smollm2-{text}.jsonl")
    with pytest.raises(SystemExit, match="not those of its rows"):
        smollm2.main(["--check"], page)
    smollm2.main([], page)
    smollm2.main(["--check"], page)
    written = page.read_text(encoding="utf-8")
    heads = [line for line in written.splitlines() if line.startswith("## ")]
    assert len(heads) == 2 and "(prose) at 2,048" in heads[0] and "(code) at 2,048" in heads[1]
    assert "old tables" not in written and written.endswith("<!-- /rows -->\n\nThe end.\n")
    assert written.count("- **context**: Use leaky") == written.count("- **short**: Use ") == 2
    charts = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.png")}
    drawn = {f"smollm2/{t}/{c}.png" for t in ("prose", "code") for c in ("kept_context", "answers")}
    assert charts == drawn and all(f"]({chart})" in written for chart in drawn)
