"""What differs between TensorRT versions, in one table, and how well each entry is proven.

No pass asks for a version; it reads the properties of its :class:`Target`.

The builds that prove the entries are in ``qdqtool/knowledge/builds.tsv``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qdqtool.base.records import record, replaced
from qdqtool.base.said import said
from qdqtool.errors import QdqtoolError, VersionError
from qdqtool.knowledge import tables
from qdqtool.types import Evidence

DEFAULT_TARGET = "trt10"  # what users install today, with JetPack 6 and 7
DEFAULT_SM = (86,)  # compute capabilities that TensorRT-RTX builds for, and is predicted for

# What is known of Conv + activation + Add, by version. Nobody has shown a log of either.
_APART_8 = "users saw them apart on 8.4 and 8.5 (NVIDIA/TensorRT issues 2204, 3861)"
_APART_10 = (
    "a user saw them apart on 10.6 (NVIDIA/TensorRT issue 3861), though ModelOpt has placed Q/DQ for the fused form "
    "since 2025-10"
)
_FUSED_11 = "ModelOpt has placed Q/DQ for the fused form since 2025-10 (pull request 450); no build was available"


@record
class Target:
    """One TensorRT version (or range of versions that behave alike).

    Attributes:
        name: What users call it.
        version: Major and minor version.
        evidence: How well the Q/DQ rules as a whole are proven on it.
        proof: The same in a sentence, shown with every prediction.
        asked: The version that a user named, where this target answers for it; empty otherwise.
        strongly_typed: Float tensors have their ONNX type; the builder does not choose.
        merges_parallel: Convolutions of equal shape on one input become one layer (``A || B``).
        fuses_stem_pool: The stem convolution takes the MaxPool behind it.
        keeps_relu_name: A Relu folded with its BatchNormalization stays in the layer name.
        quantize_suffix: What is appended to a weight Q's name in layer names.
        residual_through_activation: Conv+SiLU+Add fuse with a quantized skip, as Conv+Add does.
        residual_proof: Why that is taken to be so.
        multiply_in_pointwise_name: Names of fused SiLU: ``PWN(PWN(s), PWN(m))`` instead of ``PWN(s, m)``.
        constants_first: A constant number is named inside the pointwise layer that takes it in, as in 10.x.
        float16_scales: A Q/DQ scale may be float16.
        blocked_scales: A scale may have several dimensions (blocks of weights).
        needs_zero_point: DequantizeLinear must have its third input.
        int8_weights: int8 weights with a DQ only are accepted.
        uint8_inputs: The network's inputs may be UINT8, read by a Cast (release notes of 8.5: kUINT8).
        products_in_myelin: Matrix products, Softmax and normalizations run in Myelin, with the Q and DQ around.
        copies_dq: A DQ with several readers is copied for each operator that it can pass.
        regions: Attention and normalization are regions of few kernels; for times alone.
        capabilities: Compute capabilities that TensorRT-RTX builds for, 86 for 8.6; what they lack together decides.
        buildable: All that it can build for; empty where the builder says that itself, on the GPU that it runs on.
        layer_normalization: Its parser takes LayerNormalization (INormalizationLayer), whose sums are FP32.
        deconvolution_seen: An INT8 ConvTranspose was seen in a build of this version.
        transposed_per_channel: A ConvTranspose is proven to take weight scales along axis 1, one for each output
            channel. On none so far: NVIDIA's answers differ (axis 0 for TensorRT 8 in issue 1694, per input channel in
            the kernels and no support per output channel in issue 2380; issue 1519 does not build with axis 1 on 8.0.1,
            issue 1699 computes wrongly), and newer toolkits write axis 1 with no available build that shows it.
    """

    name: str
    version: tuple[int, int]
    evidence: Evidence
    proof: str
    asked: str = ""
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
    needs_zero_point: bool = True
    int8_weights: bool = False
    uint8_inputs: bool = True
    deconvolution_seen: bool = False
    transposed_per_channel: bool = False
    copies_dq: bool = False
    products_in_myelin: bool = False
    regions: bool = False
    layer_normalization: bool = False
    capabilities: tuple[int, ...] = DEFAULT_SM
    buildable: tuple[int, ...] = ()

    @property
    def trtexec(self) -> Trtexec:
        """What its trtexec takes."""
        return _trtexec(self.version)

    @property
    def given(self) -> str:
        """What names it to a user: the version that was asked for, else its own name."""
        suffix = STRONGLY_TYPED if self.name.endswith(STRONGLY_TYPED) else ""
        return f"{self.asked}{suffix}" if self.asked else self.name

    @property
    def has_marks(self) -> bool:
        """Whether what only 8.x shows is assumed on it."""
        return self.version >= (9, 0)

    @property
    def is_rtx(self) -> bool:
        return self.name.startswith("rtx")

    @property
    def has_int8(self) -> bool:
        """Whether it has INT8 on all GPUs that it builds for: TensorRT-RTX has none on 7.5."""
        return not (self.is_rtx and 75 in self.capabilities)

    @property
    def told(self) -> list[str]:
        """The compute capabilities that a prediction for it is of, as NVIDIA writes them; none but for TensorRT-RTX."""
        return [dotted(c) for c in self.capabilities] if self.is_rtx else []

    def built_for(self, capability: str, gpu: str = "", *, seen: bool = False) -> Target:
        """The same for GPUs of one compute capability (``8.6``), which TensorRT-RTX alone is told.

        ``gpu`` is the name of such a GPU, for the message; ``seen`` says that there is a build for it.

        Raises:
            QdqtoolError: TensorRT-RTX cannot build for it.
        """
        number = int(capability.replace(".", ""))
        if not self.is_rtx or self.capabilities == (number,):
            return self
        if self.buildable and number not in self.buildable and not seen:
            raise QdqtoolError(
                said(
                    "{target} cannot build for compute capability {cc}{name}, only for {known:joined , }; name such a GPU, "
                    "or a TensorRT that builds for yours ({`target`})",
                    target=self.name,
                    cc=dotted(number),
                    name=said(" ({gpu})", gpu=gpu) if gpu else "",
                    known=[dotted(c) for c in self.buildable],
                ),
                code="unsupported",
                parameter="gpu",
            )
        return replaced(self, capabilities=(number,))


_TRT10 = Target(
    "trt10",
    (10, 0),
    Evidence.ASSUMED,
    "outcomes seen in a YOLOv8n (10.14.1), small graphs and matrix products (10.3); pass lines as on 8.5",
    residual_proof=_APART_10,
    multiply_in_pointwise_name=True,
    constants_first=True,
    float16_scales=True,
    blocked_scales=True,
    needs_zero_point=False,
    layer_normalization=True,
    int8_weights=True,
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
                "outcomes seen in one engine listing (CenterNet, no pass lines); passes as seen on 8.5",
                merges_parallel=False,
                fuses_stem_pool=False,
                keeps_relu_name=True,
                quantize_suffix="_quantize_scale_node",
                deconvolution_seen=True,
                uint8_inputs=False,
            ),
            Target(
                "trt8.4",
                (8, 4),
                Evidence.SEEN,
                "pass lines seen in excerpts of one YOLOv8-style log; outcomes in published engines",
                uint8_inputs=False,
            ),
            Target(
                "trt8.5",
                (8, 5),
                Evidence.SEEN,
                "rules seen in three complete build logs (8.5.2 twice, 8.5.10) and four published engines",
                int8_weights=True,
            ),
            Target(
                "trt8.6",
                (8, 6),
                Evidence.SEEN,
                "every line of the Q/DQ passes seen in one complete build log (8.6.0), the same as on 8.5.2",
                layer_normalization=True,
                int8_weights=True,
                regions=True,
            ),
            _TRT10,
            replaced(
                _TRT10,
                name="trt11",
                version=(11, 0),
                proof="strongly typed; INT8 outcomes as documented; no 11.x log with Q/DQ pass lines was available",
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
                float16_scales=True,
                blocked_scales=True,
                needs_zero_point=False,
                layer_normalization=True,
                int8_weights=True,
                # What ComputeCapability of 1.7.1 has. NVIDIA's support matrix (docs.nvidia.com/deeplearning/tensorrt-rtx,
                # 1.5) lists 7.5, 8.6, 8.9, 12.0 and 12.1; for 8.0 the library builds as well.
                buildable=(75, 80, 86, 89, 120, 121),
            ),
        ),
        key=lambda t: (t.is_rtx, t.version),
    )
}

RTX = max((t for t in TARGETS.values() if t.is_rtx), key=lambda t: t.version)
"""The newest TensorRT-RTX that is known."""


def dotted(capability: int) -> str:
    """``8.6`` for 86."""
    return f"{capability // 10}.{capability % 10}"


def target_before(name: str) -> Target | None:
    """The nearest earlier target of the same kind; None for the first, and where there is none of that name."""
    mine = TARGETS.get(name)
    earlier = (
        t for t in TARGETS.values() if mine and t.is_rtx == mine.is_rtx and t.version < mine.version
    )
    return max(earlier, key=lambda t: t.version, default=None)


_LAST = 19  # a major version that may come; what is larger is a typing error (85)
STRONGLY_TYPED = "-strongly-typed"  # behind a target's name, where it is a choice (TensorRT 10)
_VERSION = re.compile(r"(?:trt|tensorrt)?[ -]?v?(\d{1,2}(?:\.\d{1,4}){0,3})")


def target_named(name: str | Target) -> Target:
    """The target of that name, or for a TensorRT version (``10.3``, ``8.5.2``) the one with the nearest rules.

    Raises:
        QdqtoolError: There is none.
    """
    if isinstance(name, Target):
        return name
    text = name.lower().strip()
    base = text.removesuffix(STRONGLY_TYPED)
    found = TARGETS.get(base) or _of_version(base)
    if found is None:
        raise QdqtoolError(
            f"unknown target '{name}'; choose one of {', '.join(TARGETS)}, or a TensorRT version such as 10.3",
            code="unknown-choice",
            parameter="target",
        )
    if base == text:
        return found
    return strongly_typed(found, said("{`target`:{name}}", name=name), parameter="target")


def _of_version(text: str) -> Target | None:
    match = _VERSION.fullmatch(text)
    if match is None:
        return None
    try:
        found = target_of_version(match[1])
    except VersionError:
        return None
    if int(match[1].partition(".")[0]) > _LAST:
        return None
    if version_numbers(match[1]) == found.version and match[1].count(".") < 2:
        return found
    proof = f"{match[1]} is answered by the nearest rules, those of {found.name}; {found.proof}"
    return replaced(found, asked=match[1], proof=proof)


def strongly_typed(
    target: Target,
    given: str = said("{`strongly_typed`}"),
    *,
    parameter: str = "strongly_typed",
) -> Target:
    """The target with a strongly typed network: floats have the types of the file (``--stronglyTyped``).

    Args:
        target: The target.
        given: What the user wrote, for the message.
        parameter: Parameter that asks for it.

    Raises:
        QdqtoolError: The version has no such networks.
    """
    if target.strongly_typed:
        return target
    if target.version < (10, 0):
        raise QdqtoolError(
            said(
                "{given}: {target} has no such networks; TensorRT 10 was the first",
                given=given,
                target=target.name,
            ),
            code="unsupported",
            parameter=parameter,
        )
    return replaced(target, name=target.name + STRONGLY_TYPED, strongly_typed=True)


@record
class Trtexec:
    """What the trtexec of a version takes.

    Attributes:
        lists_layers: ``--dumpLayerInfo``, ``--exportLayerInfo`` and ``--profilingVerbosity`` (8.2 and later).
        precision_flags: ``--int8``, ``--fp16`` and the like; gone in 11, where layers are always timed in a run of
            their own.
    """

    lists_layers: bool
    precision_flags: bool


def trtexec_of_version(version: str) -> Trtexec | None:
    """What the trtexec of a TensorRT version takes; None where the text is no version."""
    found = version_numbers(version)
    return None if found is None else _trtexec(found)


def _trtexec(version: tuple[int, int]) -> Trtexec:
    return Trtexec(version >= (8, 2), version < (11, 0))


def version_numbers(version: str) -> tuple[int, int] | None:
    """Major and minor number of ``8.5.2``; None where the text is no version."""
    try:
        numbers = [int(p) for p in version.split(".")[:2]]
    except ValueError:
        return None
    return (numbers[0], numbers[1] if len(numbers) > 1 else 0) if numbers else None


def target_of_version(version: str) -> Target:
    """The target whose rules fit a TensorRT version such as ``8.5.2`` or ``10.3.0``: the nearest one at or below.

    Raises:
        VersionError: The text is no version, or one older than 8.0.
    """
    found = version_numbers(version)
    if found is None:
        raise VersionError(f"'{version}' is not a TensorRT version", code="wrong-version")
    candidates = [t for t in TARGETS.values() if not t.is_rtx and t.version <= found]
    if not candidates:
        raise VersionError(
            f"TensorRT {version} is older than 8.0, which was the first with Q/DQ",
            code="version-too-old",
        )
    return max(candidates, key=lambda t: t.version)


@record
class Build:
    """One build.

    Attributes:
        name: As cases name it.
        tensorrt: Version.
        gpu: What it was built for; empty where that is not stated.
        flags: What the builder was given.
        network: What was built.
        source: Who published it, and where.
        parts: What of it is available.
        graph: Whether the ONNX graph behind it could be rebuilt, so that the tests hold the simulator to it.
        made_rules: Whether rules were made while looking at it.
    """

    name: str
    tensorrt: str
    gpu: str
    flags: str
    network: str
    source: str
    parts: str
    graph: bool
    made_rules: bool


_ROWS: list[dict[str, Any]] = [*tables.rows(Path(tables.__file__).with_name("builds.tsv"))]
BUILDS: dict[str, Build] = {
    row["name"]: Build(
        **{**row, "graph": row["graph"] == "yes", "made_rules": row["made_rules"] == "yes"}
    )
    for row in _ROWS
}
