"""Status of a build: gaps, TensorRT version, precisions, and whether its INT8 is implicit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set

from qdqtool.buildlog.agreement import BuildSource
from qdqtool.buildlog.names import base_name
from qdqtool.buildlog.types import (
    NOTE,
    Build,
    BuiltLayer,
    Gap,
    GapKind,
    ListingSource,
    Section,
)
from qdqtool.ir.precision import Precision

_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
_PRECISIONS = frozenset(("fp32", "fp16", "bf16", "int8", "fp8", "int4"))
_PRECISION_FLAGS = frozenset(("fp16", "bf16", "int8", "fp8", "int4", "best", "stronglyTyped"))
_MYELIN_CONSTANT = re.compile(r"__mye\d[\w.]*")  # Myelin's names for constants
_SKIPPED_TACTIC = "Skipping tactic"
# Last version before 11 that changed listings, apart from the names of Myelin kernels.
LATEST_SPELLING = "8.6"
# Types of Myelin kernels. TensorRT 8.x lists only the Myelin layer that contains them.
_MYELIN_TYPES = ("kgen", "gemm", "fusion", "correlation", "shape_call")
IMPLICIT_INT8 = (
    "an implicit-INT8 build without Q/DQ: a calibration table or dynamic ranges selected its INT8 "
    "layers, so the rules for Q/DQ do not apply"
)
_MISSING_RANGE_MESSAGES = (
    "Missing scale and zero-point for tensor",
    "Calibrator is not being used. Users must provide dynamic range",
)


def set_build_status(build: Build) -> None:
    """Set the fields of a build that follow from its contents.

    These are the gaps, whether the build is complete, whether layers have only names, the
    precision flags and the version hint. Q and DQ layers are marked. If the build passed, errors of
    skipped tactics become notes.
    """
    _mark_qdq_layers(build)
    if build.passed:
        _demote_skipped_tactics(build)
    build.precision_flags = _find_precision_flags(build)
    build.names_only = _has_only_names(build.layers)
    build.version_hint = build.tensorrt or _find_version_by_spelling(build)
    build.gaps = [gap for gap in build.gaps if gap.kind.is_unread]
    is_listing_cut = build.has_gap(Section.LISTING)
    if build.source.is_log:
        build.gaps += _find_log_gaps(build)
    listing_gap = _find_listing_gap(build)
    if listing_gap is not None and not (is_listing_cut and listing_gap.kind.is_truncation):
        build.gaps.append(listing_gap)
    if build.source == BuildSource.TRTEXEC_LOG and build.command and build.passed is None:
        build.gaps.append(Gap(Section.END))
    has_details = bool(build.layers) and not build.names_only
    build.complete = has_details and not any(map(_is_harmful_gap, build.gaps))


def _demote_skipped_tactics(build: Build) -> None:
    for message in build.messages:
        if message.level == "E" and _SKIPPED_TACTIC in message.text:
            message.level = NOTE


def _has_only_names(layers: Sequence[BuiltLayer]) -> bool:
    return bool(layers) and not any(x.type or x.inputs or x.outputs for x in layers)


def _is_harmful_gap(gap: Gap) -> bool:
    # The engine listing does not depend on the profile and the parse section.
    return gap.kind.is_truncation and gap.section not in (Section.PROFILE, Section.PARSE)


def _find_log_gaps(build: Build) -> list[Gap]:
    gaps = []
    parse = build.parse
    if not parse.nodes:
        gaps.append(Gap(Section.PARSE))
    elif not parse.inputs or not parse.outputs:
        gaps.append(Gap(Section.PARSE, GapKind.CUT))
    if not build.trace and not build.milestones:
        gaps.append(Gap(Section.PASSES))
    elif build.milestone("Original") is None or not _is_optimizer_finished(build):
        gaps.append(Gap(Section.PASSES, GapKind.CUT))
    return gaps


def _find_listing_gap(build: Build) -> Gap | None:
    if not build.layers:
        return Gap(Section.LISTING)
    if build.names_only:
        return Gap(Section.LISTING, GapKind.NAMES_ONLY)
    expected = _count_expected_layers(build)
    if expected is None:
        return find_missing_layer_gap(build, [tensor.name for tensor in build.parse.inputs])
    if len(build.layers) < expected:
        return Gap(Section.LISTING, GapKind.FEWER_LAYERS, len(build.layers), expected)
    return None


def find_truncations(build: Build) -> list[Gap]:
    """Return the gaps in which content was lost.

    In a complete build, these are only the parts of files that were not read.
    """
    return [
        gap
        for gap in build.gaps
        if gap.kind.is_unread or (not build.complete and gap.kind.is_truncation)
    ]


def find_missing_layer_gap(build: Build, inputs: Iterable[str]) -> Gap | None:
    """Return a gap if layers are missing from the listing, else None.

    In a complete listing, each input of a layer is a weight, an input of the network, or an output
    of another layer (true for all listings examined). Return None without a check if the network's
    inputs are unknown, or if a log states the number of layers.

    Args:
        build: Build with the listing.
        inputs: Inputs of the network, for a build that does not name its bindings.
    """
    network_ends = {*build.bindings, *inputs}
    if not network_ends or build.names_only or _count_expected_layers(build) is not None:
        return None
    outputs = {t.tensor for layer in build.layers for t in (*layer.outputs, *layer.constants)}
    consumers = {t.tensor: layer.name for layer in build.layers for t in layer.inputs}
    written = outputs | network_ends
    for tensor, name in consumers.items():
        if tensor not in written and not _MYELIN_CONSTANT.fullmatch(tensor):
            return Gap(Section.LISTING, GapKind.UNWRITTEN, name=name[:80], tensor=tensor[:80])
    # The bindings in a log may include lines of other programs, so check only JSON listings.
    if build.listing != ListingSource.LAYER_JSON:
        return None
    return _find_idle_binding_gap(build, outputs | consumers.keys())


def _find_idle_binding_gap(build: Build, tensors: Set[str]) -> Gap | None:
    """Return a gap if a binding is not one of the tensors of layers, else None."""
    idle = [name for name in build.bindings if name not in tensors]
    return Gap(Section.LISTING, GapKind.IDLE_BINDING, tensor=idle[0][:80]) if idle else None


def _mark_qdq_layers(build: Build) -> None:
    """Set the origin of a layer to ``QDQ`` if the log shows that the layer is a Q or DQ."""
    conversions = {event.subject for event in build.trace if event.pass_name == "QDQToCopy"}
    nodes = {node.name for node in build.parse.nodes if node.op in _QUANTIZERS} - {""}
    for layer in build.layers:
        if not layer.origin and (layer.name in conversions or base_name(layer.name) in nodes):
            layer.origin = "QDQ"


def _is_optimizer_finished(build: Build) -> bool:
    return bool(build.layers or build.placement or build.tactics.timed) or any(
        name.startswith(("Graph construction", "Graph optimization")) for name in build.seconds
    )


def _count_expected_layers(build: Build) -> int | None:
    """Return the number of layers that a log states for the complete listing.

    None if the build was not read from a log, the log states no number, or the listing comes from
    a JSON file.
    """
    if not build.source.is_log or build.listing == ListingSource.LAYER_JSON:
        return None
    after = build.milestone("After reformat layers")
    return build.milestones[-1].layers if after is None and build.milestones else after


def _find_precision_flags(build: Build) -> frozenset[str]:
    option = build.options.get("Build", {}).get("Precision", "").lower()
    flags = {name.strip() for name in option.split("+")} & _PRECISIONS
    flags |= build.flags.keys() & _PRECISION_FLAGS
    if "strongly typed" in option:
        flags.add("stronglyTyped")
    if build.command and flags and "stronglyTyped" not in flags:
        flags.add("fp32")
    return frozenset(flags)


def _find_version_by_spelling(build: Build) -> str | None:
    layers = build.layers
    if not layers:
        return None
    if any("_quantize_scale_node" in layer.name for layer in layers):
        return "8.0"
    if any(map(_has_stride_order, layers)):
        return "11"
    if any(layer.type in _MYELIN_TYPES for layer in layers):
        return "10"
    if any(layer.onnx_names or "StreamId" in layer.extras for layer in layers):
        return LATEST_SPELLING
    if build.listing != ListingSource.ENGINE_LINES:
        return "8.4" if build.listing else None
    return _find_version_of_engine_lines(layers)


def _has_stride_order(layer: BuiltLayer) -> bool:
    return "StrideOrder" in layer.extras or any(
        tensor.format.startswith("(") and tensor.precision != Precision.UNKNOWN
        for tensor in (*layer.inputs, *layer.outputs)
    )


def _find_version_of_engine_lines(layers: Sequence[BuiltLayer]) -> str:
    tensors = (tensor for layer in layers for tensor in (*layer.inputs, *layer.outputs))
    if any(tensor.vector > 1 for tensor in tensors):
        return "8.5"
    return "8.4" if all(x.tactic.startswith("0x") for x in layers if x.tactic) else "8.2"


def is_implicit_int8(build: Build) -> bool:
    """Return whether the INT8 of a build comes from a table or from ranges instead of Q/DQ.

    True if the build shows no Q or DQ, and has INT8 convolutions or warns of missing ranges. With
    Q/DQ, each INT8 convolution's name contains the Q of its weights (``weights + Q + Conv``), and
    the parse section lists this Q. If only a listing is given, a Q with a custom name is not
    recognized, and the result can be wrong.
    """
    if build.is_rtx or _shows_quantizers(build):
        return False
    if any(message.text.startswith(_MISSING_RANGE_MESSAGES) for message in build.messages):
        return True
    return any(
        layer.is_convolution
        and layer.input_precision == Precision.INT8
        and layer.type[:1].isupper()  # kernels of Myelin have lowercase types
        for layer in build.layers
    )


def is_float_build(build: Build) -> bool:
    """Return whether a build is complete and certainly has neither INT8 nor Q/DQ.

    False for a listing with Myelin layers or kernels, because these do not show Q and DQ, and for
    TensorRT-RTX.
    """
    if not build.complete or build.is_rtx or _shows_quantizers(build):
        return False
    if any(not layer.type[:1].isupper() or layer.type == "Myelin" for layer in build.layers):
        return False
    tensors = (tensor for layer in build.layers for tensor in (*layer.inputs, *layer.outputs))
    return all(tensor.precision != Precision.INT8 for tensor in tensors)


def _shows_quantizers(build: Build) -> bool:
    return (
        any(event.pass_name.startswith(("Quantize", "QDQ", "ConstQDQ")) for event in build.trace)
        or any(node.op in _QUANTIZERS for node in build.parse.nodes)
        or any(
            layer.origin == "QDQ"
            or any("uantize" in name for name in (layer.name, *layer.onnx_names))
            for layer in build.layers
        )
    )
