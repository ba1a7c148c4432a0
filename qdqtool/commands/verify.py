"""qdqtool verify."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from qdqtool.commands import inputs
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError, VersionError
from qdqtool.options import Here, Machine, OnBuilds

if TYPE_CHECKING:
    from qdqtool.verification.lines import Verification


@click.command("verify", cls=inputs.Command)
@click.argument("files", nargs=-1, metavar="[MODEL] BUILD...", type=click.Path())
@inputs.made_of("on", OnBuilds)
@inputs.made_of("here", Here)
@inputs.made_of(
    "machine", Machine, gpu="Where the build ran, if it does not say: times are compared."
)
@inputs.made_of("further", inputs.Further, "from_log")
@inputs.made_of("gates", inputs.Gates, "allow_partial")
@inputs.made_of("answer", inputs.Written)
def command(
    files: tuple[str, ...],
    on: OnBuilds,
    here: Here,
    machine: Machine,
    further: inputs.Further,
    gates: inputs.Gates,
    answer: inputs.Written,
) -> int:
    """Compare the prediction with a real TensorRT build.

    MODEL is the Q/DQ model; BUILD a trtexec or Python-API log, a layer JSON (--exportLayerInfo), a profile, or several
    files of the same build; - is standard input. With --builder the model is built on this machine first, with
    --from-log there is no MODEL.

    Exit code 0: all agrees. 1: something does not. 2: unusable input, or the build shows only a part.
    """
    from qdqtool.base.files import reserve_output
    from qdqtool.render.build_text import render_verification
    from qdqtool.verification.api import exit_code

    reserve_output(answer.output, "-o")
    try:
        result = _run(files, on, here, machine, further.from_log)
    except VersionError as error:
        raise QdqtoolError(f"{error}; give --target", code=error.code, parameter="target") from None
    answer.give(result.as_json, lambda width: render_verification(result, width))
    return exit_code(result, gates.allow_partial)


def _run(
    files: tuple[str, ...], on: OnBuilds, here: Here, machine: Machine, from_log: bool
) -> Verification:
    from qdqtool.verification.api import verify

    if from_log:
        if here.builder or not files:
            raise UsageError(
                "--from-log takes the files of one build and no --builder",
                code="option-conflict",
                parameter="from_log",
            )
        if machine != Machine():
            raise UsageError(
                "--from-log compares no times: leave --gpu out, or give the MODEL",
                code="option-without-effect",
                parameter="gpu",
            )
        from qdqtool.verification.api import verify_from_log

        return verify_from_log(*files, target=on.target)
    if here.builder:
        if len(files) != 1:
            raise UsageError(
                "--builder takes one MODEL and no BUILD",
                code="option-conflict",
                parameter="builder",
            )
        from qdqtool.verification.api import verify_with_builder

        return verify_with_builder(files[0], **vars(here), target=on.target)
    if len(files) < 2:
        raise UsageError(
            "give MODEL and at least one BUILD, or --from-log BUILD, or --builder",
            code="missing-argument",
            parameter="files",
        )
    return verify(files[0], *files[1:], target=on.target, **vars(machine))
