"""``qdqtool fix``: the fixes of a Q/DQ model that need no new data."""

from __future__ import annotations

import click

from qdqtool.base.options import Images
from qdqtool.commands import inputs
from qdqtool.options import Fixes


@click.command("fix", cls=inputs.Command)
@click.argument("model", type=click.Path())
@inputs.made_of("place", inputs.Place)
@inputs.made_of("on", inputs.Typed)
@inputs.made_of("fixes", Fixes)
@inputs.made_of(
    "data",
    inputs.Data,
    calib="Compare outputs on some of these images, not on random inputs.",
)
@inputs.images
@inputs.made_of("answer", inputs.Answer)
def command(
    model: str,
    place: inputs.Place,
    on: inputs.Typed,
    fixes: Fixes,
    data: inputs.Data,
    images: Images,
    answer: inputs.Answer,
) -> int:
    """Apply the fixes of a Q/DQ MODEL that need no calibration, and write the result.

    Every fix is tried, and kept only if that shows it to be one (docs/fix.md). What was tried and not kept is reported
    with the reason; with --only so is every other place of those codes.

    Exit codes: 0 done (also when there was nothing to fix), 1 an error-level finding is left, 2 bad input.
    """
    from qdqtool.base.files import reserve_output
    from qdqtool.fixing.api import fix
    from qdqtool.render.insertion_text import render_fixed
    from qdqtool.render.output import worded

    output = place.output
    reserve_output(output, "-o")
    fixed = fix(model, on.chosen(), **vars(fixes), data=data.calib, **vars(images))
    fixed.save(output)
    answer.give(
        lambda: {**worded(fixed.as_json()), "output": output},
        lambda width: render_fixed(fixed, output, width),
    )
    return 0 if fixed.ok else 1
