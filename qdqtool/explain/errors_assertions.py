"""Assertions and internal errors of the builder that users met with quantized models, one entry for each text.

What NVIDIA said is told as such; where nobody said why, ``unknown`` says so.
"""

from __future__ import annotations

from qdqtool.explain.errors_entry import ERROR, WARNING, KnownError

ASSERTIONS: tuple[KnownError, ...] = (
    KnownError(
        "negative-axis", "A Q or DQ without a usable axis",
        r"unexpected negative axis",
        ERROR,
        "A Q or DQ has more than one scale, or a scale of one dimension, and no axis, or a negative one. Seen where "
        "the layer was added through the network API without setting its axis; a scale of shape [1] needs one as well.",
        "Give the Q and DQ their axis (0 to rank - 1): layer.axis in the API, the attribute 'axis' in ONNX; or make a "
        "per-tensor scale a scalar (shape []).",
        "issue 1362",
        versions="seen on 8.0",
    ),
    KnownError(
        "no-cost", "A layer that no kernel could be timed for",
        r"n\d+->cost\.empty\(\)|\bcost\.empty\(\) failed",
        ERROR,
        "After timing, the optimizer found a layer (often without a name) for which no kernel had worked. Reported for "
        "quantized transformers: the matrix products that go to cuBLASLt or Myelin, and the layers beside plugins.",
        "Look above for 'Skipping tactic' and memory lines of the last layer timed. Then try, one at a time: more "
        "workspace (--memPoolSize=workspace:...), a newer TensorRT, other tactic sources "
        "(--tacticSources=-CUBLAS_LT), and leaving the Q/DQ in front of the last layer out.",
        "issues 4600 (8.4, Orin, open), 1746",
        versions="seen on 8.2 and 8.4",
        unknown="Which layer it is: the text leaves the node's name empty. NVIDIA gave no cause in issue 4600.",
    ),
    KnownError(
        "range-order", "An internal range that ends before it begins",
        r"Assertion start <= stop failed",
        ERROR,
        "An internal error of the optimizer, reported for a quantized vision transformer.",
        "Build with the newest TensorRT. If it stays: fold constants ('polygraphy surgeon sanitize "
        "--fold-constants'), give static shapes, and leave Q/DQ out of the attention blocks to see which one it is.",
        "issue 3139 (8.6; labelled as tracked by NVIDIA as an internal bug)",
        versions="seen on 8.6",
        unknown="What in the model provokes it, and which version repairs it.",
    ),
    KnownError(
        "zero-scale-bias", "A scale of zero",
        r"quantizeBiasCommon|Assertion getter\(i\) != 0",
        ERROR,
        "While quantizing a bias, TensorRT divides by a scale that is 0: a zero in the calibration table (a tensor "
        "that was zero, or nearly, for all calibration images), or a zero scale of weights.",
        "With a calibration table: find the entries 00000000 in it, and calibrate with real images, or give those "
        "tensors a small positive range. With Q/DQ: 'qdqtool fix' replaces zero scales.",
        "issues 3020 (NVIDIA reproduced a 0 scale in the cache), 2984, 4446",
        ("SCALE-NONPOS",),
        versions="seen on 8.6 and 10; 8.0 and 8.4 built the same models",
    ),
    KnownError(
        "plugin-scale", "A plugin with an INT8 input of many scales, or none",
        r"getInputHostScale|getOutputHostScale|Assertion scales\.size\(\) == 1",
        ERROR,
        "A plugin takes an INT8 tensor, and that tensor has not exactly one scale: a per-channel DQ stands in front of "
        "the plugin, or (with a calibration table) the tensor has no range.",
        "Give the plugin's inputs and outputs per-tensor scales or calibration ranges, or keep it float: no Q/DQ in "
        "front of it, and supportsFormatCombination without kINT8.",
        "issues 2462, 2621 (NVIDIA: the plugin's INT8 scale is not set correctly)",
        versions="seen on 8.3",
    ),
    KnownError(
        "infer-types", "Myelin finds no rule for the types of an operation",
        r"Could not infer output types for operation|No matching rules found for input operand types",
        ERROR,
        "Inside a region that Myelin compiles, an operation has operands of types that go together in no rule: a Q or "
        "DQ whose scale has another float type than its data (FP32 data with an FP16 scale), or a type that this GPU "
        "does not know (FP8 before compute capability 8.9).",
        "Give scales the float type of the data around them. For FP8, build for compute capability 8.9 or newer. Else "
        "leave out the Q/DQ of the named operation, or try another TensorRT.",
        "issues 4832 (10.16, Orin; the same file builds on Thor), 2131; Model-Optimizer issue 118 (FP8)",
        versions="seen on 8.4 and 10",
        unknown="Why the same model builds on one GPU and not on another (issue 4832 is open).",
    ),
    KnownError(
        "scale-layer-count", "A Scale layer with another number of scales than channels",
        r"numScales == mGlobRefs\.scale\.count\(\)",
        ERROR,
        "A DQ of an activation stayed as a Scale layer, and its per-channel scales do not fit. Met with "
        "ModelOpt's INT8_SMOOTHQUANT_CFG on a ResNet-18, at the quantizer of the MaxPool.",
        "Quantize activations per tensor: for convolutional networks ModelOpt's INT8_DEFAULT_CFG, not SmoothQuant, "
        "which is made for transformers. Leave out the Q/DQ in front of a pooling.",
        "issue 4008, Model-Optimizer issue 41",
        versions="seen on 8.6",
        unknown="Whether every per-channel activation scale ends like this.",
    ),
    KnownError(
        "output-scale", "A quantized layer whose output has no scale",
        r"combineInOutScale|isOutputSet\(0\)",
        ERROR,
        "Weights are converted to INT8 for a layer that is to write INT8 and has no output scale. Reported on a "
        "GTX 1660, a GPU with INT8 but without tensor cores.",
        "Build on or for a GPU with INT8 tensor cores, or with a newer TensorRT. Where neither can be: leave the Q/DQ "
        "out of the layers one block at a time to find the one.",
        "issue 3220 (8.5.3, GTX 1660 SUPER)",
        versions="seen on 8.5",
        unknown="Which pattern of Q/DQ provokes it, and whether the GPU alone decides.",
    ),
    KnownError(
        "scale-volume", "A number of scales that is neither one nor the output channels",
        r"vol == 1 \|\| vol == params\.nb|mCombinedScalesSize >= channelDst|Assertion vol == 1 failed",
        ERROR,
        "A kernel of a convolution or, mostly, of a transposed convolution got per-channel scales whose number is "
        "neither 1 nor that of its output channels. Transposed convolutions: TensorRT 8 counts scales along axis 0 "
        "of the weights, newer versions along axis 1, and grouped ones are not handled by every kernel.",
        "Give the ConvTranspose's weights one scale (per tensor), which every version takes. For a Conv the axis is 0.",
        "issues 3458, 4028 (10.0.1, CaskDeconvolution), 1694, 1519",
        ("CT-AXIS", "SCALE-COUNT"),
    ),
    KnownError(
        "no-weights-input", "An input that must be constant is computed",
        r"inputs\.at\(\d+\)\.is_weights\(\)|scales(?:_input)?\.is_weights\(\)|must be an initializer",
        ERROR,
        "The parser needs this input of the operator (counted from 0: a zero point, a scale, pads, a size) as a "
        "constant stored in the file, and it is computed by nodes.",
        "Fold constants: 'polygraphy surgeon sanitize model.onnx --fold-constants -o folded.onnx', or onnxsim; export "
        "with static shapes where the value depends on shapes.",
        "onnx-tensorrt faq.md (common assertion errors), issues 361, 682 there",
    ),
    KnownError(
        "int8-without-qdq", "Stored integers in a network without Q/DQ",
        r"matchInt8ConstantDQ|Int8 constant usage is restricted",
        ERROR,
        "The network has an INT8 constant, and no Q or DQ makes it an explicitly quantized one.",
        "Give the constant a DequantizeLinear. If the model is onnxruntime's integer format (ConvInteger, "
        "QLinearConv), quantize again in Q/DQ form: a plugin in its place meets this error.",
        "issue 2998 (a plugin in place of ConvInteger)",
        ("QOPERATOR",),
        versions="seen on 8.6",
    ),
    KnownError(
        "constant-before-dq", "Stored quantized weights that no DequantizeLinear reads directly",
        r"Quantized constant is only allowed before|matchQuantizedConstantPluginOrDQ",
        ERROR,
        "Weights are stored as INT8, INT4 or FP8, and what reads them is neither a DequantizeLinear nor a plugin: a "
        "Reshape, Transpose or Cast stands between.",
        "Put the node behind the DequantizeLinear, or fold it into the stored weights ('qdqtool fix'). For a plugin of "
        "version 3: build with 10.1 or newer.",
        "issue 3919 (plugins of version 3, 10.0); TensorRT-Edge-LLM issue 217 (a Reshape in front of the DQ)",
        ("WEIGHT-INDIRECT",),
        versions="10 and later",
        fixed="for plugins of version 3 in 10.1 (issue 3919)",
    ),
    KnownError(
        "broadcast", "Two shapes that belong together and differ",
        r"cannot broadcast with|Assertion dims1\.d\[i\] == 1",
        ERROR,
        "A vector, as a rule one value for each output channel (a bias or the scales of quantized weights), met an "
        "axis of another length: width or height instead of the channels. Every kernel of the layer fails at it, so "
        "that no implementation is left.",
        "Look at the axis of the layer's Q/DQ and at the rank of its weights and bias ('qdqtool predict' names axes "
        "that do not fit); export again, and try a newer TensorRT. More workspace does not help.",
        "Model-Optimizer issue 16 (a quantized ResNet-18, 10.0: 64 channels against a width of 224)",
        ("SCALE-COUNT", "W-AXIS"),
        versions="seen on 10.0",
        unknown="Which vector it is: no answer is public.",
    ),
    KnownError(
        "plugin-formats", "A plugin that takes none of the types offered to it",
        r"could not find any supported formats consistent with input/output data types",
        ERROR,
        "The plugin's supportsFormatCombination allows no combination of the types that its neighbours give and want. "
        "With Q/DQ: a pair in front of a plugin gives it float, since no Q or DQ is taken into a plugin.",
        "For a plugin that computes in INT8: Q in front of it and DQ behind it, with nothing between. For one that "
        "computes in float: allow FP32 (or FP16) in linear format for all its inputs and outputs.",
        "issues 3844, 1616 (NVIDIA's answers); documentation, 'Q/DQ interaction with plugins'",
        ("PLUGIN-OUTSIDE",),
    ),
    KnownError(
        "no-scales", "INT8 without Q/DQ and without ranges",
        r"no scaling factors detected|initCalibrationParams",
        ERROR,
        "INT8 is on, and the network (or the part of it that is built) has neither Q/DQ nor a calibrator, a "
        "calibration table or dynamic ranges. Through onnxruntime: the provider built a part of the model without "
        "quantizers.",
        "Give a Q/DQ model whose zero points are all 0, or turn INT8 off for models without Q/DQ, or give a "
        "calibration table. Check that the file that is loaded is the quantized one.",
        "onnxruntime issue 10743",
    ),
    KnownError(
        "weights-type", "Weights of a type that no kernel takes",
        r"transformWeightsIfFP|w\.type\(\) == type \|\|",
        ERROR,
        "While storing a layer's weights TensorRT met a type other than FP32, FP16 and INT8.",
        "Leave out the Q/DQ of the network's outputs (NVIDIA's advice in the one thread about it), and Q/DQ on integer "
        "tensors and biases; build with a newer TensorRT.",
        "issue 2604 (8.5.1, a MobileNetV2)",
        ("BIAS-DQ",),
        versions="seen on 8.5",
        unknown="Whether the outputs' pairs are the cause: the thread ends there.",
    ),
    KnownError(
        "backends-failed", "No compiler backend could build a region",
        r"all backend strategies failed|no tactics to implement operation",
        ERROR,
        "TensorRT 10 and later try several ways to compile a region of the network, and each gave up; the causes stand "
        "in the lines above (memory, types, an operation without a kernel on this GPU).",
        "Read the lines above for 'Skipping tactic' and 'Error Code'. Then: more workspace, a newer TensorRT, and "
        "without the Q/DQ of the operation named there.",
        "issues 3748, 4736",
        versions="10 and later",
        unknown="The cause: this line is only the sum of others.",
    ),
    KnownError(
        "dcheck-data", "Myelin refuses an operand",
        r"DCHECK\(opnd->is_data\(\)\)",
        ERROR,
        "Myelin failed on a quantized attention block with Where.",
        "Build with TensorRT 8.6 or newer.",
        "issue 2616",
        versions="seen on 8.5",
        fixed="a bug of 8.5; NVIDIA could not reproduce it with 8.6 (issue 2616)",
    ),
    KnownError(
        "myelin-cublas", "cuBLAS is missing or another one than TensorRT was made with",
        r"Invalid size written|cublasStatus == CUBLAS_STATUS_SUCCESS|cublas_impl\.cpp",
        ERROR,
        "A call of cuBLAS or cuBLASLt failed: the library is missing from the path, of another version, or (CUDA 10.2) "
        "without its patches.",
        "Make libcublas and libcublasLt of the CUDA version that TensorRT names findable (LD_LIBRARY_PATH), install "
        "the patches of CUDA 10.2, or leave cuBLASLt out: --tacticSources=-CUBLAS_LT.",
        "issues 1928, 2068, 1865; onnx-tensorrt issue 617",
    ),
    KnownError(
        "subscript", "An index beyond an internal set",
        r"assertIsValidSubscript|mSet\.size\(\) failed",
        ERROR,
        "Every tensor was marked as an output ('--trt-outputs mark all') of a Q/DQ network: the Qs cannot be fused any "
        "more.",
        "Mark only the outputs that you need, none between a Q and its layer.",
        "issue 3788 (a user's observation)",
        versions="seen on 8.6",
    ),
    KnownError(
        "parameter-weights", "Weights and their description differ in number",
        r"paramWeights\.count\(\) == aspectWeights\.count\(\)",
        ERROR,
        "TensorRT 8.0 failed while turning the weights of a quantized layer.",
        "Build with TensorRT 8.2 or newer.",
        "issue 1637",
        versions="seen on 8.0",
        unknown="What in the model provokes it.",
    ),
    KnownError(
        "tactic-skipped", "A kernel that was passed over",
        r"Skipping tactic|Skipping \w+: No valid tactics|has no valid tactics|skipped\. Scratch requested",
        WARNING,
        "One kernel, or one kind of kernels, does not fit this layer in this format, or lacks memory. Others are "
        "tried; the build fails only where none is left.",
        "Nothing, unless 'Could not find any implementation' follows; then the reason in this line is the one to "
        "follow (insufficient memory: raise the workspace).",
        "seen in every verbose log",
    ),
    KnownError(
        "consequence", "The build failed before this line",
        r"Assertion engine(?:Ptr)? != nullptr|Engine could not be created|Building engine failed|"
        r"Failed to create engine|Engine set up failed|Engine creation failed|Failed to parse onnx file|"
        r"Parsing model failed",
        ERROR,
        "A consequence and no cause: something failed before, and this line says that there is no engine.",
        "Explain the first [E] line of the log instead of this one.",
        "trtexec, builder.cpp",
    ),
)
