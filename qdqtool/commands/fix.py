"""``qdqtool fix``: fixes of a Q/DQ model that need no calibration."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import click

from qdqtool.commands import completion, options
from qdqtool.commands.next_commands import compare_options
from qdqtool.commands.usage import UsageError
from qdqtool.util.files import reserve_output

if TYPE_CHECKING:
    from qdqtool.fixing.dla import DlaTranslation


@click.command("fix", cls=options.HelpCommand)
@click.argument("model", type=click.Path())
@options.model_output_option("Where to write the fixed model.", required=True)
@options.target_options
@click.option(
    "--only",
    shell_complete=completion.complete_codes,
    multiple=True,
    metavar="CODE",
    help="Fix only findings of this code (needed for HEAD-QUANT). May be repeated.",
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
    help=(
        "Factor for the limits of memory and computation when outputs are compared; raise it for "
        "large models. [default: 1]"
    ),
)
@click.option(
    "--dla-cache",
    type=click.Path(),
    metavar="FILE",
    help="Translate for DLA, which has no Q/DQ, instead of fixing: write a float model to --output "
    "and its calibration cache to FILE, and print the build command with layer precisions.",
)
@options.calib_option(
    "Compare outputs on some of these images instead of random inputs. With --dla-cache: measure "
    "ranges of tensors without a quantizer on these images."
)
@options.image_options
@options.gpu_option(
    "Estimate the times on one GPU (see qdqtool gpus). A fix for speed that makes "
    "the model slower there is not kept, unless --only names it."
)
@options.power_option
@options.output_format_option
def command(
    model: str,
    output: str,
    target: str | None,
    strongly_typed: bool,
    only: tuple[str, ...],
    inputs: str | None,
    effort: float | None,
    dla_cache: str | None,
    calib: str | None,
    images: options.ImageArguments,
    gpu: str | None,
    power: str | None,
    answer: options.AnswerWriter,
) -> int:
    """Apply fixes that need no calibration to a Q/DQ MODEL, and write the result.

    A fix is kept only if the prediction improves and the outputs stay accurate (docs/fix.md).
    Refused fixes are reported with the reason. With --only, remaining findings of these codes are
    reported as well.

    Exit codes: 0 done (also if there is nothing to fix), 1 findings that are errors remain, 2 bad
    input.
    """
    started = perf_counter()
    chosen_target = options.choose_target(target, strongly_typed)
    if dla_cache is not None:
        if only or inputs is not None or gpu is not None:
            raise UsageError(
                "--only, --inputs and --gpu have no effect with --dla-cache, which applies no "
                "fixes; leave them out",
                code="option-without-effect",
                parameter="dla_cache",
            )
        reserve_output(output, "-o")
        reserve_output(dla_cache, "--dla-cache")
        from qdqtool.fixing.dla import translate_for_dla

        translation = translate_for_dla(model, chosen_target, data=calib, **images.as_keywords())
        _save_translation(translation, output, dla_cache, answer)
        return 0
    from calibration.archives import read_arrays
    from qdqtool.fixing.api import fix
    from qdqtool.formats.fix_text import render
    from qdqtool.formats.output import use_option_names

    arrays = None if inputs is None else read_arrays(inputs)
    reserve_output(output, "-o")
    fixed = fix(
        model,
        chosen_target,
        only=only,
        inputs=arrays,
        effort=1.0 if effort is None else effort,
        data=calib,
        **images.as_keywords(),
        gpu=gpu,
        power=power,
        progress=True,
    )
    fixed.save(output)
    seconds = perf_counter() - started
    images_parameters = () if calib is None else ("calib", *options.IMAGE_PARAMETERS)
    repeated = options.repeat_options(
        "target", "strongly_typed", *options.time_parameters(), *images_parameters
    )
    answer.write(
        lambda: {**use_option_names(fixed.as_json()), "output": output},
        lambda width: render(
            fixed,
            output,
            width,
            options=repeated,
            fix_options=options.repeat_options("inputs", "effort"),
            compare_options=compare_options(),
            seconds=seconds,
        ),
    )
    return 0 if fixed.ok else 1


def _save_translation(
    translation: DlaTranslation, output: str, cache: str, answer: options.AnswerWriter
) -> None:
    """Write the float model and the calibration cache, and report both."""
    from qdqtool.formats.insertion_text import add_calibration_cache
    from qdqtool.formats.output import Style, TextPage, as_options, use_option_names

    report = translation.save(output, cache)

    def render_text(width: int) -> TextPage:
        page = TextPage(width)
        page.fill(f"Wrote {output}: the model without Q and DQ", style=Style.BOLD)
        for note in translation.notes:
            page.fill(f"note: {as_options(note)}", style=Style.NOTE)
        add_calibration_cache(page, report)
        return page

    answer.write(
        lambda: use_option_names(
            {
                "schema": "qdqtool/dla/1",
                "output": output,
                "table": report.as_json(),
                "notes": list(translation.notes),
            }
        ),
        render_text,
    )
