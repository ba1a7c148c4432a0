"""Codes about accuracy of heads and about shapes that INT8 kernels do not like."""

from __future__ import annotations

from qdqtool.explain.knowledge import ALL_TARGETS, CLASSIC, TRT8, Code, assumed, documented
from qdqtool.types import Severity

SPEED = (
    Code(
        "HEAD-QUANT",
        "The last convolutions of a detection head are quantized",
        Severity.WARNING,
        "A quantizer that knows no detectors quantizes every convolution, those of the boxes and the DFL included.",
        "They run in INT8. Boxes lose accuracy out of proportion; users report that nothing is detected.",
        "Nothing in the log.",
        "Leave the last convolution of each box branch and the DFL in float (all last convolutions, where there is no "
        "DFL); keep the head's stems in INT8.",
        (documented(ALL_TARGETS, "0.06 to 0.10 mAP50-95 on two trained YOLOv8 models; ultralytics pull requests 26171, "
                    "26220"),),
        automatic=True,
    ),
    Code(
        "HEAD-SCORE",
        "The last convolutions of the class branches are quantized",
        Severity.INFO,
        "The head's class outputs are quantized, its boxes may be float.",
        "They run in INT8.",
        "Nothing in the log.",
        "Nothing, where accuracy is right: class scores lose little. Leave them float if scores come out coarse.",
        (documented(ALL_TARGETS, "0.005 mAP50-95 on two trained YOLOv8 models"),),
    ),
    Code(
        "HEAD-CONCAT",
        "Boxes and scores share one scale",
        Severity.WARNING,
        "A Q stands behind the Concat that joins boxes (0 to 640) and scores (0 to 1).",
        "One step of the common scale is as large as every score: all scores become 0.",
        "Nothing in the log.",
        "Remove the pair; leave everything behind the head's last convolutions in float.",
        (documented(ALL_TARGETS, "NVIDIA/TensorRT issue 4074; arithmetic"),),
        automatic=True,
    ),
    Code(
        "CH-ALIGN",
        "Channels are not a multiple of 16",
        Severity.INFO,
        "An INT8 convolution whose input or output channels are not a multiple of 16.",
        "INT8 tensor-core kernels work on groups of 16 or 32 channels: the rest is padding, and a layout reformat "
        "may be added.",
        "Int8[4,72:4,...] beside Int8[4,72:32,...]; Reformatting CopyNode.",
        "Use multiples of 32 (16 at least) in the network, or leave a small convolution float and measure.",
        (documented(CLASSIC, "TREx's convolution linter; users' measurements"),),
    ),
    Code(
        "CH-SMALL",
        "Fewer than 16 channels",
        Severity.INFO,
        "A quantized convolution with fewer than 16 input or output channels (the image's three aside).",
        "There is little work to save; the conversions cost more than INT8 wins. ModelOpt leaves such convolutions "
        "out.",
        "Nothing in the log.",
        "Leave it float and measure.",
        (documented(CLASSIC, "ModelOpt: find_nodes_from_convs_to_exclude"),),
    ),
    Code(
        "GROUP-SLOW",
        "A grouped convolution in INT8",
        Severity.INFO,
        "1 < groups < channels, with few channels for each group.",
        "INT8 kernels for groups are few; users measured INT8 slower than FP16.",
        "CudaGroupConvolution or a slow Cask tactic.",
        "Leave it float and measure.",
        (assumed(CLASSIC, "NVIDIA/TensorRT issue 4529 (users)"),),
    ),
    Code(
        "DW-SILU",
        "A quantized depthwise convolution with SiLU",
        Severity.WARNING,
        "Depthwise convolution, then Sigmoid and Mul.",
        "8.5.2 found no implementation for one at the end of a network; NVIDIA says that depthwise convolutions stay "
        "unfused from SiLU because their own kernel is faster.",
        "Could not find any implementation for node ...dwconv + PWN(...)",
        "Leave the depthwise convolution float where the build fails, or use ReLU/Clip, which is seen to work.",
        (documented(TRT8, "NVIDIA/TensorRT issues 3385, 3205"), assumed(("trt10",), "fixed by documentation of issue "
                                                                       "50 of Model-Optimizer", Severity.INFO)),
        error=(("trt8", "Could not find any implementation for node"),),
    ),
    Code(
        "DW-ADD",
        "A quantized depthwise convolution into an Add",
        Severity.WARNING,
        "Depthwise convolution whose result goes into an Add (the position encoding of YOLOv10's attention).",
        "8.6 found no implementation; 10 has it fixed.",
        "Could not find any implementation for node ...attn.pe...",
        "Leave it float before TensorRT 10.",
        (documented(TRT8, "NVIDIA in Model-Optimizer issue 50"),),
        error=(("trt8", "Could not find any implementation for node"),),
    ),
)
