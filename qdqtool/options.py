"""The options of the commands and of the functions that they call: a class for each concern.

See :mod:`qdqtool.base.options` for what is made of the fields. What calibration takes is stated there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from qdqtool.base.limits import MINIMIZED_BYTES, MINIMIZED_NODES, USER_SECONDS, format_bytes
from qdqtool.base.options import Ranges, as_in, concern, option

DEFAULT_TARGET = "trt10"  # what users install today, with JetPack 6 and 7
_TARGETS = "a TensorRT version such as 8.5, 10.3 or 11, or rtx1.7"
BUILDERS = ("tensorrt-rtx", "trtexec", "tensorrt")
_BUILDERS = "``tensorrt-rtx``, ``trtexec`` or ``tensorrt``"
DEFAULT_SM = (86,)  # compute capabilities that TensorRT-RTX builds for, and is predicted for


# Where it will run -------------------------------------------------------------------------------------------------


@concern
class On:
    """Which TensorRT."""

    target: Any = option(
        DEFAULT_TARGET,
        f"Which TensorRT: {_TARGETS}; or a :class:`qdqtool.trt.targets.Target`.",
        f"{_TARGETS[0].upper()}{_TARGETS[1:]}. [default: {DEFAULT_TARGET}]",
        kind="text",
    )


@concern
class OnBuilds:
    """Which TensorRT, where a build may say it."""

    target: Any = option(
        None,
        f"Which TensorRT, in place of the build's own: {_TARGETS}; where there is no build, {DEFAULT_TARGET}.",
        f"TensorRT to predict for. [default: the build's own, else {DEFAULT_TARGET}]",
    )


@concern
class Gpu:
    """Where times are estimated for."""

    gpu: str | None = option(
        None,
        "Estimates times for this GPU, see ``qdqtool gpus``; where a build says where it ran, for that.",
        "Estimate the time on a GPU, such as 'RTX 3060' (see qdqtool gpus).",
        metavar="NAME",
    )


@concern
class Machine(Gpu):
    """The GPU and its clock."""

    clock: float | None = option(
        None,
        "SM clock in MHz under load.",
        "SM clock under load, where it is not the boost clock.",
        metavar="MHZ",
        kind="float",
    )


@concern
class Powered(Machine):
    """The same of a GPU with power modes."""

    power: str | None = option(
        None,
        "Power mode of a Jetson.",
        "Power mode of a Jetson (15W); guesses the clock from it.",
        metavar="W|MAXN",
    )


@concern
class Request(Powered):
    """What a time is estimated for."""

    sm: str | None = option(
        None,
        "A compute capability, for findings without times.",
        "Only say what a compute capability, such as 7.5, cannot do.",
        metavar="CC",
    )
    batch: int | None = option(
        None,
        "Batch to estimate for.",
        "Estimate the time for this batch.",
        kind="int",
        least=1,
        most=65536,
    )
    no_fp16: bool = option(
        False, "Floats are FP32.", "Estimate for a builder without --fp16: floats are FP32."
    )
    calibrate: str | None = option(
        None,
        "A measured time, a profile or a calibration file.",
        "A measured time (5.3ms), a trtexec profile of this model, or a file of --save-calibration.",
        metavar="TIME|FILE",
    )
    save_calibration: str | None = option(
        None,
        "Where to keep the correction.",
        "Keep the correction for later calls.",
        metavar="FILE",
        kind="path",
    )


@concern
class Assumed:
    """What TensorRT decides by timing."""

    assume: Mapping[str, str] | None = option(
        None,
        'What to assume where reports differ on a fusion: ``{"silu-add": "fused"}`` or ``"apart"``.',
        "Settle what TensorRT decides by timing: whether Conv + activation + Add become one layer.",
        metavar="silu-add=fused|apart",
        kind="assume",
    )


@concern
class Way:
    """How the engine is built."""

    way: str | None = option(
        None,
        "How the engine is built, which findings then refer to, such as ``trtexec`` or ``onnxruntime``; the "
        "error of another name lists them.",
        "How you build, such as trtexec, python or deepstream (another word lists them). Gives the flags in its words.",
        name="for",
        metavar="WAY",
    )


@concern
class Looking:
    """How much data is looked at for what scales of activations clip and waste."""

    max_images: int = as_in(Ranges, "max_images", 64)


# Quantizing --------------------------------------------------------------------------------------------------------

# Part of the outputs' standard deviation: where INT8 moves them by less, detections hardly suffer (docs/accuracy.md).
LITTLE = 0.1


@concern
class Measuring:
    """Where ranges come from without images, and what is measured of the result."""

    calib_table: str | os.PathLike[str] | None = option(
        None,
        "A TensorRT calibration table to take the ranges from, instead of data.",
        "Take ranges from a TensorRT calibration table.",
        metavar="FILE",
        kind="path",
    )
    losses: int | None = option(
        0,
        "On so many samples, measure how far INT8 moves the outputs, which activations cost most of that, see "
        ":mod:`qdqtool.insertion.losses`, and how far an FP16 model's outputs are from the float model's. That runs "
        "the network up to ten times for each sample; None takes 2, and looks at single activations only where the "
        f"outputs move by {LITTLE:.0%} or more. 0 measures nothing, and the command takes None.",
        "Measure on so many samples which activations cost most; 0 does not. [default: 2, and single ones only where "
        f"INT8 moves the outputs by {LITTLE:.0%} or more]",
        metavar="SAMPLES",
        least=0,
        commanded=None,
    )


@concern
class Placing:
    """What is quantized, and how weights are stored."""

    head: str = option(
        "box",
        "``box`` leaves DFL and box outputs of a YOLOv8-style head float, and what makes boxes, reference "
        "points and sampling offsets of a DETR; ``float`` every last convolution and such scores; ``none`` nothing.",
        "Float in a head: DFL and box outputs (a DETR's sampling offsets too); scores as well; nothing.",
        choices=("box", "float", "none"),
    )
    residual: str = option(
        "auto",
        "``auto``, ``skip``, ``both`` or ``none``: which inputs of a residual Add are quantized.",
        "Inputs of a residual Add to quantize.",
        choices=("auto", "skip", "both", "none"),
    )
    attention: str = option(
        "float",
        "``float`` leaves the products of attention (queries with keys, Softmax with values) float, ``int8`` "
        "quantizes their inputs, the Softmax's result with its fixed range 0 to 1. Users measured INT8 attention to be "
        "slower: 800 us for 200 on an Orin with 8.6 (NVIDIA/TensorRT issue 3243), 111 ms for 43 of a UNet of Stable "
        "Diffusion on an A10 (2905). TensorRT-RTX 1.7 makes one kernel of each attention of ViT-B/16 and Swin-T in "
        "either type, and several of those of YOLO11.",
        "INT8 attention: slower where users measured it (800 us for 200 on an Orin with 8.6, NVIDIA/TensorRT#3243; 111 "
        "ms for 43 of Stable Diffusion's UNet on an A10, #2905), so measure.",
        choices=("float", "int8"),
    )
    unify: bool = option(
        True,
        "Whether tensors tied by Concat, Split, Slice, MaxPool, Resize and the like share one scale.",
        "Let tensors tied by Concat and the like have scales of their own.",
        name="no-unify",
        off=True,
    )
    exclude: Sequence[str] = option(
        (),
        "Regular expressions (``re.search``) on names of nodes to leave float.",
        "Leave these nodes float.",
        metavar="REGEX",
    )
    include: Sequence[str] = option(
        (),
        "The same for nodes to quantize although a preset would leave them float.",
        "Quantize these although a preset would not.",
        metavar="REGEX",
    )
    exclude_op: Sequence[str] = option(
        (), "Operator types to leave float.", "Leave these operator types float.", metavar="OP"
    )
    weights: str = option(
        "float",
        "``float`` keeps float weights with Q and DQ; ``int8`` stores int8 with DQ alone.",
        "Store weights as float with Q and DQ, or as int8 with DQ alone.",
        choices=("float", "int8"),
    )


@concern
class Remainder:
    """What becomes of the network beside its quantizers."""

    high_precision: str | None = option(
        None,
        "``fp32`` leaves the float remainder as it is, ``fp16`` turns it into FP16 (but for tensors whose values "
        "near its largest, and inputs and outputs). By default what the target needs: ``fp16`` where it computes in "
        "the types of the file (TensorRT 11, TensorRT-RTX), else ``fp32``.",
        "Type of what stays float. [default: fp16 where the file's types decide (trt11, rtx1.7), else fp32]",
        choices=("fp32", "fp16"),
    )
    smooth: float | None = option(
        None,
        "SmoothQuant before the calibration, for networks with outlier channels (ACT-OUTLIER): moves scales of "
        "what Linears read into their weights, and their inverse into the LayerNormalization, Linear or Mul that makes "
        "it, the same in float; 0 to 1, how much of it, mostly .5. None does nothing.",
        "SmoothQuant: move outlier channels of what Linears read into their weights; 0.5 where no ALPHA is given.",
        metavar="ALPHA",
        kind="float",
        alone=0.5,
    )


@concern
class Output(Remainder):
    """What the Q/DQ model is like around its quantizers."""

    input_type: str = option(
        "float",
        "``float`` leaves the network's inputs as they are; ``int8`` and ``uint8`` see "
        ":mod:`qdqtool.insertion.inputs`.",
        "Type of the network's input: int8 takes the first Q's result, uint8 takes pixels.",
        choices=("float", "int8", "uint8"),
    )


@concern
class Checking:
    """What is done with the Q/DQ model."""

    predict: bool = option(
        True,
        "Whether to predict what TensorRT makes of the result.",
        "Do not predict what TensorRT makes of it.",
        name="no-predict",
        off=True,
    )


@concern
class Trained(On):
    """Which quantizers a network gets for training."""

    backend: str = option(
        "pytorch-quantization",
        "``pytorch-quantization`` or ``modelopt``: whose quantizer modules are used.",
        choices=("pytorch-quantization", "modelopt"),
    )
    head: str = as_in(Placing, "head", doc="As for :func:`qdqtool.insert`.")
    residual: str = as_in(Placing, "residual", doc="As for :func:`qdqtool.insert`.")
    unify: bool = as_in(
        Placing,
        "unify",
        doc="Whether tensors that Concat, Split, Slice, MaxPool or Resize tie together share one quantizer.",
    )
    exclude: Sequence[str] = as_in(
        Placing,
        "exclude",
        doc="Regular expressions (``re.search``) on names of modules, or of nodes in the ONNX "
        "graph, that stay float; each has to match one. An Add belongs to the module in whose ``forward`` it is "
        "written.",
    )
    include: Sequence[str] = as_in(
        Placing,
        "include",
        doc="The same for modules to quantize although a rule leaves them float.",
    )
    merge: bool = option(
        True,
        "Whether parallel branches that deploy as one convolution (RepVGG, RepConv of YOLOv7 and v9) are merged "
        "first, by the network's own method; training then goes on with the one convolution. A plan does it on a copy.",
    )


@concern
class Fitted:
    """How the ranges of a network's quantizers are chosen before training."""

    method: str = as_in(
        Ranges,
        "method",
        "mse",
        doc="``max``, ``percentile``, ``mse`` or ``entropy``, as in :func:`calibration.amax_of`.",
        choices=(),
    )


# build ------------------------------------------------------------------------------------------------------------


@concern
class Building:
    """Who builds a model, how, and what is kept of it."""

    builder: str = option(
        BUILDERS[0],
        f"{_BUILDERS}.",
        "tensorrt-rtx needs no GPU; trtexec and tensorrt build for this machine's.",
        kind="builder",
    )
    output: str | os.PathLike[str] | None = option(
        None,
        "Folder for ``build.log`` and the engine; made when missing. None keeps nothing on disk.",
        "Folder for build.log, layers.json and the engine.",
        metavar="DIR",
        kind="path",
    )
    sm: Sequence[int] | None = option(
        None,
        f"Compute capabilities to build for, as ``[86]`` (TensorRT-RTX only; default {DEFAULT_SM[0]}).",
        "Compute capability to build for (tensorrt-rtx), such as 86; may be repeated.",
        metavar="CC",
        kind="capabilities",
    )
    timeout: float = option(  # classic TensorRT times tactics for minutes on a Jetson
        1800.0, "Seconds after which the build is stopped.", "Seconds until the build is stopped."
    )
    keep_engine: bool = option(
        False,
        "Whether to write ``engine.plan`` into ``output``.",
        "Keep the engine (engine.plan).",
        name="engine",
    )
    shapes: Mapping[str, Sequence[Sequence[int]]] | None = option(
        None,
        "Input name to its minimum, preferred and maximum shape, for inputs with run-time dimensions.",
        "Shapes of an input with run-time dimensions, as images:1x3x640x640 or three of them.",
        metavar="INPUT:MIN,OPT,MAX",
        kind="shapes",
    )


@concern
class Here:
    """Who builds the model that is verified, and for which GPU."""

    builder: str | None = as_in(Building, "builder", None, brief="Build MODEL here, then compare.")
    sm: str | None = as_in(
        Building,
        "sm",
        doc="The compute capability to build for (TensorRT-RTX), such as ``86`` or ``sm86``.",
        brief="Compute capability to build for (tensorrt-rtx), such as 86.",
        kind="",
    )


# fix ---------------------------------------------------------------------------------------------------------------


@concern
class Fixes:
    """What is fixed, and how it is checked."""

    only: Sequence[str] = option(
        (),
        "Finding codes to fix; empty for all of them, except those of the head (``HEAD-QUANT``) that are no errors: "
        "they change what is quantized and have to be asked for.",
        "Fix these findings only (HEAD-QUANT is opt-in).",
        metavar="CODE",
    )
    inputs: Mapping[str, Any] | None = option(
        None,
        "Arrays by input name to run the model with; random ones without it.",
        "npz with an array for each input; random without it.",
        kind="arrays",
    )
    effort: float = option(
        1.0,
        "By how much to raise the limits on comparing outputs (multiplications, bytes): for large models.",
        "Raise the limits on comparing outputs, for large models. [default: 1]",
        metavar="FACTOR",
        kind="float",
    )


# extract -----------------------------------------------------------------------------------------------------------


@concern
class Selection:
    """Which part of a model."""

    finding: str | Sequence[str] | None = option(
        (),
        "``CODE`` or ``CODE:n`` (the n-th of that code, from 1, in the order of ``predict``), or several; with "
        "``node`` those at that node.",
        "What this finding depends on (the n-th of the code, from 1; repeat for more).",
        metavar="CODE[:n]",
    )
    node: str | None = option(
        None,
        "Name of a node: what is predicted of it stays.",
        "What the prediction of this node depends on; with --finding, its place.",
        metavar="NAME",
    )
    hops: int | None = option(
        None,
        "Take this many nodes around ``node`` instead of as many as its prediction needs.",
        "With --node: this many nodes around it instead.",
        kind="int",
        least=0,
    )
    inputs: Sequence[str] = option(
        (),
        "Tensors where the part begins (default: the network's inputs).",
        "Begin at this tensor (repeat for more).",
        metavar="TENSOR",
    )
    outputs: Sequence[str] = option(
        (),
        "Tensors where it ends (default: the network's outputs).",
        "End at this tensor (repeat for more).",
        metavar="TENSOR",
    )


TRIES = 2000  # predictions
BUILDS = 400  # builds or runs of the user's command


@concern
class Shrinking:
    """What the part is to keep, and what of it may go."""

    minimize: bool = option(
        False,
        "Shrink further: fewer nodes, channels, pixels, and plain weights.",
        "Shrink further: nodes, channels, pixels, weights.",
    )
    builder: str | None = option(
        None,
        f"{_BUILDERS}: stay with what builds, fails or differs as the whole; "
        "alone, or a check alone, it searches the whole model for what the build depends on, as ``minimize`` does.",
        "Build here; the small model has to fail or differ as the whole does.",
        choices=BUILDERS,
    )
    check: str | None = option(
        None,
        "A command: stay with what it exits for with the same code as for the whole; see "
        ":class:`qdqtool.extraction.checks.CommandCheck`.",
        "Run this on each model; it has to exit as it does for the whole.",
        metavar="COMMAND",
    )
    says: str | None = option(
        None,
        "A text that the command prints of the whole model and has to print of the part; the exit code alone "
        "cannot distinguish one error from another.",
        "What COMMAND prints of the whole, and has to print of the small model.",
        metavar="TEXT",
    )
    check_timeout: float | None = option(
        None,
        f"Seconds of the clock that one run of the command may take; {USER_SECONDS:g} by default. On a smaller "
        "model it may be at work for ten seconds more than three times as long as on the whole.",
        f"What one run of COMMAND may take. [default: {USER_SECONDS:g}]",
        metavar="SECONDS",
        kind="float",
    )
    limit: int | None = option(
        None,
        f"The most models to try when shrinking (default {TRIES}; {BUILDS} with a builder or a command). Without "
        f"one and without these it also ends after {MINIMIZED_NODES:,} nodes or {format_bytes(MINIMIZED_BYTES)} of models "
        "predicted or made with other weights, a minute or two.",
        f"The most models to try (default {TRIES} within a minute or two, {BUILDS} with builds).",
        kind="int",
        least=1,
    )
    private: bool = option(
        False,
        "Replace names, weights, scales and metadata; see :mod:`qdqtool.extraction.private`.",
        "Replace names, weights, scales and metadata.",
    )


# report ------------------------------------------------------------------------------------------------------------


@concern
class Beside:
    """What a page shows beside a model."""

    before: Any = option(
        None,
        "Another model to show beside it: the float model, or an earlier one.",
        "The model without Q/DQ: before and after.",
        name="float",
        metavar="MODEL",
        kind="path",
    )
    calib_cache: str | os.PathLike[str] | None = option(
        None,
        "A calibration cache of ``insert``: histograms, and what each method would choose.",
        "Cache of insert --calib-cache: histograms.",
        metavar="FILE",
        kind="path",
    )
    tuning: str | os.PathLike[str] | None = option(
        None,
        "What ``qdqtool tune`` wrote as JSON: its Pareto front.",
        "JSON of qdqtool tune: its Pareto front.",
        metavar="FILE",
        kind="path",
    )


# tune --------------------------------------------------------------------------------------------------------------


KEEP = 0.97


@concern
class Aim:
    """What a tuning is to reach, and on what."""

    evaluation: object = option(
        None,
        "Data like that of the deployment: choices are made on one half of it and judged on the other. Without "
        "it, two quarters of ``data`` are held out for that.",
        "Images like those of the deployment: one half to choose on, the other to judge on. [default: two quarters of "
        "--calib]",
        name="eval",
        metavar="IMAGES",
        kind="path",
    )
    keep: float | None = option(
        None,
        f"Part of the float model's metric that has to be kept, above 0 to 1; {KEEP} without a budget.",
        f"Part of the float model's metric to keep. [default: {KEEP}]",
        metavar="PART",
        kind="float",
    )
    budget_ms: float | None = option(
        None,
        "Milliseconds that it may take on ``gpu``; the most accurate placement that fits is taken.",
        "The other way round: the most accurate placement that takes no longer on --gpu.",
        metavar="MS",
        kind="float",
    )
    metric: Any = option(
        None,
        "``package.module:function`` or a function ``(reference, outputs, image) -> float``, called once for "
        "each sample with the float model's outputs and the quantized one's (dicts of name to array) and the image's "
        "name; higher is better, the mean over the samples counts. By default agreement mAP for YOLOv8-style outputs, "
        "a relative output error for other models.",
        "A function (reference, outputs, image) -> float, higher is better. [default: agreement mAP for YOLOv8-style "
        "outputs, else a relative output error]",
        metavar="PACKAGE.MODULE:FUNCTION",
    )


@concern
class Effort:
    """How long a tuning may search, and what it keeps."""

    state: str | os.PathLike[str] | None = option(
        None,
        "A file that keeps what was measured, so that another run goes on from there.",
        "Keep what is measured there and go on from it. [default: OUTPUT.tuning]",
        metavar="FILE",
        kind="path",
    )
    time_limit: float | None = option(
        None,
        "Seconds after which the best that was found is taken.",
        "Take the best that was found after so long: 600, 10m, 1.5h.",
        metavar="TIME",
        kind="seconds",
    )
    check_timeout: float | None = option(
        None,
        f"Seconds that one call of ``metric`` may take; {USER_SECONDS:g} by default.",
        f"What one call of --metric may take. [default: {USER_SECONDS:g}]",
        metavar="SECONDS",
        kind="float",
    )
    whole_front: bool = option(
        False,
        "Whether to measure the front even where everything INT8 is accurate enough.",
        "Measure the whole front even where everything INT8 is accurate enough.",
        name="front",
    )
    chosen_on: int = option(
        32,
        "At most so many images to choose on.",
        "At most so many images to choose on.",
        metavar="N",
        least=1,
    )
    judged_on: int = option(
        64,
        "At most so many images to judge on.",
        "At most so many images to judge on.",
        metavar="N",
        least=1,
    )
    swept_on: int | None = option(
        None,
        "At most so many of the images to choose on for the sensitivity of single sites; None for all of them.",
        "At most so many of those to choose on for the sensitivity of single sites. [default: all]",
        metavar="N",
        kind="int",
        least=1,
    )
    workers: int | None = option(
        None,
        "Threads that measure; by default one for each core. The result does not depend on it.",
        "Threads; the result is the same.",
        kind="int",
        least=1,
        most=64,
    )


# demo --------------------------------------------------------------------------------------------------------------


@concern
class Loop:
    """What the demo makes, and where."""

    output: str = option(
        "qdqtool-demo",
        brief="Folder to write to; it is made when it is missing.",
        metavar="DIR",
        kind="path",
    )
    size: int = option(
        320, brief="Side of the network's input in pixels, a multiple of 32 up to 960."
    )
    images: int = option(100, brief="Images to calibrate with.", least=1, most=100_000)
    activation: str = option("silu", choices=("silu", "relu"))
