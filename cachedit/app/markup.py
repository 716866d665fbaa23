"""What happened as HTML: status, step strip, comparison, table. All that is not a number or a mark is escaped."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from torch import Tensor

from cachedit.app.job import Status
from cachedit.evaluate.comparison import Comparison
from cachedit.evaluate.figures import LOSSLESS_SIDE, data_uri
from cachedit.evaluate.page import GAIN
from cachedit.evaluate.pictures import difference
from cachedit.evaluate.table import expectation, header, table_cells
from cachedit.run import COMPUTED


def progress(status: Status, left: float | None = None) -> str:
    """How far a run is, with the seconds that are left, where they are known."""
    parts = [f"<span>{escape(status.text)}</span>"]
    if status.total:
        parts.append(
            f'<progress max="{status.total}" value="{status.done}" aria-label="progress"></progress>'
            f"<span>{status.done} of {status.total}{'' if left is None else f', {_time(left)} left'}</span>"
        )
    return _line("working", "".join(parts)) + (strip(status.strip) if status.strip else "")


def message(text: str) -> str:
    """Something to be read once, such as that a run is over."""
    return _line("said", escape(text))


def error(text: str) -> str:
    """What went wrong."""
    return f'<div class="ce-status ce-error" role="alert">{escape(text)}</div>'


def strip(marks: str) -> str:
    """The steps of a run as a picture and as text: computed ones are filled, reused ones hollow."""
    if not marks:
        return ""
    cells = "".join(f'<i class="{"computed" if mark == COMPUTED else "reused"}"></i>' for mark in marks)
    return (
        f'<div class="ce-strip" role="img" aria-label="{escape(strip_in_words(marks))}">{cells}</div>'
        f'<p class="ce-marks"><code aria-hidden="true">{escape(marks)}</code> {escape(strip_in_words(marks))}</p>'
    )


def strip_in_words(marks: str) -> str:
    """The same for who cannot see it: "8 steps; computed: 1 to 4, 6; reused: 5, 7, 8"."""
    places = [[i + 1 for i, mark in enumerate(marks) if (mark == COMPUTED) is wanted] for wanted in (True, False)]
    return f"{len(marks)} steps; computed: {_ranges(places[0])}; reused: {_ranges(places[1])}"


def comparison(bare: Tensor, cached: Tensor, name: str) -> str:
    """Two pictures ``[3, H, W]`` under a slider that the arrow keys move, and the map of their difference."""
    small = " ce-small" if max(bare.shape[1:]) <= LOSSLESS_SIDE else ""
    label = f"Share of the picture that shows the baseline; the rest shows {name}"
    return f"""<div class="ce-pictures{small}">
<figure class="ce-compare" style="--at: 50%">
<div><img src="{data_uri(cached)}" alt="{escape(name)}"><img class="ce-bare" src="{data_uri(bare)}" alt="baseline">
<input type="range" min="0" max="100" value="50" aria-label="{escape(label)}"
 oninput="this.closest('figure').style.setProperty('--at', this.value + '%')"></div>
<figcaption><span>◀ baseline</span><span>{escape(name)} ▶</span></figcaption>
</figure>
<figure><div><img src="{data_uri(difference(bare, cached, GAIN))}" alt="difference of the two, {GAIN:g} times brighter">
</div><figcaption><span>difference x {GAIN:g}</span></figcaption></figure>
</div>"""


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """Cells under column names; the first of a row names it."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<p class="ce-caption">{escape(caption)}</p>'
        f'<div class="ce-table" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def facts(named: Mapping[str, str]) -> str:
    """Names and what they stand for."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in named.items())
    return f'<dl class="ce-facts">{rows}</dl>'


def plot(svg: str, text: str) -> str:
    """An SVG file as a picture, so that its style stays its own."""
    data = base64.b64encode(svg.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(text)}">'
    return f'<div class="ce-plot" tabindex="0" role="region" aria-label="plot">{image}</div>'


def framed(page: str, title: str) -> str:
    """A whole HTML page in a frame, whose scripts cannot reach the app."""
    return f'<iframe class="ce-frame" sandbox="allow-scripts" title="{escape(title)}" srcdoc="{escape(page)}"></iframe>'


def result(measured: Comparison) -> str:
    """A cache beside the bare pipeline on one prompt: pictures, strip, table, and what the numbers would hide."""
    baseline, row = measured.rows
    bare, cached = (shot.pictures for shot in (baseline.shots[0], row.shots[0]))
    assert bare is not None
    assert cached is not None
    middle = len(bare) // 2
    notes = [row.note, "" if len(bare) == 1 else f"The middle one of {len(bare)} frames is shown."]
    if row.expected:
        notes.append(f"Expected: {expectation(row.expected)}.")
    cells = [table_cells(measured, one) for one in measured.rows]
    return "\n".join(
        [
            comparison(bare[middle], cached[middle], row.strategy),
            strip(row.strip),
            table(header(measured), cells, "One run each; the report repeats runs and takes medians"),
            *(f'<p class="ce-note">{escape(note)}</p>' for note in notes if note),
            f'<p class="ce-detail">{escape(row.configuration)}</p>',
        ]
    )


def _line(kind: str, inner: str) -> str:
    return f'<div class="ce-status ce-{kind}">{inner}</div>'


def _ranges(numbers: Sequence[int]) -> str:
    """ "1 to 4, 6" for 1, 2, 3, 4, 6."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    texts = [f"{a}" if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in spans]
    return ", ".join(texts) or "none"


def _time(seconds: float) -> str:
    whole = round(seconds)
    minutes = f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole} s" if whole < 60 else minutes
