"""``qdqtool fix``: the fixes of a Q/DQ model that need no new data."""

from __future__ import annotations

import click

from qdqtool.commands import inputs as options


@click.command("fix", cls=options.Command)
@click.argument("model", type=click.Path())
@click.option("-o", "--output", type=click.Path(), required=True, help="Where to write the fixed model.")
@click.option("--target", default=None, help=f"{options.TARGETS}. [default: trt10]")
@options.strongly_typed
@click.option("--only", multiple=True, metavar="CODE", help="Fix these findings only (HEAD-QUANT is opt-in).")
@click.option("--inputs", type=click.Path(), default=None, help="npz with an array for each input; random without it.")
@click.option("--effort", type=float, default=1.0, metavar="FACTOR",
              help="Raise the limits on comparing outputs, for large models. [default: 1]")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    model: str, output: str, target: str | None, strongly_typed: bool, only: tuple[str, ...], inputs: str | None,
    effort: float, form: str,
) -> int:
    """Apply the fixes of a Q/DQ MODEL that need no calibration, and write the result.

    Every fix is tried: it is kept only if the prediction gets better and the outputs in onnxruntime stay as near to
    those of the float network as they were. What was tried and not kept is reported with the reason.

    Exit codes: 0 done (also when there was nothing to fix), 1 an error-level finding is left, 2 bad input.
    """
    from qdqtool.fixing.api import fix
    from qdqtool.io.files import claim
    from qdqtool.io.packed import read_arrays
    from qdqtool.model.modelfile import save
    from qdqtool.render.insertion_text import render_fixed
    from qdqtool.render.output import emit, terminal_width, to_json

    claim(output, "-o")
    fixed = fix(model, options.target_of(target, strongly_typed), only, read_arrays(inputs) if inputs else None,
                effort)
    save(fixed.proto, output, source=model)
    if form == "json":
        emit(to_json({**fixed.as_json(), "output": output}), None)
    else:
        emit(render_fixed(fixed, output, terminal_width()), None)
    return 1 if any(f.severity == "error" for f in fixed.after.findings) else 0
