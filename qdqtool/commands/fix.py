"""``qdqtool fix``: fixes of a Q/DQ model that need no new data."""

import click

from qdqtool.commands import options


@click.command("fix", cls=options.HelpCommand)
@click.argument("model", type=click.Path())
@options.model_output_option("Where to write the fixed model.", required=True)
@options.target_options
@click.option(
    "--only",
    multiple=True,
    metavar="CODE",
    help="Fix these findings only (HEAD-QUANT is opt-in).",
)
@click.option(
    "--inputs",
    type=click.Path(),
    help="npz with an array for each input. [default: random inputs]",
)
@click.option(
    "--effort",
    type=click.FLOAT,
    metavar="FACTOR",
    help="Raise the limits on comparing outputs, for large models. [default: 1]",
)
@options.calib_option("Compare outputs on some of these images, not on random inputs.")
@options.image_options
@options.format_options
def command(
    model: str,
    output: str,
    target: str | None,
    strongly_typed: bool,
    only: tuple[str, ...],
    inputs: str | None,
    effort: float | None,
    calib: str | None,
    images: options.ImageArguments,
    answer: options.AnswerWriter,
) -> int:
    """Apply the fixes of a Q/DQ MODEL that need no calibration, and write the result.

    Every fix is tried, and kept only if that shows it to be one (docs/fix.md). Fixes that were
    tried and not kept are reported with the reason; with --only so is every other place of those
    codes.

    Exit codes: 0 done (also when there was nothing to fix), 1 an error-level finding is left, 2 bad
    input.
    """
    from calibration.archives import read_arrays
    from qdqtool.fixing.api import fix
    from qdqtool.formats.insertion_text import render_fixed
    from qdqtool.formats.output import use_option_names
    from qdqtool.util.files import reserve_output

    arrays = None if inputs is None else read_arrays(inputs)
    reserve_output(output, "-o")
    fixed = fix(
        model,
        options.choose_target(target, strongly_typed),
        only=only,
        inputs=arrays,
        effort=1.0 if effort is None else effort,
        data=calib,
        **images.as_keywords(),
    )
    fixed.save(output)
    answer.write(
        lambda: {**use_option_names(fixed.as_json()), "output": output},
        lambda width: render_fixed(fixed, output, width),
    )
    return 0 if fixed.ok else 1
