"""``qdqtool verify``: the prediction compared with a real build."""

import click

from qdqtool.commands import options
from qdqtool.commands.usage import UsageError
from qdqtool.errors import QdqtoolError, VersionError


@click.command("verify", cls=options.HelpCommand)
@click.argument("files", nargs=-1, metavar="[MODEL] BUILD...", type=click.Path())
@options.build_target_option
@options.builder_option("Build MODEL on this machine, then compare.")
@click.option(
    "--sm",
    metavar="CC",
    help="Compute capability to build for (tensorrt-rtx), such as 86.",
)
@options.gpu_option("GPU of the build, to compare times. Needed if the log does not name the GPU.")
@options.clock_option
@click.option(
    "--from-log",
    is_flag=True,
    help="Without MODEL: reconstruct the graph from the log.",
)
@click.option(
    "--allow-partial",
    is_flag=True,
    help="Exit 0 if nothing differs, even if parts of the build are missing.",
)
@click.option(
    "--require-shapes",
    is_flag=True,
    help="Exit 2 if BUILD lists no shapes: a build of another model with the same layer names "
    "could pass.",
)
@options.output_options
def command(
    files: tuple[str, ...],
    target: str | None,
    builder: str | None,
    sm: str | None,
    gpu: str | None,
    clock: float | None,
    from_log: bool,
    allow_partial: bool,
    require_shapes: bool,
    answer: options.AnswerWriter,
) -> int:
    """Compare the prediction with a real TensorRT build.

    MODEL is the Q/DQ model; BUILD a trtexec or Python-API log, a layer JSON (--exportLayerInfo), a
    profile, or several files of the same build; - is standard input. With --builder, MODEL is first
    built on this machine. With --from-log, omit MODEL.

    Exit codes: 0 everything agrees; 1 something differs; 2 bad input, or parts of the build are
    missing. Missing parts are: an absent or truncated layer listing, or one without data types;
    truncated optimizer passes; a truncated file; unknown data types of convolutions. The optimizer
    passes, the parse section, the profile and (without --require-shapes) shapes may be absent.
    """
    from qdqtool.formats.build_text import render_verification
    from qdqtool.verification.api import exit_code, verify, verify_from_log, verify_with_builder

    _check_arguments(len(files), builder, from_log, gpu is not None or clock is not None)
    if builder is None:
        options.refuse_without("--builder", "sm")
    else:
        options.refuse_without("files of a BUILD", "gpu", "clock")
    try:
        if from_log:
            result = verify_from_log(*files, target=target)
        elif builder:
            result = verify_with_builder(files[0], builder=builder, sm=sm, target=target)
        else:
            result = verify(files[0], *files[1:], target=target, gpu=gpu, clock=clock)
    except VersionError as error:
        raise QdqtoolError(
            f"{error}, or give --target", code=error.code, parameter="target"
        ) from None
    answer.write(
        result.as_json,
        lambda width: render_verification(
            result, width, allow_partial=allow_partial, require_shapes=require_shapes
        ),
    )
    return exit_code(result, allow_partial, require_shapes)


def _check_arguments(files: int, builder: str | None, from_log: bool, has_gpu: bool) -> None:
    if from_log and (builder or not files):
        raise UsageError(
            "--from-log needs the files of one build, without --builder",
            code="option-conflict",
            parameter="from_log",
        )
    if from_log and has_gpu:
        raise UsageError(
            "--from-log compares no times: leave out --gpu and --clock, or give MODEL",
            code="option-without-effect",
            parameter="gpu",
        )
    if builder and files != 1:
        raise UsageError(
            "--builder needs one MODEL and no BUILD",
            code="option-conflict",
            parameter="builder",
        )
    if files < 2 and not from_log and not builder:
        raise UsageError(
            "give MODEL and at least one BUILD, or --from-log BUILD, or --builder",
            code="missing-argument",
            parameter="files",
        )
