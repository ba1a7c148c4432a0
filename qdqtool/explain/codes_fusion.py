"""Codes of what keeps an INT8 convolution from writing INT8, and of the conversions that stay."""

from __future__ import annotations

from qdqtool.explain.knowledge import CLASSIC, Code, assumed, documented, seen
from qdqtool.types import Severity

_LATER = ("trt8.0", "trt8.6", "trt10", "trt11")
_LOGS = ("trt8.4", "trt8.5")

FUSION = (
    Code(
        "SKIP-FLOAT",
        "The residual input of an Add is not quantized",
        Severity.WARNING,
        "The convolution's result is added to a tensor that has no Q/DQ on its way to the Add.",
        "The Add is fused into the convolution, which then reads the residual as float and writes float. The Q behind "
        "the Add becomes a conversion of its own, also when nothing else reads the sum.",
        "'ConvEltwiseSumFusion: Fusing ... with <Add>' and later 'Running: QDQToCopy on <Q>'; the convolution's layer "
        "has Int8 and Float (or Half) inputs and a Float (or Half) output.",
        "Put Q/DQ on the residual input of the Add, and only there. Where the residual tensor already has a Q/DQ "
        "pair for a convolution, let the Add read that pair's output: no new scale is needed.",
        (
            seen(_LOGS, "26 Adds in three builds"),
            documented(_LATER, "developer guide: quantize the residual input in skip connections"),
        ),
        automatic=True,
    ),
    Code(
        "ADD-BOTH",
        "Both inputs of a residual Add are quantized",
        Severity.INFO,
        "A Q/DQ pair stands on the convolution's side of the Add as well (pytorch-quantization's QuantAdd, "
        "onnxruntime's defaults).",
        "The convolution takes the Q on its side, so the Add cannot join it: it becomes a layer of its own that "
        "reads two INT8 tensors.",
        "'Swap the layer type of <Add> from ELEMENTWISE to POINTWISE' (EltwiseAddToPwn).",
        "Remove the pair on the convolution's side. The Add then joins the convolution and one rounding step goes.",
        (
            seen(("trt8.4",), "yolov8 on Orin, 8.4.12"),
            documented(("trt8.0", "trt8.5", "trt8.6", "trt10", "trt11"), "developer guide, figure of the sub-optimal "
                       "placement"),
        ),
        automatic=True,
    ),
    Code(
        "ADD-OUT-FLOAT",
        "The sum of a residual Add is not quantized",
        Severity.WARNING,
        "The residual is quantized, what reads the Add is not (often a global pooling or a head).",
        "The residual's DQ stays as a conversion and the convolution reads and writes float at the Add.",
        "A Reformat layer with the name of the residual's DequantizeLinear.",
        "Quantize the Add's output (the input of the pooling or head behind it); or, where it must stay float, "
        "leave the residual float too, which saves the conversion.",
        (seen(_LOGS, "resnet18-a100-qat-residual: the last block"), assumed(_LATER, "the same passes")),
    ),
    Code(
        "ADD-ACT",
        "An activation stands between the convolution and the Add",
        Severity.WARNING,
        "SiLU (or another activation) of the convolution comes before the Add, as in every YOLOv8 bottleneck, and not "
        "both inputs of the Add are quantized.",
        "Only a convolution whose own result goes into the Add can take it. With SiLU in between, the Add is a "
        "separate layer in the builds that users report for 8.5 and 10.6; ModelOpt counts on a fusion since late "
        "2025.",
        "A PointWise layer with the Add's name.",
        "Quantize both inputs of the Add and its result: the convolution then writes INT8, and the Add reads and "
        "writes INT8.",
        (assumed(CLASSIC, "NVIDIA/TensorRT issue 3861 (users, 8.5 and 10.6)"),),
    ),
    Code(
        "CONCAT-SCALE",
        "The parts of a Concat have different scales",
        Severity.WARNING,
        "The Q behind a Concat has another scale than the Qs of the tensors that go into it.",
        "TensorRT moves the Q in front of the Concat, one copy for each input (SplitQAcrossPrecedingFanIn). A copy "
        "that does not have the scale of the Q already there cannot be merged with it: it stays as a conversion, and "
        "a convolution whose result has two Qs writes float.",
        "'SplitQAcrossPrecedingFanIn on <Concat>', then 'QDQToCopy on <Q>_clone_<i>'.",
        "Give the whole group one scale, the largest. The tensors with a smaller range lose log2(ratio) bits.",
        (
            seen(_LOGS, "8.5.2 log: the clones with another scale stay as conversions"),
            seen(("rtx1.7",), "built: the convolution behind it is float"),
            documented(_LATER, "yolov7_qat guidance; ModelOpt's concat elimination"),
        ),
        automatic=True,
    ),
    Code(
        "SPLIT-SCALE",
        "A tensor and the parts cut out of it have different scales",
        Severity.WARNING,
        "The tensor in front of a Split or Slice and its pieces are quantized on their own (C2f, C3k2, ELAN).",
        "Q moves up past a Split or Slice. Above it, Qs of different scales cannot be merged and stay as conversions.",
        "'VanillaSwapWithFollowingQ on <Slice>' without a following 'HorizontalMergeQNodes ... duplicates' line.",
        "Give the tensor and its pieces one scale, the largest.",
        (seen(("trt8.4",), "yolov8 on Orin, 8.4.12"), assumed(("trt8.0", "trt8.5", "trt8.6", "trt10", "trt11"),
                                                             "NVIDIA/TensorRT issues 3861, 4467")),
        automatic=True,
    ),
    Code(
        "POOL-SCALE",
        "A pooling's input and output have different scales",
        Severity.WARNING,
        "The Q in front of a MaxPool (or Resize, Transpose, Reshape) and the Q behind it differ.",
        "The Q behind moves up past the operator. With another scale than the Q already there it stays as a "
        "conversion.",
        "'VanillaSwapWithFollowingQ on <MaxPool>', then 'QDQToCopy'.",
        "Give both one scale: the operator does not change the range.",
        (
            seen(_LOGS, "8.5.10 log: swap after equal Qs merged"),
            documented(_LATER, "yolov7_qat guidance for MaxPool"),
        ),
        automatic=True,
    ),
    Code(
        "POOL-MIXED",
        "A pooling has quantized and float readers",
        Severity.WARNING,
        "The output of a MaxPool (or Resize) goes to a Q and to an operator that reads it as float.",
        "The Q cannot move up past it: the operator runs in float, so does the convolution's output in front of it, "
        "and the Q stays as a conversion.",
        "No 'VanillaSwapWithFollowingQ on <MaxPool>' line; the layer is TiledPooling with Float tensors.",
        "Quantize the other reader too, with the same scale; mostly it is the residual input of an Add.",
        (seen(_LOGS, "8.5.2 log and resnet18-a100-qat: the stem's MaxPool"), assumed(_LATER, "the same passes"),
         seen(("rtx1.7",), "built: a MaxPool between a DQ, a Q and a convolution")),
        automatic=True,
    ),
    Code(
        "POOL-FLOAT",
        "An average pooling is quantized on one side only",
        Severity.WARNING,
        "An AveragePool or GlobalAveragePool has a DQ in front or a Q behind, not both.",
        "It runs in INT8 only if the DQ in front and the Q behind can both be fused into it. Otherwise it runs in "
        "float and the pair on its other side stays as conversions.",
        "No 'QuantizeSingleInputNodes on <pool>' line.",
        "Quantize its input and its output, or neither.",
        (
            seen(_LOGS, "8.5.10 log and resnet18-a100-qat"),
            documented(_LATER, "developer guide: an INT8 input of a non-weighted layer needs an INT8 output"),
        ),
    ),
    Code(
        "SIBLING-SCALE",
        "One tensor is quantized with different scales",
        Severity.WARNING,
        "Several readers of a tensor have quantizers of their own, with other scales.",
        "Equal Qs on a tensor are merged, different ones are not: each stays as a conversion, and the convolution "
        "that makes the tensor writes float.",
        "Several 'QDQToCopy' lines for Qs of one tensor; no 'duplicates (Q)' line.",
        "One scale for the tensor: the largest.",
        (seen(_LOGS, "8.5.2 log: two conversions of layer2.1/relu_1"), assumed(_LATER, "the same passes")),
        automatic=True,
    ),
    Code(
        "SILU-INNER-Q",
        "A Q/DQ pair inside SiLU",
        Severity.WARNING,
        "The convolution's output, or the Sigmoid's, is quantized before the Mul.",
        "The convolution takes the Q and ends there. Sigmoid and Mul become a separate layer that converts to float "
        "and back.",
        "A PWN(Sigmoid, Mul) layer of its own behind the convolution.",
        "Quantize behind the Mul only. Removing the inner pairs needs no new data.",
        (documented(CLASSIC, "developer guide: do not quantize a convolution's output before its activation"),),
        automatic=True,
    ),
    Code(
        "ACT-INNER-Q",
        "A Q/DQ pair between a convolution and its activation",
        Severity.WARNING,
        "The pair stands in front of the ReLU (or Clip, LeakyReLU ...) instead of behind it.",
        "The convolution takes the Q; the activation becomes a layer of its own.",
        "A layer of its own with the activation's name.",
        "Move the pair behind the activation. The range behind it is a part of the range in front, so the scale "
        "still holds.",
        (documented(CLASSIC, "developer guide: do not simulate fusions, quantize behind the activation"),),
        automatic=True,
    ),
    Code(
        "SILU-NO-Q-AFTER",
        "An INT8 convolution with SiLU writes float",
        Severity.WARNING,
        "Nothing quantizes the result of the Mul.",
        "The convolution, Sigmoid and Mul are one layer that reads INT8 and writes float.",
        "'fusing (... and ...) into <Conv>' without a 'fusing <Q> into <Conv>' line before it.",
        "Quantize what reads it, or the Mul's output: calibration finds the scale.",
        (
            seen(_LOGS, "the same law for ReLU, LeakyReLU and Clip; no complete log with SiLU"),
            assumed(_LATER, "the same passes"),
        ),
    ),
    Code(
        "OUT-MIXED",
        "A convolution's result has quantized and float readers",
        Severity.WARNING,
        "One reader has a Q, another reads the tensor as float.",
        "The convolution writes float for the one, and the Q stays as a conversion for the other.",
        "'QDQToCopy on <Q>'; the convolution's layer has a Float (or Half) output.",
        "Quantize the float reader too with the same scale, if it can run in INT8.",
        (seen(_LOGS, "features.2/4/7 of mobilenet-qat; the stem of three ResNets"), assumed(_LATER, "the same passes")),
    ),
    Code(
        "OUT-FLOAT",
        "An INT8 convolution writes float: no Q behind it",
        Severity.INFO,
        "What reads the result is not quantized: the network's output, a Softmax, a head's post-processing.",
        "The convolution reads INT8 and writes float. Its own work is still INT8; only the output is wider.",
        "'fusing (... and ...) into <Conv>' without a 'fusing <Q> into <Conv>' line before it.",
        "Nothing where the reader needs float (heads, Softmax). Else quantize the reader.",
        (seen(_LOGS, "heads of three builds, fc of seven"), assumed(_LATER, "the same passes")),
    ),
    Code(
        "CONVERSION",
        "A Q or DQ stays as a layer of its own",
        Severity.INFO,
        "Neither the layer in front nor the one behind can take it.",
        "It reads and writes the whole tensor once more at run time, to change its type.",
        "'Running: QDQToCopy on <Q>' and 'Swap the layer type of <Q> from QUANTIZE to kQDQ'; Layer(Reformat): <Q>.",
        "Remove what keeps it (the message names it), or the pair.",
        (seen(_LOGS, "12 and 1 conversions in two complete logs"), assumed(_LATER, "the same passes")),
    ),
    Code(
        "INPUT-CONVERSION",
        "The network's input is converted to INT8",
        Severity.INFO,
        "The first convolution is quantized and the network takes float images.",
        "One conversion at the input, in every quantized engine.",
        "Layer(Reformat): <first Q>, Float in, Int8 out.",
        "Nothing, or feed INT8: make the first DQ's input the network's input.",
        (seen(("trt8.0", *_LOGS), "every quantized build at hand"), assumed(("trt8.6", "trt10", "trt11"), "the same "
                                                                           "passes")),
    ),
    Code(
        "DOUBLE-QDQ",
        "Two Q/DQ pairs follow each other",
        Severity.WARNING,
        "A tensor is quantized again right behind its DQ, with another scale (for instance behind a Split and again "
        "behind the Concat).",
        "Equal scales cancel; different ones are a conversion from INT8 to INT8.",
        "A Reformat with Int8 input and Int8 output and a Q's name.",
        "One scale for both, or remove one pair.",
        (documented(CLASSIC, "NVIDIA/TensorRT issue 4467"),),
        automatic=True,
    ),
)
