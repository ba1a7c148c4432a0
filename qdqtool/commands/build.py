"""``qdqtool build``: build a model with the TensorRT installed on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from qdqtool.commands import options
from qdqtool.errors import BuilderError
from qdqtool.util.files import forbid_dash
from qdqtool.util.text import format_layer_counts, keep_end

if TYPE_CHECKING:
    from qdqtool.formats.output import TextPage
    from qdqtool.verification.local_build import BuiltModel


@click.command("build", cls=options.HelpCommand)
@click.argument("model", type=click.Path())
@options.builder_option(
    "tensorrt-rtx needs no GPU. trtexec and tensorrt build for the GPU of this machine.",
    default="tensorrt-rtx",
    show_default=True,
)
@click.option(
    "--sm",
    multiple=True,
    metavar="CC",
    callback=options.parse_with(options.parse_capabilities),
    help="Compute capability to build for (tensorrt-rtx), such as 86; may be repeated.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="DIR",
    help="Folder for build.log, layers.json and the engine.",
)
@click.option("--engine", "keep_engine", is_flag=True, help="Keep the engine (engine.plan).")
@click.option(
    "--shapes",
    multiple=True,
    metavar="INPUT:MIN,OPT,MAX",
    callback=options.parse_with(options.parse_shapes),
    help=(
        "Shape of an input with dynamic dimensions, such as images:1x3x640x640, or the minimum, "
        "preferred and maximum shapes."
    ),
)
@click.option(
    "--timeout",
    type=click.FLOAT,
    default=1800.0,
    show_default=True,
    help="Stop the build after this number of seconds.",
)
@options.output_format_option
def command(
    model: str,
    builder: str,
    sm: list[int] | None,
    output: str | None,
    answer: options.AnswerWriter,
    **settings: Any,
) -> int:
    """Build MODEL and show in which type each convolution runs.

    Exit codes: 0 built; 1 the compiler rejected the model, crashed or timed out; 2 bad input.
    """
    from qdqtool.verification.local_build import build_model

    forbid_dash(output or "", "-o")
    if sm and builder != "tensorrt-rtx":
        raise BuilderError(
            f"--sm is for tensorrt-rtx; {builder} builds for the GPU of this machine. Leave "
            "--sm out",
            code="option-conflict",
            parameter="sm",
        )
    if builder == "tensorrt-rtx":
        from qdqtool.builders.compiler_process import is_installed, print_license_notice

        if is_installed("tensorrt_rtx"):
            print_license_notice()
    result = build_model(model, builder=builder, sm=sm, output=output, **settings)
    answer.write(result.as_json, lambda width: _render(result, model, width))
    return 0 if result.status == "built" else 1


def _render(result: BuiltModel, model: str, width: int) -> TextPage:
    from qdqtool.formats.output import Style, TextPage

    page = TextPage(width)
    version = f" {result.version}" if result.version else ""
    targets = f" for SM{', SM'.join(map(str, result.targets))}" if result.targets else ""
    is_built = result.status == "built"
    page.fill(
        f"{model}: {result.status} by {result.builder}{version}{targets} ({result.seconds:.1f} s)",
        style=Style.GOOD if is_built else Style.BAD,
    )
    if is_built:
        _add_nodes(page, result)
    else:
        page.fill(result.message, 2, "  ")
    paths = {"log": result.log_path, "layers": result.layers_path, "engine": result.engine_path}
    for name, path in paths.items():
        if path is not None:
            page.fill(f"Wrote the {name} {path}")
    return page


def _add_nodes(page: TextPage, result: BuiltModel) -> None:
    from qdqtool.verification.kernels import ATTENTION

    int8 = sum(n.precision == "INT8" for n in result.nodes)
    fp8 = sum(n.precision == "FP8" for n in result.nodes)
    products = sum(n.op in ("Gemm", "MatMul") for n in result.nodes)
    layers_text = format_layer_counts(len(result.nodes) - products, products)
    if not fp8:
        page.fill(f"{int8} of {layers_text} in INT8")
    else:
        page.fill(f"{int8} in INT8, {fp8} in FP8, of {layers_text}")
    layers = result.build.layers if result.build is not None else []
    fused = sum(ATTENTION in layer.name for layer in layers)
    if fused:
        page.fill(
            "kernels that compute a whole attention, both products and the Softmax "
            f"({ATTENTION}): {fused}"
        )
    width = min(max((len(n.name) for n in result.nodes), default=4), 44)
    for node in result.nodes:
        outcome = f"{node.precision:<5} writes {node.output}"
        if node.precision == "UNKNOWN":
            outcome = "no layer of its own"
        page.add_lines(f"  {keep_end(node.name, width):<{width}}  {node.op:<13} {outcome}")
