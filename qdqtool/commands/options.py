"""Options that several commands have, and parsers of option values.

A group of options is a decorator that adds the options to a command, in the order of ``--help``.
Options of a single command are in the module of the command. The names and defaults are those of
the public functions, but ``--help`` does not import these functions. ``tests/test_options.py``
compares names and defaults.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from qdqtool.commands import completion
from qdqtool.commands.help_sections import group_options
from qdqtool.commands.usage import UsageError
from qdqtool.errors import BuilderError, QdqtoolError
from qdqtool.ir.file_types import model_stem
from qdqtool.util.files import reserve_output

if TYPE_CHECKING:
    from qdqtool.formats.output import TextPage
    from qdqtool.trt.targets import Target

Command = Callable[..., int]
Decorator = Callable[[Command], Command]

DEFAULT_TARGET = "trt10"


class HelpCommand(click.Command):
    """Command whose help has sections, and ends with examples of ``commands/examples.toml``."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        for section, listed in group_options(options).items():
            records = [record for p in listed if (record := p.get_help_record(ctx)) is not None]
            with formatter.section(section):
                formatter.write_dl(records, col_max=22)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        from qdqtool.formats.output import wrap_command
        from qdqtool.util.tables import read_sections

        with formatter.section("Examples"):
            for example in read_sections(Path(__file__).with_name("examples.toml"))[str(self.name)]:
                lines = [f"  # {example['says']}", *wrap_command(example["run"], 80, "  ")]
                formatter.write("".join(f"{line}\n" for line in lines))


def combine_options(*options: Callable[[Any], Any]) -> Decorator:
    """Combine several option decorators into one decorator."""

    def decorate(function: Command) -> Command:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


# Values of options


class ParsedText(click.types.StringParamType):
    """Option type whose text a function parses. A ValueError of the function is a usage error."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert the text of the option."""
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def refuse_without(requirement: str, *names: str) -> None:
    """Raise an error if the user gave options that need a missing option or condition.

    Args:
        requirement: Text of the message for the missing option or condition.
        names: Names of the options' parameters.

    Raises:
        UsageError: The user gave one of the options.
    """
    context = click.get_current_context()
    flags = {p.name: p.opts[0] for p in context.command.params}
    given = [
        name
        for name in names
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        verb = "has" if len(given) == 1 else "have"
        raise UsageError(
            f"{' and '.join(flags[name] for name in given)} {verb} no effect without {requirement}",
            code="option-without-effect",
            parameter=given[0],
        )


def repeat_options(*names: str) -> str:
    """Return those options in `names` that the user gave, as text for another command line.

    The text is empty or begins with a space: `` --target 10.3 --gpu L4``. The default ``--target``
    is left out.
    """
    context = click.get_current_context()
    words: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in names or source != click.core.ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        is_repeated = isinstance(parameter, click.Option) and parameter.multiple
        values = value if is_repeated and isinstance(value, tuple) else [value]
        if isinstance(value, dict):
            values = [f"{key}={entry}" for key, entry in value.items()]
        for entry in values:
            if isinstance(entry, bool):  # False for a flag such as --no-unify
                words.append(parameter.opts[0])
            elif not (name == "target" and entry == DEFAULT_TARGET):
                words += [parameter.opts[0], _format_option_value(name, entry)]
    return "".join(f" {shlex.quote(word)}" for word in words)


def repeat_target_name() -> str:
    """Return ``--target`` as the user wrote it, with ``--strongly-typed`` as part of the name.

    The text is for commands that have no ``--strongly-typed``. It is empty or begins with a space.
    """
    from qdqtool.trt.targets import STRONGLY_TYPED

    if not repeat_options("strongly_typed"):
        return repeat_options("target")
    name = click.get_current_context().params["target"] or DEFAULT_TARGET
    return f" --target {shlex.quote(name.removesuffix(STRONGLY_TYPED) + STRONGLY_TYPED)}"


def time_parameters() -> tuple[str, ...]:
    """Return the parameters of estimated times that a suggested ``predict`` repeats.

    Empty without ``--gpu``, which the others require.
    """
    return ("gpu", "clock", "power", "size") if repeat_options("gpu") else ()


def _format_option_value(name: str, value: Any) -> str:
    if name == "method_for":
        return "=".join(value)
    if isinstance(value, tuple):
        return ("x" if name == "size" else ",").join(f"{part:g}" for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


class OptionalNumber(click.types.FloatParamType):
    """Option type of an optional number. The error message says how to leave out the number."""

    def fail(
        self, message: str, param: click.Parameter | None = None, ctx: click.Context | None = None
    ) -> NoReturn:
        """Raise a usage error with a hint on how to leave out the number."""
        super().fail(
            f"{message} Give the option a number, or put the option after the other arguments.",
            param,
            ctx,
        )


def parse_method_for(text: str) -> tuple[str, str]:
    """Return the pattern and the method of ``REGEX=METHOD``."""
    pattern, equals, method = text.rpartition("=")
    if not equals or not pattern or not method:
        raise ValueError(f"'{text}' does not have the form REGEX=METHOD")
    return pattern, method


def parse_size(text: str) -> tuple[int, int]:
    """Return height and width of ``H`` or ``HxW``."""
    parts = text.lower().replace(",", "x").split("x")
    if len(parts) > 2 or not all(p.isdecimal() and 0 < int(p) <= 65536 for p in parts):
        raise ValueError(f"'{text}' is not a valid size. Examples: 640, 480x640")
    return int(parts[0]), int(parts[-1])


def parse_channels(text: str) -> tuple[float, float, float]:
    """Return three numbers, one for each channel, from a text with one or three numbers."""
    try:
        values = [float(v) for v in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise ValueError(f"'{text}' is neither a number nor three numbers separated by commas")
    red, green, blue = values * 3 if len(values) == 1 else values
    return red, green, blue


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as ``600``, ``10m`` or ``1.5h``."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:].lower())
    try:
        value = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e9:
        raise ValueError(f"'{text}' is not a valid duration. Examples: 600, 10m, 1.5h")
    return value


def parse_assumptions(texts: tuple[str, ...]) -> dict[str, str] | None:
    """Return the values of assumptions ``name=value`` by name; None without values.

    Raises:
        QdqtoolError: A text is not ``name=value``, or a name has two values.
    """
    assumptions: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise QdqtoolError(
                f"--assume {text[:60]}: write name=value, such as silu-add=fused",
                code="wrong-format",
                parameter="assume",
            )
        value = value.strip().lower()
        if assumptions.setdefault(name.strip().lower(), value) != value:
            raise QdqtoolError(
                f"--assume {name.strip()} is given twice with different values; give it once",
                code="option-conflict",
                parameter="assume",
            )
    return assumptions or None


def parse_capabilities(texts: tuple[str, ...]) -> list[int] | None:
    """Return compute capabilities as numbers such as 86; None without values.

    Raises:
        BuilderError: A text is not a compute capability.
    """
    capabilities = []
    for text in texts:
        digits = text.upper().removeprefix("SM").replace(".", "")
        if not digits.isdecimal():
            raise BuilderError(
                f"--sm {text}: give a compute capability such as 86",
                code="wrong-format",
                parameter="sm",
            )
        capabilities.append(int(digits))
    return capabilities or None


def parse_shapes(texts: tuple[str, ...]) -> dict[str, list[list[int]]] | None:
    """Return minimum, preferred and maximum shape of each input; None without shapes.

    Raises:
        BuilderError: A text is not ``INPUT:SHAPE`` or ``INPUT:MIN,OPT,MAX``.
    """
    profiles = {}
    for text in texts:
        name, _, rest = text.rpartition(":")
        try:
            shapes = [[int(d) for d in part.split("x")] for part in rest.split(",")]
        except ValueError:
            shapes = []
        if not name or len(shapes) not in (1, 3) or len({len(s) for s in shapes}) != 1:
            raise BuilderError(
                f"--shapes {text}: give INPUT:1x3x640x640, or three shapes (minimum, preferred, "
                "maximum)",
                code="wrong-format",
                parameter="shapes",
            )
        profiles[name] = shapes * 3 if len(shapes) == 1 else shapes
    return profiles or None


def parse_with(
    parse: Callable[[Any], Any],
) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback that parses the value of an option with `parse`."""
    return lambda ctx, param, value: parse(value)


def invert_flag(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Invert the value of a flag, as a click callback."""
    return not value


# Answers


class AnswerWriter(NamedTuple):
    """Format and destination of the answer of a command.

    Attributes:
        form: ``text``, ``json``, or another format of the command.
        output: Path of the file; None for stdout.
    """

    form: str
    output: str | None = None

    def write(self, data: Callable[[], Any], text: Callable[[int], str | TextPage]) -> None:
        """Write the answer. `data` returns it as JSON, `text` as text for a width in columns.

        Raises:
            QdqtoolError: The file cannot be written, or stdout is closed.
        """
        from qdqtool.formats.output import emit, terminal_width, to_json

        if self.form == "json":
            emit(to_json(data()), self.output)
        else:
            emit(text(100 if self.output else terminal_width()), self.output)


def _make_format_option(*choices: str) -> Decorator:
    return click.option(
        "--format",
        "form",
        type=click.Choice(choices),
        default="text",
        show_default=True,
        help="Output format.",
    )


def output_format_option(function: Command) -> Command:
    """Add ``--format`` to a command. The command receives an :class:`AnswerWriter` for stdout."""

    @functools.wraps(function)
    def call(form: str, **arguments: Any) -> int:
        return function(**arguments, answer=AnswerWriter(form))

    return _make_format_option("text", "json")(call)


def make_output_options(*formats: str) -> Decorator:
    """Return a decorator that adds ``--format`` and ``-o`` to a command.

    The command receives an :class:`AnswerWriter`. An output file that cannot be written is an
    error before the command starts.
    """
    output = click.option(
        "-o", "--output", "output", type=click.Path(), help="Write the output to a file."
    )

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def call(form: str, output: str | None, **arguments: Any) -> int:
            reserve_output(output, "-o")
            return function(**arguments, answer=AnswerWriter(form, output))

        return combine_options(_make_format_option(*formats), output)(call)

    return decorate


output_options = make_output_options("text", "json")


# Files


def calib_option(text: str = "Folder of images, list file, npz or npy.", **more: Any) -> Decorator:
    """Return ``--calib`` with a help text."""
    return click.option("--calib", type=click.Path(), metavar="IMAGES", help=text, **more)


def model_output_option(text: str, **more: Any) -> Decorator:
    """Return ``-o`` for a model, with a help text."""
    return click.option("-o", "--output", "output", type=click.Path(), help=text, **more)


def choose_output_path(model: str, output: str | None, suffix: str) -> str:
    """Return the output path. The default is ``model_SUFFIX.onnx`` next to ``model.onnx``."""
    return output or str(Path(model).with_name(f"{model_stem(model)}_{suffix}.onnx"))


def all_option(text: str) -> Decorator:
    """Return ``--all`` with a help text."""
    return click.option("--all", "everything", is_flag=True, help=text)


# Target and GPU

target_option = click.option(
    "--target",
    metavar="VERSION",
    shell_complete=completion.complete_targets,
    help=f"TensorRT version (8.5, 11, rtx1.7). [default: {DEFAULT_TARGET}]",
)

target_options = combine_options(
    target_option,
    click.option(
        "--strongly-typed",
        is_flag=True,
        help="Compute in the types of the file (trtexec --stronglyTyped), as TensorRT 11 always "
        "does.",
    ),
)

build_target_option = click.option(
    "--target",
    metavar="VERSION",
    shell_complete=completion.complete_targets,
    help=(
        "TensorRT version to predict for. [default: the version of the build, else "
        f"{DEFAULT_TARGET}]"
    ),
)


def choose_target(name: str | None, strongly_typed: bool = False) -> Target:
    """Return the target of a name, strongly typed if requested.

    Raises:
        QdqtoolError: The target is unknown, or has no strongly typed networks.
    """
    from qdqtool.trt import targets

    target = targets.target_named(name or DEFAULT_TARGET)
    return targets.strongly_typed(target) if strongly_typed else target


def gpu_option(
    text: str = "Estimate the time on one GPU, such as 'RTX 3060' (see qdqtool gpus).",
    *,
    multiple: bool = False,
    **more: Any,
) -> Decorator:
    """Return ``--gpu`` with a help text. A second ``--gpu`` is an error unless `multiple`."""
    if not multiple:
        more["callback"] = _require_single_gpu
    complete = completion.complete_gpus
    return click.option(
        "--gpu", metavar="NAME", help=text, shell_complete=complete, multiple=True, **more
    )


def _require_single_gpu(
    context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]
) -> str | None:
    if len(names) > 1:
        gpus = "".join(f" --gpu {shlex.quote(name)}" for name in names)
        raise UsageError(
            f"--gpu: {context.info_name} takes a single GPU; for times on several GPUs, run "
            f"qdqtool predict MODEL{gpus}",
            code="option-conflict",
            parameter="gpu",
        )
    return names[0] if names else None


clock_option = click.option(
    "--clock",
    type=click.FLOAT,
    metavar="MHZ",
    help="SM clock under load. [default: boost clock]",
)

power_option = click.option(
    "--power",
    metavar="MODE",
    help="Power mode of a Jetson, such as 15W; 'qdqtool gpus NAME' lists the modes.",
)

assume_option = click.option(
    "--assume",
    multiple=True,
    metavar="silu-add=fused|apart",
    callback=parse_with(parse_assumptions),
    help="Assume whether TensorRT, which decides by timing, fuses Conv + activation + Add.",
)


def way_option(text: str) -> Decorator:
    """Return ``--for`` with a help text."""
    return click.option(
        "--for",
        "way",
        metavar="WAY",
        multiple=True,
        callback=_require_single_way,
        shell_complete=completion.complete_build_methods,
        help=text,
    )


def _require_single_way(
    context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]
) -> str | None:
    if len(names) > 1:
        raise UsageError(
            f"--for: {context.info_name} takes a single build method; run it once for each",
            code="option-conflict",
            parameter="way",
        )
    return names[0] if names else None


def builder_option(text: str, **more: Any) -> Decorator:
    """Return ``--builder`` with a help text."""
    return click.option(
        "--builder",
        type=click.Choice(("tensorrt-rtx", "trtexec", "tensorrt")),
        help=text,
        **more,
    )


def check_timeout_option(text: str) -> Decorator:
    """Return ``--check-timeout`` with a help text."""
    return click.option("--check-timeout", type=click.FLOAT, metavar="SECONDS", help=text)


# Images

PREPROCESS_NAMES = (
    "yolo",
    "ultralytics-classify",
    "ultralytics-rtdetr",
    "yolox",
    "imagenet",
    "imagenet-stretch",
    "inception",
    "vit",
    "clip",
    "caffe",
    "detr",
    "rtdetr",
    "scrfd",
    "tf",
    "none",
)


IMAGE_PARAMETERS = ("preprocess", "resize", "bgr", "scale", "mean", "std", "size")


class ImageArguments(NamedTuple):
    """Values of the options on images; None (False for `bgr`) if the user gave no value."""

    name: str | None
    resize: str | None
    bgr: bool
    scale: float | None
    mean: tuple[float, float, float] | None
    std: tuple[float, float, float] | None
    size: tuple[int, int] | None

    def as_keywords(self) -> dict[str, Any]:
        """Return the arguments `preprocess` and `size` for a public function."""
        changes = {
            "resize": self.resize,
            "bgr": self.bgr or None,
            "scale": self.scale,
            "mean": self.mean,
            "std": self.std,
        }
        given: dict[str, Any] = {k: v for k, v in changes.items() if v is not None}
        if not given:
            return {"preprocess": self.name, "size": self.size}
        from dataclasses import replace

        from calibration.presets import DEFAULT, find_preprocess

        preset: Any = find_preprocess(self.name or DEFAULT)
        return {"preprocess": replace(preset, **given), "size": self.size}


size_option = click.option(
    "--size",
    type=ParsedText(parse_size),
    metavar="H[xW]",
    help="Image size in pixels, if it is dynamic in the model.",
)


def image_options(function: Command) -> Command:
    """Add the options on images to a command, which receives them as :class:`ImageArguments`."""

    @functools.wraps(function)
    def call(
        preprocess: str | None,
        resize: str | None,
        bgr: bool,
        scale: Any,
        mean: Any,
        std: Any,
        size: Any,
        **arguments: Any,
    ) -> int:
        context = click.get_current_context()
        if arguments.get("calib", "") is None:
            needless = [name for name in IMAGE_PARAMETERS if name != "size"]
            refuse_without("images (--calib)", *needless)
            if not arguments.get("gpu"):  # the estimated time depends on the image size
                refuse_without("images (--calib)", "size")
        if context.get_parameter_source("resize") == click.core.ParameterSource.DEFAULT:
            resize = None
        images = ImageArguments(preprocess, resize, bgr, scale, mean, std, size)
        return function(**arguments, images=images)

    options = combine_options(
        click.option(
            "--preprocess",
            metavar="NAME",
            shell_complete=completion.make_completer(lambda: PREPROCESS_NAMES),
            help="How images become inputs: " + ", ".join(PREPROCESS_NAMES) + " (docs/insert.md). "
            "[default: from the model's metadata, else yolo]",
        ),
        click.option(
            "--resize",
            type=click.Choice(("letterbox", "corner", "stretch", "crop")),
            default="letterbox",
            show_default=True,
            help="How images are resized.",
        ),
        click.option("--bgr", is_flag=True, help="Channels in the order blue, green, red."),
        click.option(
            "--scale",
            type=click.FLOAT,
            help="Factor for pixels. [default: 1/255; 1 for integers]",
        ),
        click.option(
            "--mean",
            type=ParsedText(parse_channels),
            metavar="M[,M,M]",
            help="Values to subtract from scaled pixels; with --bgr in the order B,G,R.",
        ),
        click.option(
            "--std",
            type=ParsedText(parse_channels),
            metavar="S[,S,S]",
            help="Divisor after the subtraction of --mean.",
        ),
        size_option,
    )
    return options(call)


# Calibration

max_images_option = click.option(
    "--max-images",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    metavar="N",
    help="Maximum number of images.",
)

range_options = combine_options(
    click.option(
        "--method",
        type=click.Choice(("focus", "mse", "percentile", "entropy", "max")),
        default="focus",
        show_default=True,
        help="Choice of activation ranges. focus: mse with more weight on objects. FP8 uses max.",
    ),
    click.option(
        "--method-for",
        multiple=True,
        type=ParsedText(parse_method_for),
        metavar="REGEX=METHOD",
        help="Method for tensors whose names match REGEX.",
    ),
    click.option(
        "--percentile",
        type=click.FLOAT,
        default=99.99,
        show_default=True,
        help="Value for --method percentile.",
    ),
    max_images_option,
)

cache_options = combine_options(
    click.option(
        "--calib-cache",
        type=click.Path(),
        metavar="FILE",
        help="File of the statistics, which later runs resume or reuse.",
    ),
    click.option(
        "--overwrite-cache",
        is_flag=True,
        help="Replace a cache of another model or other images.",
    ),
)

cluster_options = combine_options(
    click.option(
        "--cluster",
        metavar="ADDRESS",
        help="Dask scheduler, or local:N for N local processes.",
    ),
    click.option(
        "--mixed-cpus",
        is_flag=True,
        help="Allow workers whose results differ in the last bits.",
    ),
)


def check_cluster(cluster: str | None, mixed_cpus: bool) -> None:
    """Check that ``--mixed-cpus`` comes with a cluster.

    Raises:
        UsageError: ``--mixed-cpus`` was given without a cluster.
    """
    if mixed_cpus and cluster is None:
        raise UsageError(
            "--mixed-cpus has no effect without --cluster; give --cluster as well",
            code="option-without-effect",
            parameter="mixed_cpus",
        )


# Placement


def precision_option(*choices: str) -> Decorator:
    """Return ``--precision`` with its choices."""
    return click.option(
        "--precision",
        type=click.Choice(choices),
        default="int8",
        show_default=True,
        help="Format of quantized tensors. fp8 (E4M3) needs compute capability 8.9+ and "
        "TensorRT 10.3+, strongly typed."
        + (
            " auto compares the errors of both on 8 images, and the times with --gpu."
            if "auto" in choices
            else ""
        ),
    )


placement_options = combine_options(
    click.option(
        "--head",
        type=click.Choice(("box", "float", "none")),
        default="box",
        show_default=True,
        help="Head outputs left float: box (boxes, DFL, sampling offsets), float (also scores), "
        "none.",
    ),
    click.option(
        "--residual",
        type=click.Choice(("auto", "skip", "both", "none")),
        default="auto",
        show_default=True,
        help="Quantized inputs of residual Adds.",
    ),
    click.option(
        "--attention",
        type=click.Choice(("auto", "float", "int8", "fp8")),
        default="auto",
        show_default=True,
        help="Type of attention's matrix products. auto: fp8 with --precision fp8 where TensorRT "
        "fuses the attention, else float. int8 is often slower than float: time both builds.",
    ),
    click.option(
        "--no-unify",
        "unify",
        is_flag=True,
        callback=invert_flag,
        help="Separate scales for tensors that Concat and similar operators connect.",
    ),
    click.option("--exclude", multiple=True, metavar="REGEX", help="Leave these nodes float."),
    click.option(
        "--include",
        multiple=True,
        metavar="REGEX",
        help="Quantize these nodes, which a preset leaves float.",
    ),
    click.option(
        "--exclude-op", multiple=True, metavar="OP", help="Leave these operator types float."
    ),
    click.option(
        "--weights",
        type=click.Choice(("float", "int8", "fp8")),
        default="float",
        show_default=True,
        help="Store weights as float with Q/DQ, or as int8 or fp8 with DQ.",
    ),
)

# Parameters that have the same meaning in `insert` and `tune`.
PLACEMENT_PARAMETERS = (
    "method",
    "method_for",
    "percentile",
    "max_images",
    "head",
    "residual",
    "attention",
    "unify",
    "exclude",
    "include",
    "exclude_op",
    "high_precision",
    "smooth",
    "weights",
)

network_options = combine_options(
    click.option(
        "--high-precision",
        type=click.Choice(("fp32", "fp16")),
        help="Type of unquantized layers. [default: fp16 if strongly typed (trt11, rtx1.7, fp8), "
        "else fp32]",
    ),
    click.option(
        "--smooth",
        type=OptionalNumber(),
        is_flag=False,
        flag_value=0.5,
        metavar="[ALPHA]",
        help="SmoothQuant: move outlier channels of Linear inputs into the weights. "
        "ALPHA is 0.5 if omitted.",
    ),
)
