"""Differences between TensorRT versions, with the evidence of each.

Passes never compare versions, but read the properties of their :class:`Target`.

The builds that prove the properties are in ``qdqtool/trt/builds.tsv``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from qdqtool.errors import QdqtoolError, VersionError
from qdqtool.evidence import Evidence
from qdqtool.util.tables import read_rows

DEFAULT_TARGET = "trt10"  # current version, also in JetPack 6 and 7
DEFAULT_SM = (86,)  # default compute capabilities of builds and predictions for TensorRT-RTX
DEFAULT_FP8_SM = (89,)  # default for models with FP8: earlier GPUs have no FP8

_FIRST_FP8 = (10, 0)
# NVIDIA in NVIDIA/TensorRT issue 3987: FP8 convolutions from 10.2 on for Hopper, from 10.3 for Ada
_FIRST_FP8_CONVOLUTIONS = (10, 2)
_FIRST_FP8_BEYOND_HOPPER = (10, 3)
_HOPPER = 90
# Release notes of 10.6: FP8 attention, and one FP8 weight scale for each column of a matrix product
_FIRST_FP8_ATTENTION = (10, 6)

# Evidence on whether TensorRT fuses Conv + activation + Add, by version. Published logs do not show
# whether it does.
_APART_8 = "users saw separate layers on 8.4 and 8.5 (NVIDIA/TensorRT issues 2204, 3861)"
_APART_10 = (
    "a user saw separate layers on 10.6 (NVIDIA/TensorRT issue 3861), although ModelOpt has placed "
    "Q/DQ for the fusion since 2025-10"
)
_FUSED_11 = (
    "ModelOpt has placed Q/DQ for the fusion since 2025-10 (pull request 450); no build was "
    "available"
)


@dataclass(frozen=True, repr=False)
class Target:
    """One TensorRT version, or a range of versions that behave alike.

    The text of a flag is a statement that holds if the flag is True.

    Attributes:
        name: Name for users.
        version: Major and minor version.
        evidence: How well the Q/DQ rules as a whole are proven for the version.
        proof: Sentence on this evidence, shown with every prediction.
        requested_version: Version that the user named, if it differs from the target's: a patch
            version, or a version to which only the nearest rules apply. Empty otherwise.
        strongly_typed: Float tensors have their ONNX type, and the builder cannot choose another.
        merges_parallel: Convolutions of equal shape on one input become one layer (``A || B``).
        fuses_stem_pool: The first convolution of an image network fuses the MaxPool after it.
        keeps_relu_name: If a Relu is folded with its BatchNormalization, the layer name contains
            the Relu's name.
        quantize_suffix: Text that layer names contain after the name of a Q of weights.
        residual_through_activation: A convolution and its SiLU fuse the residual Add after them if
            the residual is quantized, as a convolution without activation does.
        residual_proof: Reason for the value of ``residual_through_activation``.
        multiply_in_pointwise_name: The name of a fused SiLU is ``PWN(PWN(s), PWN(m))`` instead of
            ``PWN(s, m)``.
        constants_first: The name of a pointwise layer includes the constants that it absorbs.
        float16_scales: A Q/DQ scale may be float16.
        blocked_scales: A scale may have several dimensions (blocks of weights).
        int8_weights: Weights that are stored as int8, with a DQ but no Q, are accepted.
        uint8_inputs: A network input that a Cast reads may be UINT8 (release notes of 8.5: kUINT8).
        has_seen_deconvolution: An INT8 ConvTranspose was seen in a build of this version.
        deconvolution_3d_float: A quantized ConvTranspose of three spatial dimensions runs in float,
            regardless of the layers after it.
        transposed_per_channel: A ConvTranspose is proven to accept one weight scale for each output
            channel (axis 1). False for all targets so far. NVIDIA's answers differ: axis 0 for
            TensorRT 8 (issue 1694), only input channels (issue 2380). With axis 1, a build of 8.0.1
            fails (issue 1519) and an engine computes wrong results (issue 1699). Newer toolkits
            write axis 1, but no build that shows the result is available.
        fuses_quantized_relu: A Relu with Q/DQ before and after it is fused into the INT8 layer
            before it.
        copies_dq: A DQ with several consumers is copied for each operator that it can pass.
        copies_moved_dq: A DQ that has moved down past an operator is copied for each Q after it.
        merges_beside_floats: Equal Qs of a tensor are merged even if another layer reads the
            tensor as float.
        sums_into_first: If two convolutions feed a sum, the convolution at the sum's first input
            fuses the sum.
        reshapes_before_resize: The engine has a reshape before an INT8 Resize whose result is
            copied into a Concat. Affects estimated times only.
        products_in_myelin: TensorRT's compiler Myelin runs matrix products, Softmax and
            normalizations, with the Q and DQ around them.
        regions: Attention and normalization run in few kernels. Affects estimated times only.
        layer_normalization: The parser accepts LayerNormalization (INormalizationLayer), which
            accumulates in FP32.
        capabilities: Compute capabilities that TensorRT-RTX builds for, 86 for 8.6. A type is
            available only if all of them have it. For classic TensorRT, they matter only with
            ``has_named_capability``.
        has_named_capability: The user or a build named ``capabilities``.
        has_built_typing: A build shows the value of ``strongly_typed``, so that the model does not
            change it.
        is_typed_for_fp8: The network is strongly typed because the model contains FP8, not because
            the user requested it.
        largest_fp8_head: Largest head size for which TensorRT is known to fuse an FP8 attention.
            Release notes of 10.6: 64, on compute capability 8.9. TensorRT-RTX 1.7.1 fuses 32, 64
            and 80.
        buildable: All compute capabilities that TensorRT-RTX can build for. Empty for classic
            TensorRT, which builds for the GPU that it runs on.
    """

    name: str
    version: tuple[int, int]
    evidence: Evidence
    proof: str
    requested_version: str = ""
    strongly_typed: bool = False
    merges_parallel: bool = True
    fuses_stem_pool: bool = True
    keeps_relu_name: bool = False
    quantize_suffix: str = ""
    residual_through_activation: bool = False
    residual_proof: str = _APART_8
    multiply_in_pointwise_name: bool = False
    constants_first: bool = False
    float16_scales: bool = False
    blocked_scales: bool = False
    int8_weights: bool = False
    uint8_inputs: bool = True
    has_seen_deconvolution: bool = False
    deconvolution_3d_float: bool = False
    transposed_per_channel: bool = False
    fuses_quantized_relu: bool = False
    copies_dq: bool = False
    copies_moved_dq: bool = False
    merges_beside_floats: bool = True
    sums_into_first: bool = False
    reshapes_before_resize: bool = False
    products_in_myelin: bool = False
    regions: bool = False
    layer_normalization: bool = False
    capabilities: tuple[int, ...] = DEFAULT_SM
    has_named_capability: bool = False
    has_built_typing: bool = False
    is_typed_for_fp8: bool = False
    largest_fp8_head: int = 64
    buildable: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<Target {self.name}>"

    @property
    def has_seen_merges(self) -> bool:
        """Whether builds of this version show which equal Qs are merged.

        This holds for 10.14 to 10.16, and for TensorRT 10 if the user names no minor version. No
        build of 10.3 to 10.13 or of 11 shows the merges. The measured times of five YOLO11n engines
        on 10.3 fit merged and separate Qs nearly equally (1 % difference).
        """
        release = version_numbers(self.requested_version)
        return self.version == (10, 0) if release is None else (10, 14) <= release <= (10, 16)

    @property
    def trtexec(self) -> TrtexecSupport:
        """Options of the version's trtexec."""
        return _trtexec_support(self.version)

    @property
    def major_version(self) -> int:
        """Major version of TensorRT."""
        return self.version[0]

    @property
    def has_calibrators(self) -> bool:
        """Whether TensorRT can build INT8 from a calibration table instead of Q/DQ (before 11)."""
        return not self.is_rtx and self.version < (11, 0)

    @property
    def has_strong_typing(self) -> bool:
        """Whether the float types of a network can be those of the ONNX file (from 10)."""
        return self.version >= (10, 0)

    @property
    def recovers_scales_on_dla(self) -> bool:
        """Whether the DLA compiler fuses Conv + Add without a scale between Conv and Add.

        DLA 3.13 (JetPack 6) does.
        """
        return self.version >= (8, 6)

    @property
    def table_number(self) -> int:
        """Version in the first line of a calibration table: 8502 for 8.5.2, 100300 for 10.3.0.

        If the user names no patch version, the patch of the newest JetPack with this version is
        used.
        """
        named = self.requested_version.split(".")[:3]
        numbers = [int(n) for n in named if n.isdigit()] or list(self.version)
        if not self.requested_version and self.version == (10, 0):
            numbers = list(_JETPACK_6)
        major, minor, *patches = numbers
        patch = patches[0] if patches else _JETPACK_PATCHES.get((major, minor), 0)
        thousands = 10_000 if self.version >= (10, 0) else 1000
        return major * thousands + minor * 100 + patch

    @property
    def is_jetpack(self) -> bool:
        """Whether the version that the user named is that of a JetPack."""
        numbers = tuple(int(n) for n in self.requested_version.split(".")[:3] if n.isdigit())
        has_patch = len(numbers) == 3 and _JETPACK_PATCHES.get(numbers[:2]) == numbers[2]
        return has_patch or numbers[:2] in _JETPACK_MINORS

    @property
    def has_super_mode(self) -> bool:
        """Whether a JetPack with Super mode (6.2 or later) can have this version: 10.3 or later."""
        release = version_numbers(self.requested_version)
        return self.version >= (10, 0) and (release is None or release >= _JETPACK_6)

    @property
    def has_local_functions(self) -> bool:
        """Whether the parser inlines functions of the model (onnx-tensorrt changelog, 9.0)."""
        return self.is_rtx or self._parser_version >= (9, 0)

    @property
    def has_bfloat16(self) -> bool:
        """Whether the parser reads bfloat16 (onnx-tensorrt changelog, 9.0)."""
        return self.is_rtx or self._parser_version >= (9, 0)

    @property
    def folds_identities(self) -> bool:
        """Whether an Identity may be between a constant and the zero point of a Q or DQ.

        TensorRT-RTX 1.7 accepts an Identity and no other operator. TensorRT 8.x rejects it
        (NVIDIA-AI-IOT/Lidar_AI_Solution issue 127).
        """
        return self.is_rtx or self._parser_version >= (9, 0)

    @property
    def _parser_version(self) -> tuple[int, ...]:
        return version_numbers(self.requested_version) or self.version

    @property
    def display_name(self) -> str:
        """Name for users: the requested version, else the target's name."""
        if not self.requested_version:
            return self.name
        suffix = STRONGLY_TYPED if self.name.endswith(STRONGLY_TYPED) else ""
        return f"{self.requested_version}{suffix}"

    @property
    def borrows_rules(self) -> bool:
        """Whether the version that the user named has no rules of its own, such as 9, 8.2 or 10.3.

        8.5.2 is a patch version of 8.5, which has rules. For 10.3, the rules of all TensorRT 10
        apply.
        """
        is_range = "." not in self.name  # trt10 covers 10.0 and later versions
        numbers = version_numbers(self.requested_version)
        return numbers is not None and (is_range or numbers != self.version)

    @property
    def borrowed_rules(self) -> str:
        """Text that names the rules for a version without its own rules; empty for others."""
        if not self.borrows_rules:
            return ""
        version = version_numbers(self.requested_version)
        count = sum(b.is_rule_source and version in b.versions for b in BUILDS.values())
        return (
            f"those of {self.name}: TensorRT {self.requested_version} has no rules of its own, so "
            f"the builds of this version may differ (the rules are based on {count or 'none'} of "
            "them)"
        )

    @property
    def rules_title(self) -> str:
        """Product and version whose rules apply: ``TensorRT 8.6`` if the user named 9."""
        return replace(self, requested_version="").title

    @property
    def title(self) -> str:
        """Product and version in words: ``TensorRT 10``, ``TensorRT-RTX 1.7``."""
        suffix = ", strongly typed" if self.name.endswith(STRONGLY_TYPED) else ""
        product = "TensorRT-RTX" if self.is_rtx else "TensorRT"
        return f"{product} {self.version_name}{suffix}"

    @property
    def version_name(self) -> str:
        """Version without the product: ``10``, ``10.3``, ``1.7``."""
        base = self.name.removesuffix(STRONGLY_TYPED)
        return self.requested_version or base.removeprefix("rtx").removeprefix("trt")

    @property
    def assumes_8x_cases(self) -> bool:
        """Whether cases count as assumed for this target if only builds of 8.x show them."""
        return self.version >= (9, 0)

    @property
    def is_rtx(self) -> bool:
        """Whether the target is a version of TensorRT-RTX."""
        return self.name.startswith("rtx")

    @property
    def has_int8(self) -> bool:
        """Whether the target has INT8.

        TensorRT-RTX has no INT8 if one of the compute capabilities is 7.5.
        """
        return not (self.is_rtx and 75 in self.capabilities)

    @property
    def has_fp8(self) -> bool:
        """Whether the target accepts FP8 quantizers: TensorRT 10 and later, and TensorRT-RTX."""
        return self.is_rtx or self.version >= _FIRST_FP8

    @property
    def has_fp8_convolutions(self) -> bool:
        """Whether convolutions can compute in FP8 (see :data:`_FIRST_FP8_CONVOLUTIONS`).

        On TensorRT 10.2 this holds for Hopper only. If no compute capability is named, Hopper is
        assumed.
        """
        if self.needs_hopper_for_fp8 and self.has_named_capability:
            return _HOPPER in self.capabilities
        return self.is_rtx or self._minor_version >= _FIRST_FP8_CONVOLUTIONS

    @property
    def needs_hopper_for_fp8(self) -> bool:
        """Whether convolutions compute in FP8 on Hopper (9.0) only, as in TensorRT 10.2."""
        version = self._minor_version
        is_between = _FIRST_FP8_CONVOLUTIONS <= version < _FIRST_FP8_BEYOND_HOPPER
        return is_between and not self.is_rtx

    @property
    def named_capability(self) -> str:
        """Compute capability that the user or a build named, such as ``8.9``; empty otherwise."""
        return format_capability(self.capabilities[0]) if self.has_named_capability else ""

    @property
    def has_fp8_product_channels(self) -> bool:
        """Whether FP8 weights of a matrix product may have a scale for each column."""
        return self.is_rtx or self._minor_version >= _FIRST_FP8_ATTENTION

    @property
    def fp8_head(self) -> int:
        """Largest head size for which an FP8 attention is known to be fused; 0 if none is fused."""
        is_fused = self.is_rtx or self._minor_version >= _FIRST_FP8_ATTENTION
        return self.largest_fp8_head if is_fused else 0

    @property
    def _minor_version(self) -> tuple[int, int]:
        """Version that the user named, else the highest minor version of the major version."""
        return version_numbers(self.requested_version) or (self.version[0], LAST_MINOR)

    @property
    def capability_names(self) -> list[str]:
        """Compute capabilities for which TensorRT-RTX builds; empty for classic TensorRT."""
        return [format_capability(c) for c in self.capabilities] if self.is_rtx else []

    def with_capability(self, capability: str, gpu: str = "", *, seen: bool = False) -> Target:
        """Return the target for one compute capability.

        Args:
            capability: Compute capability, such as ``8.6``.
            gpu: Name of a GPU with this compute capability, for the message.
            seen: Whether a build shows this compute capability, so that no check is needed.

        Raises:
            QdqtoolError: TensorRT-RTX cannot build for this compute capability.
        """
        number = int(capability.replace(".", ""))
        if self.buildable and number not in self.buildable and not seen:
            name = f" ({gpu})" if gpu else ""
            buildable = ", ".join(format_capability(c) for c in self.buildable)
            raise QdqtoolError(
                f"{self.name} cannot build for compute capability "
                f"{format_capability(number)}{name}, only for {buildable}. Choose another GPU, or "
                "a TensorRT version that supports this GPU (`target`)",
                code="unsupported",
                parameter="gpu",
            )
        return replace(self, capabilities=(number,), has_named_capability=True)

    def for_fp8(self) -> Target:
        """Return the target for a model with FP8.

        For TensorRT-RTX, the default compute capability becomes 8.9, unless the user or a build
        named another. A weakly typed target becomes strongly typed, as NVIDIA advises for FP8
        (NVIDIA/TensorRT issue 3987), unless a build shows that it is weakly typed.
        """
        if self.is_rtx:
            is_named = self.has_named_capability
            return self if is_named else replace(self, capabilities=DEFAULT_FP8_SM)
        if self.strongly_typed or self.has_built_typing or not self.has_fp8:
            return self
        return replace(strongly_typed(self), is_typed_for_fp8=True)


_TRT10 = Target(
    "trt10",
    (10, 0),
    Evidence.ASSUMED,
    "outcomes seen in a YOLOv8n (10.14.1), small graphs and matrix products (10.3); pass lines as "
    "on 8.5",
    residual_proof=_APART_10,
    multiply_in_pointwise_name=True,
    deconvolution_3d_float=True,
    constants_first=True,
    float16_scales=True,
    blocked_scales=True,
    layer_normalization=True,
    int8_weights=True,
    fuses_quantized_relu=True,
    copies_moved_dq=True,
    merges_beside_floats=False,
    sums_into_first=True,
    reshapes_before_resize=True,
    products_in_myelin=True,
    regions=True,
)
TARGETS: dict[str, Target] = {
    t.name: t
    for t in sorted(
        (
            Target(
                "trt8.0",
                (8, 0),
                Evidence.SEEN,
                "outcomes seen in one engine listing (CenterNet, no pass lines); passes as seen "
                "on 8.5",
                merges_parallel=False,
                fuses_stem_pool=False,
                keeps_relu_name=True,
                quantize_suffix="_quantize_scale_node",
                has_seen_deconvolution=True,
                uint8_inputs=False,
            ),
            Target(
                "trt8.4",
                (8, 4),
                Evidence.SEEN,
                "pass lines seen in excerpts of one YOLOv8-style log; outcomes in published "
                "engines",
                uint8_inputs=False,
            ),
            Target(
                "trt8.5",
                (8, 5),
                Evidence.SEEN,
                "rules seen in three complete build logs (8.5.2 twice, 8.5.10) and four published "
                "engines",
                int8_weights=True,
            ),
            Target(
                "trt8.6",
                (8, 6),
                Evidence.SEEN,
                "every line of the Q/DQ passes seen in one complete build log (8.6.0), the same "
                "as on 8.5.2",
                layer_normalization=True,
                int8_weights=True,
                regions=True,
            ),
            _TRT10,
            replace(
                _TRT10,
                name="trt11",
                version=(11, 0),
                proof="strongly typed; INT8 outcomes as documented; no 11.x log with Q/DQ pass "
                "lines was available",
                strongly_typed=True,
                residual_through_activation=True,
                residual_proof=_FUSED_11,
                copies_dq=True,
            ),
            Target(
                "rtx1.7",
                (1, 7),
                Evidence.SEEN,
                "rules found by experiment with TensorRT-RTX 1.7.1 itself",
                strongly_typed=True,
                largest_fp8_head=80,
                float16_scales=True,
                blocked_scales=True,
                layer_normalization=True,
                int8_weights=True,
                # The members of ComputeCapability in 1.7.1. NVIDIA's support matrix
                # (docs.nvidia.com/deeplearning/tensorrt-rtx, 1.5) lists 7.5, 8.6, 8.9, 12.0 and
                # 12.1; the library builds for 8.0 as well.
                buildable=(75, 80, 86, 89, 120, 121),
            ),
        ),
        key=lambda t: (t.is_rtx, t.version),
    )
}

RTX = max((t for t in TARGETS.values() if t.is_rtx), key=lambda t: t.version)
"""The newest known TensorRT-RTX."""


def format_capability(capability: int) -> str:
    """Return the usual form of a compute capability: ``8.6`` for 86."""
    return f"{capability // 10}.{capability % 10}"


def target_before(name: str) -> Target | None:
    """Return the nearest earlier target of the same kind (classic TensorRT or RTX).

    None if the target is the earliest of its kind, or if the name is unknown.
    """
    target = TARGETS.get(name)
    if target is None:
        return None
    same_kind = [t for t in TARGETS.values() if t.is_rtx == target.is_rtx]
    earlier = [t for t in same_kind if t.version < target.version]
    return max(earlier, key=lambda t: t.version, default=None)


_JETPACK_6 = (10, 3)  # version in calibration tables if the user names only TensorRT 10
# Patch version of TensorRT in the newest JetPack, by major and minor version; 0 for others.
_JETPACK_PATCHES = {(8, 0): 1, (8, 2): 1, (8, 4): 1, (8, 5): 2, (8, 6): 2}
# Versions of JetPack 6.1 and later, with any patch version.
_JETPACK_MINORS = (_JETPACK_6, (10, 7))
LAST_MINOR = 19  # larger than every minor version so far
STRONGLY_TYPED = "-strongly-typed"  # name suffix of targets of TensorRT 10 with strong typing
_VERSION = re.compile(r"(?:trt|tensorrt)?[ -]?v?(\d{1,2}(?:\.\d{1,4}){0,3})")


def target_named(name: str | Target) -> Target:
    """Return the target for a name, or the target with the nearest rules for a version.

    Args:
        name: Name such as ``trt8.5``, version such as ``10.3`` or ``8.5.2``, or a target.

    Raises:
        QdqtoolError: The target is unknown.
    """
    if isinstance(name, Target):
        return name
    text = name.lower().strip()
    base = text.removesuffix(STRONGLY_TYPED)
    target = TARGETS.get(base) or _find_by_version(base)
    if target is None:
        raise QdqtoolError(
            f"unknown target '{name}'. Choose one of {', '.join(TARGETS)}, "
            "or a TensorRT version such as 10.3",
            code="unknown-choice",
            parameter="target",
        )
    if base == text:
        return target
    return strongly_typed(target, f"`target={name}`", parameter="target")


def _find_by_version(text: str) -> Target | None:
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    version = match[1]
    try:
        target = target_of_version(version)
    except VersionError:
        return None
    if int(version.partition(".")[0]) > max(t.version[0] for t in TARGETS.values()):
        return None  # a typing error (85), or a version that does not exist yet
    is_range = "." not in target.name and "." in version  # trt10 covers 10.0 and later versions
    if version_numbers(version) == target.version and version.count(".") < 2 and not is_range:
        return target
    named = replace(target, requested_version=version)
    if not named.borrows_rules:  # only the patch version was added to the name of the target
        return named
    proof = f"{version} is predicted with the nearest rules, those of {target.name}; {target.proof}"
    return replace(named, proof=proof)


def strongly_typed(
    target: Target,
    request: str = "`strongly_typed`",
    *,
    parameter: str = "strongly_typed",
) -> Target:
    """Return the target for a strongly typed network (``--stronglyTyped``).

    In such a network, float tensors have the types of the ONNX file.

    Args:
        target: The target.
        request: Option by which the user requests the strongly typed network, for the message.
        parameter: Name of the parameter of this option, for the message.

    Raises:
        QdqtoolError: The version is earlier than TensorRT 10.
    """
    if target.strongly_typed:
        return target
    if not target.has_strong_typing:
        raise QdqtoolError(
            f"{request}: {target.name} has no strongly typed networks. Use TensorRT 10 or newer",
            code="unsupported",
            parameter=parameter,
        )
    return replace(target, name=target.name + STRONGLY_TYPED, strongly_typed=True)


def without_fp8_typing(target: Target) -> Target:
    """Return the target of networks without FP8: :meth:`Target.for_fp8` undone.

    A target that the user or the version makes strongly typed is returned unchanged.
    """
    if not target.is_typed_for_fp8:
        return target
    name = target.name.removesuffix(STRONGLY_TYPED)
    return replace(target, name=name, strongly_typed=False, is_typed_for_fp8=False)


class TrtexecSupport(NamedTuple):
    """Options that the trtexec of a version has.

    Attributes:
        lists_layers: ``--dumpLayerInfo``, ``--exportLayerInfo`` and ``--profilingVerbosity`` (8.2
            and later).
        precision_flags: ``--int8``, ``--fp16`` and similar flags (before 11).
        layer_types: ``--layerPrecisions`` and ``--layerOutputTypes`` (8.4 to 10).
    """

    lists_layers: bool
    precision_flags: bool
    layer_types: bool


def trtexec_of_version(version: str) -> TrtexecSupport | None:
    """Return the options of a TensorRT version's trtexec; None if the text is not a version."""
    numbers = version_numbers(version)
    return None if numbers is None else _trtexec_support(numbers)


def _trtexec_support(version: tuple[int, int]) -> TrtexecSupport:
    has_types = (8, 4) <= version < (11, 0)
    return TrtexecSupport(version >= (8, 2), version < (11, 0), has_types)


def version_numbers(version: str) -> tuple[int, int] | None:
    """Return the major and minor number of ``8.5.2``; None if the text is not a version."""
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1]) if len(parts) > 1 else 0
    except ValueError:
        return None


def target_of_version(version: str) -> Target:
    """Return the target whose rules apply to a TensorRT version: the latest that is not newer.

    Args:
        version: Version such as ``8.5.2`` or ``10.3.0``.

    Raises:
        VersionError: The text is not a version, or the version is earlier than 8.0.
    """
    numbers = version_numbers(version)
    if numbers is None:
        raise VersionError(
            f"'{version}' is not a TensorRT version. Use a version such as 10.3",
            code="wrong-version",
        )
    candidates = [t for t in TARGETS.values() if not t.is_rtx and t.version <= numbers]
    if not candidates:
        raise VersionError(
            f"TensorRT {version} does not support Q/DQ. Use TensorRT 8.0 or newer",
            code="version-too-old",
        )
    return max(candidates, key=lambda t: t.version)


class PublishedBuild(NamedTuple):
    """A published TensorRT build that cases and targets cite as evidence.

    Attributes:
        name: Name that cases use.
        tensorrt: TensorRT version, such as ``8.5.2``, or ``8.4 or 8.5`` if only this is known.
        gpu: GPU of the build; empty if unknown.
        flags: Options of the builder.
        network: Network that was built.
        source: Publisher and place.
        parts: Published parts, such as the log or the engine's layers.
        graph: Whether the ONNX graph could be reconstructed. The tests then compare the simulation
            with the build.
        is_rule_source: Whether rules were derived from the build.
    """

    name: str
    tensorrt: str
    gpu: str
    flags: str
    network: str
    source: str
    parts: str
    graph: bool
    is_rule_source: bool

    @property
    def versions(self) -> list[tuple[int, int] | None]:
        """Major and minor numbers of the versions; empty if only the major number is known."""
        return [version_numbers(text) for text in re.findall(r"\b\d+\.\d+", self.tensorrt)]


_ROWS: list[dict[str, Any]] = [*read_rows(Path(__file__).with_name("builds.tsv"))]
BUILDS: dict[str, PublishedBuild] = {
    row["name"]: PublishedBuild(
        **{**row, "graph": row["graph"] == "yes", "is_rule_source": row["is_rule_source"] == "yes"}
    )
    for row in _ROWS
}
