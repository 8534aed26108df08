"""Text to HTML: Markdown pages, docstrings and the prose of methods.

Docstrings and prose are plain text with code in backticks; in them formulas get their subscripts
and superscripts (θ_i, s^(d/(d-2))), papers their links, and names of methods in code the links to
their pages. Nothing that is read may bring HTML of its own.
"""

from __future__ import annotations

import html
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

PAPERS = {
    r"arXiv:(\d{4}\.\d{5})": r'<a href="https://arxiv.org/abs/\1">arXiv:\1</a>',
    r"kexue\.fm(?:/archives/| )(\d+)": r'<a href="https://kexue.fm/archives/\1">kexue.fm \1</a>',
    r"github\.com/([\w.-]+/[\w.-]*\w)": r'<a href="https://github.com/\1">\1</a>',
}
BELOW = re.compile(r"(?<![\w`])((?:[^\W\d_]|log)'?)_(\{[^{}]+\}|\|[^|]+\||[A-Za-z0-9]+)")
ABOVE = re.compile(r"\^(\((?:[^()]|\([^()]*\))*\)|-?[\w.]+)")
MINUS = re.compile(r"(?<=[\w)⌋\]'|]) - (?=[\w(⌊|])")
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
Linked = Callable[[str], str | None]  # the page of the method that some code is about, if any


@dataclass(frozen=True)
class Rendered:
    """A Markdown page: its first heading, what follows it, and the headings of its sections."""

    title: str
    intro: Markup
    body: Markup
    sections: tuple[tuple[str, str], ...]  # (id, text)
    lead: str  # the first paragraph as plain text, cut after a sentence or two


def inline(text: str, linked: Linked = lambda name: None) -> Markup:
    """A sentence with formulas, code and papers."""
    pieces = re.split(r"`([^`]+)`", text)
    made = [_code(p, linked) if n % 2 else _formula(p) for n, p in enumerate(pieces)]
    return Markup("".join(made))


def paragraphs(text: str, linked: Linked = lambda name: None) -> list[Markup]:
    """The paragraphs of a docstring."""
    return [inline(" ".join(p.split()), linked) for p in inspect.cleandoc(text).split("\n\n")]


def markdown(text: str, linked: Linked = lambda name: None) -> Rendered:
    """A Markdown page; links to other Markdown files lead to their pages, as do calls of methods
    in code."""
    reader = MarkdownIt("commonmark", {"html": False, "highlight": coloured}).enable("table")

    def code(_: Any, tokens: Sequence[Token], index: int, *_more: Any) -> str:
        opened = [t.nesting for t in tokens[:index] if t.type.startswith("link_")]
        return _code(tokens[index].content, (lambda name: None) if sum(opened) else linked)

    reader.add_render_rule("code_inline", code)
    tokens = reader.parse(COMMENT.sub("", text))
    title, sections, rest = _named(tokens)
    for token in (child for t in tokens for child in [t, *(t.children or [])]):
        _turn_link(token)
    split = 3 if rest and rest[0].type == "paragraph_open" else 0
    intro, body = (
        _scrolled(reader.renderer.render(some, reader.options, {}))
        for some in (rest[:split], rest[split:])
    )
    return Rendered(title, intro, body, sections, short(words(intro)))


def short(text: str, most: int = 190) -> str:
    """The first sentences of a text, as many as are short together."""
    kept = re.match(rf".{{0,{most}}}[.:?](?= |$)", text)
    return kept[0].rstrip(":") if kept else f"{text[:most].rpartition(' ')[0]} …"


def coloured(code: str, language: str, _options: str = "") -> str:
    """Code as HTML with Pygments' classes, or nothing where it knows no such language."""
    try:
        lexer = get_lexer_by_name(language or "text", stripnl=False)
    except ClassNotFound:
        return ""
    return highlight(code, lexer, HtmlFormatter(nowrap=True))


def block(code: str, language: str = "") -> Markup:
    """A block of code."""
    return Markup(f"<pre><code>{coloured(code, language) or html.escape(code)}</code></pre>")


def plain(token: Token) -> str:
    """The text of a Markdown token without its marks."""
    return "".join(
        " " if c.type in ("softbreak", "hardbreak") else c.content for c in token.children or []
    )


def words(page: str) -> str:
    """The text of some HTML, on one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def _formula(text: str) -> str:
    raw = MINUS.sub("\u00a0−\u00a0", html.escape(text, quote=False))
    raw = BELOW.sub(lambda m: f"{m[1]}<sub>{_signs(m[2].strip('{}'))}</sub>", raw)
    raw = ABOVE.sub(lambda m: f"<sup>{_signs(_bare(m[1]))}</sup>", raw)
    for pattern, link in PAPERS.items():
        raw = re.sub(pattern, link, raw)
    return raw


def _signs(formula: str) -> str:
    return formula.replace("-", "−")


def _bare(power: str) -> str:
    return power[1:-1] if power.startswith("(") else power


def _code(text: str, linked: Linked) -> str:
    page = linked(text)
    shown = f"<code>{html.escape(text)}</code>"
    return f'<a href="{html.escape(page)}">{shown}</a>' if page else shown


def _named(tokens: list[Token]) -> tuple[str, tuple[tuple[str, str], ...], list[Token]]:
    """A page's title, its sections, and what follows the title; every heading gets an id."""
    headings = [(n, t) for n, t in enumerate(tokens) if t.type == "heading_open"]
    taken: dict[str, int] = {}
    sections = []
    for n, token in headings:
        name = _slug(plain(tokens[n + 1]), taken)
        token.attrSet("id", name)
        if token.tag == "h2":
            sections.append((name, plain(tokens[n + 1])))
    first = headings[0][0]
    return plain(tokens[first + 1]), tuple(sections), tokens[first + 3 :]


def _scrolled(body: str) -> Markup:
    """Tables that are too wide for a phone scroll by themselves."""
    body = body.replace("<table>", '<div class="scroll"><table>')
    return Markup(body.replace("</table>", "</table></div>"))


def _slug(text: str, taken: dict[str, int]) -> str:
    """A heading's name in links; the second of a kind gets a number."""
    name = "-".join(re.findall(r"\w+", text.lower())) or "section"
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}-{taken[name]}"


def _turn_link(token: Token) -> None:
    if token.type == "link_open":
        href = str(token.attrGet("href"))
        if "://" not in href:
            token.attrSet("href", re.sub(r"\.md(?=#|$)", ".html", href))
    elif token.type == "image":
        token.attrSet("loading", "lazy")
    elif token.attrs.pop("style", "") == "text-align:right":
        token.attrSet("class", "number")  # the site's policy allows no style in a page
