"""Small builds of our own in TensorRT's wording, for tests that need no recorded ones."""

from __future__ import annotations

STAMP = "[10/31/2025-17:53:3{}]"

MESSAGES = [
    ("I", "=== Model Options ==="), ("I", "Format: ONNX"), ("I", "Model: net_qdq.onnx"),
    ("I", "=== Build Options ==="), ("I", "Precision: FP32+INT8"), ("I", "Sparsity: Disabled"),
    ("I", "=== Device Information ==="), ("I", "Selected Device: Orin"), ("I", "SMs: 4"), ("I", ""),
    ("I", "TensorRT version: 8.5.2"),
    ("V", "Adding network input: images with dtype: float32, dimensions: (1, 3, 8, 8)"),
    ("V", "Registering tensor: images for ONNX tensor: images"),
    ("V", "Importing initializer: w"), ("V", "Importing initializer: s"),
    ("V", "Parsing node: q0 [QuantizeLinear]"), ("V", "Searching for input: images"),
    ("V", "q0 [QuantizeLinear] inputs: [images -> (1, 3, 8, 8)[FLOAT]], [s -> ()[FLOAT]], [z -> ()[INT8]], "),
    ("V", "Registering layer: q0 for ONNX node: q0"),
    ("V", "q0 [QuantizeLinear] outputs: [q0_out -> (1, 3, 8, 8)[FLOAT]], "),
    ("V", "Parsing node: dq0 [DequantizeLinear]"),
    ("V", "dq0 [DequantizeLinear] inputs: [q0_out -> (1, 3, 8, 8)[FLOAT]], [s -> ()[FLOAT]], [z -> ()[INT8]], "),
    ("V", "dq0 [DequantizeLinear] outputs: [dq0_out -> (1, 3, 8, 8)[FLOAT]], "),
    ("V", "Parsing node: wq [QuantizeLinear]"),
    ("V", "wq [QuantizeLinear] inputs: [w -> (16, 3, 3, 3)[FLOAT]], [ws -> (16)[FLOAT]], [wz -> (16)[INT8]], "),
    ("V", "wq [QuantizeLinear] outputs: [wq_out -> (16, 3, 3, 3)[FLOAT]], "),
    ("V", "Parsing node: wdq [DequantizeLinear]"),
    ("V", "wdq [DequantizeLinear] inputs: [wq_out -> (16, 3, 3, 3)[FLOAT]], [ws -> (16)[FLOAT]], "
          "[wz -> (16)[INT8]], "),
    ("V", "wdq [DequantizeLinear] outputs: [wdq_out -> (16, 3, 3, 3)[FLOAT]], "),
    ("V", "Parsing node: conv [Conv]"),
    ("V", "conv [Conv] inputs: [dq0_out -> (1, 3, 8, 8)[FLOAT]], [wdq_out -> (16, 3, 3, 3)[FLOAT]], "
          "[optional input, not set], "),
    ("V", "Kernel weights are not set yet. Kernel weights must be set using setInput(1, kernel_tensor) API call."),
    ("V", "conv [Conv] outputs: [y -> (1, 16, 4, 4)[FLOAT]], "),
    ("V", "Parsing node: relu [Relu]"),
    ("V", "relu [Relu] inputs: [y -> (1, 16, 4, 4)[FLOAT]], "),
    ("V", "relu [Relu] outputs: [out -> (1, 16, 4, 4)[FLOAT]], "),
    ("V", "Marking out as output: out"),
    ("W", "Calibrator won't be used in explicit precision mode."),
    ("V", "Original: 9 layers"), ("V", "After dead-layer removal: 9 layers"),
    ("V", "QDQ graph optimizer - constant folding of Q/DQ initializers"),
    ("V", "Running: ConstQDQInitializersFusion on q0"), ("V", "Removing s"),
    ("V", "QDQ graph optimizer quantization pass - Generate quantized ops"),
    ("V", "Running: ConstWeightsQuantizeFusion on w"), ("V", "ConstWeightsQuantizeFusion: Fusing w with wq"),
    ("V", "Running: QuantizeDoubleInputNodes on conv"),
    ("V", "QuantizeDoubleInputNodes: fusing (dq0 and wdq) into conv"), ("V", "Removing dq0"), ("V", "Removing wdq"),
    ("V", "Running: ConstWeightsFusion on w + wq"), ("V", "ConstWeightsFusion: Fusing w + wq with conv"),
    ("V", "After tensor merging: 3 layers"),
    ("V", "Running: QDQToCopy on q0"), ("V", "Swap the layer type of q0 from QUANTIZE to kQDQ"),
    ("V", "After vertical fusions: 2 layers"),
    ("V", "Graph construction and optimization completed in 0.25 seconds."),
    ("I", "---------- Layers Running on GPU ----------"), ("I", "[GpuLayer] COPY: q0"),
    ("I", "[GpuLayer] CONVOLUTION: w + wq + conv"),
    ("V", "=============== Computing costs for "),
    ("V", "*************** Autotuning format combination: Int8(1) -> Float(1) ***************"),
    ("V", "--------------- Timing Runner: w + wq + conv (CaskConvolution)"),
    ("V", "w + wq + conv Set Tactic Name: sm80_i8 Tactic: 0x11"), ("V", "Tactic: 0x0000000000000011 Time: 0.5"),
    ("V", "Tactic: 0x0000000000000012 Time: 0.25"), ("V", "Fastest Tactic: 0x0000000000000012 Time: 0.25"),
    ("V", ">>>>>>>>>>>>>>> Chose Runner Type: CaskConvolution Tactic: 0x0000000000000012"),
    ("V", "--------------- Timing Runner: Optimizer Reformat(<in> -> y) (Reformat)"),
    ("V", "Tactic: 0x00000000000003e8 Time: 0.125"), ("V", "Fastest Tactic: 0x00000000000003e8 Time: 0.125"),
    ("V", "Adding reformat layer: Reformatted Output Tensor 0 to w + wq + conv (out) from Float(16,1:4) to "
    "Float(16,1)"),
    ("V", "Formats and tactics selection completed in 4.5 seconds."),
    ("V", "After reformat layers: 3 layers"),
    ("I", "Total Activation Memory: 4096"), ("I", "Total Host Persistent Memory: 512"),
    ("I", "Total Device Persistent Memory: 256"), ("I", "Total Scratch Memory: 128"),
    ("V", "Engine generation completed in 5.5 seconds."), ("V", "Engine Layer Information:"),
]
LISTING = [
    "Layer(Reformat): q0, Tactic: 0x0000000000000000, images (Float[1,3,8,8]) -> q0_out (Int8[1,3:4,8,8])",
    "Layer(CaskConvolution): w + wq + conv + relu, Tactic: 0x0000000000000012, q0_out (Int8[1,3:4,8,8]) -> "
    "Reformatted Output Tensor 0 to w + wq + conv (Float[1,16:4,4,4])",
    "Layer(Reformat): Reformatting CopyNode for Output Tensor 0 to w + wq + conv, Tactic: 0x00000000000003e8, "
    "Reformatted Output Tensor 0 to w + wq + conv (Float[1,16:4,4,4]) -> out (Float[1,16,4,4])",
]
REPORT = [
    ("I", "=== Performance summary ==="), ("I", "Throughput: 424.281 qps"),
    ("I", "Latency: min = 4.1 ms, max = 4.3 ms, mean = 4.2 ms, median = 4.2 ms, percentile(99%) = 4.25 ms"),
    ("I", "Total Host Walltime: 3.5 s"), ("I", ""),
    ("I", "=== Profile (781 iterations ) ==="),
    ("I", "   Layer   Time (ms)   Avg. Time (ms)   Median Time (ms)   Time %"),
    ("I", "      q0       10.00           0.0125             0.0124     20.0"),
    ("I", " w + wq + conv + relu       40.00           0.0500             0.0499     80.0"),
    ("I", "   Total       50.00           0.0625             0.0623    100.0"), ("I", ""),
]
COMMAND = "trtexec --onnx=net_qdq.onnx --int8 --verbose --dumpProfile"
BANNER = "&&&& {} TensorRT.trtexec [TensorRT v8502] # /usr/src/tensorrt/bin/" + COMMAND


def trtexec_log() -> str:
    """A whole log as trtexec 8.5 prints it; line ends are ``\\n``."""
    lines = [BANNER.format("RUNNING")]
    second = 0
    for level, text in MESSAGES:
        if text.startswith(("Fastest", "Formats")):
            second = min(9, second + 1)
        lines.append(stamped(level, text, second))
    lines += LISTING
    lines += [stamped(level, text, 9) for level, text in REPORT]
    lines.append(BANNER.format("PASSED"))
    return "\n".join(lines) + "\n"


def stamped(level: str, text: str, second: int = 0) -> str:
    """A message with trtexec's prefix."""
    logger = "[TRT] " if level in ("V", "W") else ""
    return f"{STAMP.format(second)} [{level}] {logger}{text}"
