"""An engine's graph in Graphviz's language."""

from __future__ import annotations

from collections.abc import Iterable

from qdqtool.engine.graph import LAYER, Drawing
from qdqtool.render.colours import fill, line
from qdqtool.text import as_line, as_text


def render(drawing: Drawing) -> str:
    """DOT text: boxes coloured by precision, edges labelled with tensor, shape and precision."""
    lines = [
        "digraph engine {", f"  label={_quoted([drawing.title])}; labelloc=t; fontname=Helvetica; rankdir=TB;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11];',
        "  edge [fontname=Helvetica, fontsize=9];",
    ]
    for box in drawing.boxes:
        shape = "" if box.role == LAYER else ", shape=oval"
        label = _quoted([text for text in box.lines if text])
        colours = f'fillcolor="{fill(box.precision)}", color="{line(box.precision)}"'
        lines.append(f"  {box.key} [label={label}, tooltip={_quoted([box.tip])}, {colours}{shape}];")
    for arrow in drawing.arrows:
        colour = line(arrow.precision)
        lines.append(f'  {arrow.source} -> {arrow.target} [label={_quoted(arrow.lines)}, color="{colour}"];')
    return as_text([*lines, "}"])


def _quoted(lines: Iterable[str]) -> str:
    return '"' + "\\n".join(as_line(text).replace("\\", "\\\\").replace('"', '\\"') for text in lines) + '"'
