"""The text of files: what each format gives, and one sentence for what gives none."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longitude.core.validate import UserError
from longitude.reading.documents import Document, document, documents, pieces

PAGE = """<!DOCTYPE html>
<html><head><title>The log</title><style>p { color: red }</style>
<script>document.write("<p>never</p>")</script></head>
<body><h1>Noon &amp;  after</h1><p>The   key
is <b>47</b>11.</p><ul><li>one<li>two</ul><table><tr><td>a<td>b</tr></table>
<pre>  kept
    so</pre><svg><text>drawn</text></svg></body></html>"""
SEEN = """The log

Noon & after

The key is 4711.

one
two

\ta\tb

  kept
    so
"""


def pdf(texts: Sequence[str]) -> bytes:
    """A PDF of a page for each text, written by the format's own rules."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(texts)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(texts)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, text in enumerate(texts):
        drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * n} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    made, places = b"%PDF-1.4\n", []
    for n, body in enumerate(objects, 1):
        places.append(len(made))
        made += f"{n} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{at:010} 00000 n \n" for at in places)
    made_of = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(made)}\n%%EOF\n"
    return made + (made_of + end).encode()


def written(folder: Path, data: bytes, name: str = "file.txt") -> str:
    path = folder / name
    path.write_bytes(data)
    return str(path)


def refused(folder: Path, data: bytes, name: str = "file.txt") -> str:
    with pytest.raises(UserError) as told:
        document(written(folder, data, name))
    sentence = str(told.value)
    assert sentence.endswith(".") and "\n" not in sentence and sentence.isprintable()
    return sentence


@pytest.mark.parametrize("name", ["log.txt", "log.md", "log", "log.py"])
def test_a_text_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    text = "# Noon\n\n* über 漢字 𝄞\n\tx < y & z\n"
    assert document(written(tmp_path, text.encode(), name)).text == text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_a_mark_says_how_it_is_written(tmp_path: Path, encoding: str) -> None:
    text = "Mittag über 漢字 𝄞\n"
    mark = {"utf-16-be": codecs.BOM_UTF16_BE, "utf-16-le": codecs.BOM_UTF16_LE}.get(encoding, b"")
    assert document(written(tmp_path, mark + text.encode(encoding))).text == text


def test_lines_end_as_lines_do(tmp_path: Path) -> None:
    assert document(written(tmp_path, b"one\r\ntwo\r\n")).text == "one\ntwo\n"


def test_a_page_is_what_a_reader_sees_of_it(tmp_path: Path) -> None:
    assert document(written(tmp_path, PAGE.encode(), "log.html")).text == SEEN
    assert document(written(tmp_path, PAGE.encode(), "log")).text == SEEN  # it says what it is
    latin = '<html><meta charset="iso-8859-1"><p>Länge</p></html>'
    assert document(written(tmp_path, latin.encode("latin-1"), "l.htm")).text == "Länge\n"
    about = "Write `<html>` first.\n"
    assert document(written(tmp_path, about.encode(), "about.md")).text == about


@pytest.mark.parametrize(
    "torn", ["<!--", "<![CDATA[", "<?", "<a b='", "<script>", "</", "<", "<a "]
)
def test_a_page_that_never_ends_is_read_once(torn: str) -> None:
    page = f"<html><p>Seen.</p>{torn * 200_000}"  # each would be looked for to the end of the page
    assert document("-", io.BytesIO(page.encode())).text.startswith("Seen.\n")


def test_remarks_and_scripts_are_not_seen() -> None:
    page = (
        '<html>a<!-- <p>x</p> -->b<SCRIPT>if (1 < 2) "</p>"</Script >c<style>p</style>d < e</html>'
    )
    assert document("-", io.BytesIO(page.encode())).text == "abcd < e\n"


def test_a_pdf_is_its_pages(tmp_path: Path) -> None:
    found = document(written(tmp_path, pdf(["The key is 4711.", "", "It ends here."]), "log.pdf"))
    assert found.text.split() == "The key is 4711. It ends here.".split()
    at = found.text.index("It ends")
    assert len(found.pages) == 3 and found.place(at, at + 7) == "page 3"
    assert found.place(0, len(found.text)) == "pages 1–3"


def test_places_are_lines() -> None:
    found = Document("log", "a\nb\nc\nd\n")
    assert found.place(4, 5) == "line 3"
    assert Document("log", "one\ntwo three").place(8, 13) == "line 2 from character 5"
    assert found.place(0, 2) == "line 1" and found.place(2, 6) == "lines 2–3"


def test_standard_input_is_a_file_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert document("-", io.BytesIO(b"said")) == Document("standard input", "said")
    file = written(tmp_path, b"written")
    found = documents([file, "-"], io.BytesIO(PAGE.encode()))
    assert [one.text for one in found] == ["written", SEEN]
    with pytest.raises(UserError, match="given twice"):
        documents(["-", "-"], io.BytesIO(b"said"))
    with pytest.raises(UserError, match="standard input is empty"):
        document("-", io.BytesIO(b""))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="standard input is closed"):
        document("-")


def test_what_holds_no_text_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is empty" in refused(tmp_path, b"")
    assert "white space" in refused(tmp_path, b" \n\t\n")
    assert "white space" in refused(tmp_path, b"<html><script>1</script></html>")
    assert "is binary" in refused(tmp_path, bytes(range(256)))
    assert "is binary" in refused(tmp_path, "no mark".encode("utf-16-le"))
    assert "not UTF-8 (see byte 1)" in refused(tmp_path, "Länge".encode("latin-1"))
    assert "declares utf-16, which" in refused(tmp_path, codecs.BOM_UTF16_LE + b"\x00\xd8")
    assert "is not a PDF" in refused(tmp_path, b"text", "file.pdf")
    assert "without text" in refused(tmp_path, pdf(["", ""]), "scan.pdf")
    assert "can't be read" in refused(tmp_path, b"%PDF-1.7 and no more", "cut.pdf")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    assert "longitude[read]" in refused(tmp_path, pdf(["text"]))


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for name, told in {
        str(tmp_path): "is a folder",
        str(pipe): "is a pipe or a device",
        "/dev/zero": "is a pipe or a device",
        str(tmp_path / "none.txt"): "there is no file",
        "https://example.org/log.html": "nothing is fetched",
        "": "name is empty",
        "a\0b": "can't be read",
        "x" * 5000: "can't be read",
    }.items():
        with pytest.raises(UserError, match=told):
            document(name)


def test_what_a_shell_hands_over_is_read() -> None:
    out, into = os.pipe()  # as <(command) is
    os.write(into, b"from a command")
    os.close(into)
    try:
        assert document(f"/dev/fd/{out}").text == "from a command"
    finally:
        os.close(out)


@pytest.mark.parametrize("name", ["\x1b[31mred.txt", "new\nline.txt", "-x", "ü漢.txt", "'\".txt"])
def test_any_name_may_be_a_files(tmp_path: Path, name: str) -> None:
    assert document(written(tmp_path, b"text", name)).text == "text"
    refused(tmp_path, b"", name)


@settings(max_examples=120, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    st.one_of(
        st.binary(max_size=400),
        st.builds(lambda a, b: a + b, st.sampled_from([b"%PDF-1.4\n", b"<html>", b"\xff\xfe"]),
                  st.binary(max_size=200)),
        st.builds(lambda at, put: PDF[:at] + put + PDF[at + len(put):],
                  st.integers(0, 700), st.binary(min_size=1, max_size=4)),
        st.text(alphabet="<>!-[]/&;#a \"'=?s", max_size=200).map(lambda t: f"<html>{t}".encode()),
    )
)  # fmt: skip
def test_any_bytes_are_text_or_a_sentence(data: bytes) -> None:
    try:
        found = document("-", io.BytesIO(data))
    except UserError as told:
        assert str(told).startswith("standard input ") and "\n" not in str(told)
    else:
        assert found.text.strip() and "\0" not in found.text
        found.text.encode()


PDF = pdf(["The key is 4711.", "It ends here."])


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="ab. \n漢", max_size=300), st.integers(1, 40))
def test_pieces_are_the_text_and_fit(text: str, most: int) -> None:
    found = [*pieces([Document("log", text)], most, len)]
    assert "".join(piece.text for piece in found) == text
    assert all(0 < len(piece.text) <= most for piece in found)


def test_pieces_end_where_a_reader_pauses() -> None:
    text = "".join(f"Sentence {n} is here, and ends. " for n in range(200))
    found = [*pieces([Document("log", text)], 100, lambda t: -(-len(t) // 4))]
    assert all(piece.text.endswith(". ") for piece in found)
    assert all(len(piece.text) > 200 for piece in found[:-1])  # 400 characters would fit


def test_pieces_come_one_by_one_and_keep_to_their_document() -> None:
    counted = []

    def count(text: str) -> int:
        counted.append(len(text))
        return len(text) // 4

    text = "word " * 2_000_000
    first = next(pieces([Document("long", text)], 500, count))
    assert first.stop <= 2000 and sum(counted) < 10_000
    two = [Document("a", "one. two."), Document("b", "three.")]
    assert [piece.document.name for piece in pieces(two, 100, len)] == ["a", "b"]
