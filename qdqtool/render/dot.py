"""An engine's graph in Graphviz's language."""

from __future__ import annotations

from qdqtool.engine.graph import LAYER, Drawing
from qdqtool.render.colours import fill, line


def render(drawing: Drawing) -> str:
    """DOT text: boxes coloured by precision, edges labelled with tensor, shape and precision."""
    lines = [
        "digraph engine {", f"  label={_quoted(drawing.title)}; labelloc=t; fontname=Helvetica; rankdir=TB;",
        '  node [shape=box, style="filled,rounded", fontname=Helvetica, fontsize=11];',
        "  edge [fontname=Helvetica, fontsize=9];",
    ]
    for box in drawing.boxes:
        shape = "" if box.role == LAYER else ", shape=oval"
        label = _quoted("\n".join(text for text in box.lines if text))
        colours = f'fillcolor="{fill(box.precision)}", color="{line(box.precision)}"'
        lines.append(f"  {box.key} [label={label}, tooltip={_quoted(box.tip)}, {colours}{shape}];")
    for arrow in drawing.arrows:
        colour = line(arrow.precision)
        lines.append(f'  {arrow.source} -> {arrow.target} [label={_quoted(arrow.label)}, color="{colour}"];')
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    clean = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
    return '"' + clean.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
