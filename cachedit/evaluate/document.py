"""The parts that all pages have in common: one HTML file that holds its style and script, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from typing import Any

from cachedit.evaluate.page_style import STYLE
from cachedit.evaluate.table import condition_lines


def document(title: str, body: str, script: str = "") -> str:
    """A page.

    Args:
        title: of the page.
        body: HTML, below the title.
        script: the one script that a browser may run for this page.
    """
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def head(conditions: dict[str, Any], names: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """What every page begins with: the conditions, and the table with what its columns mean."""
    return f"""<h2>Conditions</h2>
{_conditions(conditions)}
<h2>Result</h2>
{_table(names, rows, "Result")}
<p class="caption">{escape(caption)}</p>"""


def _conditions(conditions: dict[str, Any]) -> str:
    """Under which conditions a result holds, as a list."""
    parts = []
    for name, value in condition_lines(conditions):
        text = f"<code>{escape(value)}</code>" if name == "command" else escape(value)
        parts.append(f"<dt>{escape(name)}</dt><dd>{text}</dd>")
    return f"<dl>{''.join(parts)}</dl>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> str:
    """Cells under column names; the first of a row names it."""
    columns = "".join(f'<th scope="col">{escape(column)}</th>' for column in head)
    body = ""
    for row in rows:
        first, *others = map(escape, row)
        body += f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in others)}</tr>'
    return region(name, f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>")


def region(name: str, content: str) -> str:
    """What is scrolled sideways on a narrow screen, by keyboard too."""
    return f'<div class="scroll" role="region" aria-label="{escape(name)}" tabindex="0">{content}</div>'


def _policy(script: str) -> str:
    """What a browser may do for this page: show what is in it, run its own script, and load nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
