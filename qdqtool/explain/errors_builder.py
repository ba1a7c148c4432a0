"""What the optimizer and the builder say when a build fails."""

from __future__ import annotations

from qdqtool.explain.errors_entry import ERROR, WARNING, KnownError

BUILDER: tuple[KnownError, ...] = (
    KnownError(
        "links-regions", "A check of the graph fails inside TensorRT",
        r"checkSanity\.cpp::checkLinks|Graph::regions",
        ERROR,
        "TensorRT's own graph is inconsistent behind an optimization: a bug of that version. Seen with the tail of "
        "YOLO26 "
        "(TopK, no NMS) on 10.3, the version of JetPack 6; Q/DQ is not its cause.",
        "Build with TensorRT 10.7 or later (JetPack 6 takes it as an upgrade), or export the network without its "
        "post-processing.",
        "ultralytics pull request 24368",
        versions="10.3",
        fixed="10.7 builds it (ultralytics pull request 24368)",
    ),
    KnownError(
        "half-float-mismatch", "Activation and weights of different float types",
        r"Half activation and Float kernel mismatch|Float activation and Half kernel mismatch",
        ERROR,
        "A convolution's data is FP16 and its weights are FP32 (or the other way round): one DQ has an FP16 scale and "
        "the "
        "other an FP32 one, or a part of the model was converted. A strongly typed network does not convert by itself.",
        "Convert scales and weights of a convolution together: 'qdqtool insert --high-precision fp16' and 'qdqtool fix "
        "--only FLOAT-FP32' do.",
        "the builder's check of strongly typed networks, 10 and later",
        codes=("FLOAT-MIXED",),
        versions="10 and later",
    ),
    KnownError(
        "weights-not-folded", "Quantized weights that cannot be folded into their convolution",
        r"reportWeightlessTwoInputConvolutionAsError|Could not fuse 2nd input \(kernel weights\)",
        ERROR,
        "The quantized weights of a convolution could not be folded into it: two convolutions share them, their Q is a "
        "graph output, or something that is no constant stands in front of the Q.",
        "Give each convolution its own weights and fold Identity, Cast and Reshape in front of the Q: 'qdqtool fix'.",
        "issues 1864, 2131",
        ("W-SHARED", "W-NONCONST", "W-Q-OUTPUT"),
        versions="seen on 8.2.3 and 8.4.1",
    ),
    KnownError(
        "weights-pattern", "A failed fusion of quantized weights",
        r"Assertion matchPattern\(|fusePattern.{0,200}matchPattern",
        ERROR,
        "TensorRT 8.5 failed while fusing quantized weights into a layer.",
        "Fold what stands between the weights and their Q ('qdqtool fix'), or build with a newer TensorRT.",
        "issue 2719",
        ("W-NONCONST",),
        versions="seen on 8.5",
    ),
    KnownError(
        "no-implementation", "No kernel for a fused layer",
        r"Could not find any implementation for node",
        ERROR,
        "No kernel of this GPU and version runs the fused layer in the precision that its Q/DQ asks for. Usual cases: "
        "depthwise convolution with SiLU (8.5) or followed by Add (before 10), INT8 on compute capability 7.5, "
        "quantized ConvTranspose before 8.5, or too small a workspace.",
        "Leave the Q/DQ of the named convolution out, raise the workspace (--memPoolSize=workspace:...), or build with "
        "a newer TensorRT.",
        "issues 3385, 4060, 2280; documentation, 'Q/DQ limitations'",
    ),
    KnownError(
        "pointwise-out-scales", "A pointwise output read with different scales",
        r"Assertion outScales\.size\(\) == 1",
        ERROR,
        "The output of one pointwise layer is read by Qs with different scales.",
        "Give the Qs on that tensor one scale ('qdqtool insert' ties them), or move one behind its own node.",
        "issue 2664",
        ("CONCAT-SCALE",),
        versions="seen on 8.5",
    ),
    KnownError(
        "same-expr", "Q/DQ on both inputs of an Add",
        r"sameExprValues|Assertion lhs\.expr failed",
        ERROR,
        "TensorRT 8.0 cannot fuse an Add with Q/DQ on both inputs behind a Relu.",
        "Keep the Q/DQ on the residual input alone, or build with a newer TensorRT.",
        "issue 1574",
        ("ADD-BOTH",),
        versions="seen on 8.0",
    ),
    KnownError(
        "marked-int8", "An operator without an INT8 kernel",
        r"candidateRequirements\.empty\(\)|incorrectly marked as an int8 node",
        ERROR,
        "An operator got an INT8 input and has no INT8 kernel.",
        "Remove the Q/DQ in front of that operator, or build with TensorRT 9.0 or newer.",
        "issues 3040, 2535",
        versions="seen on 8.5 and 8.6",
        fixed="for the model of issue 3040 (MobileNetV2, 8.6.1) NVIDIA named 9.0",
    ),
    KnownError(
        "copying-leaf", "A Q/DQ pattern that early versions cannot build",
        r"asCopyingLeafNode\(\)",
        ERROR,
        "A Q/DQ pattern that TensorRT 8.0 to 8.2 cannot build. In one model it was a BatchNormalization in front of a "
        "MaxPool with the pair behind the pooling only.",
        "Build with TensorRT 8.4 or newer. On 8.2 NVIDIA's advice was a pair between BatchNormalization and MaxPool.",
        "issues 1337, 2030 (8.2.2)",
        versions="seen on 8.0 and 8.2",
    ),
    KnownError(
        "int8-flag", "Q/DQ without --int8",
        r"int8 is not configured in the builder|Int8 precision has been set for a layer",
        ERROR,
        "The model has Q/DQ, and the weakly typed builder (up to TensorRT 10) was not told to use INT8.",
        "Add --int8 (and --fp16 for what stays float).",
        "issue 4021",
        versions="to 10",
    ),
    KnownError(
        "dla-qdq", "Q/DQ on DLA",
        r"_quantizer/Constant\S* is not supported on DLA|QuantizeLinear\S* is not supported on DLA|"
        r"DLA.{0,60}(?:de)?quantize",
        ERROR,
        "DLA takes no Q/DQ model.",
        "Build for the GPU, or give DLA a calibration cache instead of Q/DQ.",
        "issue 2222",
    ),
    KnownError(
        "workspace", "Too little memory for fast kernels",
        r"do not have sufficient workspace|insufficient memory on requested size|"
        r"Skipping tactic .{0,60}insufficient memory|OutOfMemory|out of memory",
        WARNING,
        "Fast kernels were passed over because the workspace or the GPU's memory was too small.",
        "Raise it: --memPoolSize=workspace:<MiB> (8.4 and later), --workspace=<MiB> (before), and free GPU memory.",
        "documentation",
    ),
)
