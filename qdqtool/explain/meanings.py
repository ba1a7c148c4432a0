"""What the optimizer's passes and headings mean for somebody who wants INT8: one sentence each."""

from __future__ import annotations

MEANINGS: dict[str, str] = {
    "ConstShuffleFusion": "Preparation; nothing to do with INT8.",
    "ShuffleShuffleFusion": "Preparation; nothing to do with INT8.",
    "ShuffleErasure": "Preparation; nothing to do with INT8.",
    "ConstCastFold": "Preparation: an Identity or Cast of a constant is gone. Behind a BatchNormalization's parameters "
    "it means that this BatchNormalization was taken apart and will not be folded.",
    "ConstQDQInitializersFusion": "Every Q and DQ of the model is named once: count these lines to see whether all "
    "pairs arrived.",
    "MyelinOptimization": "Post-processing goes to another compiler, as one {ForeignNode[...]}.",
    "MyelinRegions": "Matrix products, Softmax and normalizations run in Myelin, which takes in the Q and DQ around; "
    "no line of a log says so.",
    "EltReluFusion": "A residual Add and its Relu are one layer from here on.",
    "ScaleActivationFusion": "A BatchNormalization and its Relu will go into the convolution together.",
    "ReduceToPoolingFusion": "A global pooling can run in INT8, if it has a DQ in front and a Q behind.",
    "ConstWeightsQuantizeFusion": "These weights are INT8 in the engine, if their convolution is: count one line for "
    "each quantized convolution.",
    "ConvReluFusion": "The Relu costs nothing: the convolution takes it.",
    "DeconvReluFusion": "The Relu costs nothing: the deconvolution takes it.",
    "MatMulToConvTransform": "A fully connected layer is treated as a 1x1 convolution from here on.",
    "VanillaSwapWithPreceedingDQ": "The operator that the DQ passed runs in INT8.",
    "VanillaSwapWithFollowingQ": "The operator that the Q passed runs in INT8, and the Q came nearer to the "
    "convolution that can take it.",
    "HorizontalMergeQNodes": "Equal scales pay: two quantizers of one tensor are one. Where this line is missing for "
    "two Qs of a tensor their scales differ, and each becomes a conversion.",
    "SplitQAcrossPrecedingFanIn": "The Concat runs in INT8; its Q goes to every input, and meets the Qs that are "
    "there. With another scale than theirs it stays as a conversion.",
    "DqQFusion": "A pair in front of a Concat and the Concat's own cancelled, as their scales are equal: no "
    "conversion is left there.",
    "SqueezePushDownJoin": "The reshape behind a fully connected layer makes room for its bias.",
    "ConstEltFusion": "A sum or product with a constant will be folded.",
    "PointWiseFusion": "Pointwise operators become one kernel; SiLU is one such.",
    "ConvScaleFusion": "A bias or BatchNormalization costs nothing: the convolution takes it.",
    "DeconvScaleFusion": "A BatchNormalization costs nothing: the deconvolution takes it.",
    "QConvScaleFusion": "The BatchNormalization (and Relu) of an INT8 convolution is folded; its name disappears from "
    "the engine.",
    "ActivationToPointwiseConversion": "An activation other than Relu becomes pointwise, so that a convolution can "
    "take it.",
    "GenericConvActFusion": "The activation costs nothing: the convolution takes it, and can then take the Q behind.",
    "QuantizeConvWithResidualAdd": "The best that can happen to a residual block: convolution, Add and Relu are one "
    "layer, INT8 in and out.",
    "QuantizeDoubleInputNodes": "This layer runs in INT8. With a line 'fusing <Q> into <layer>' it writes INT8 too, "
    "without one it writes float.",
    "QuantizeSingleInputNodes": "The pooling runs in INT8.",
    "ConstWeightsFusion": "The INT8 weights are in the convolution's layer, whose name shows it.",
    "PadConvFusion": "The Pad costs nothing: the convolution takes it.",
    "ConvEltwiseSumFusion": "The Add is taken by a convolution that writes float: its residual is not quantized, or "
    "its result is not. Quantizing the residual input makes the whole layer INT8.",
    "ConvActPoolFusion": "The stem's MaxPool costs nothing: the convolution takes it.",
    "ConstantFoldDanglingQDQ": "Quantized weights of a layer that runs in float after all.",
    "RequantizeFusion": "INT8 is converted to INT8 of another scale: two scales meet that could be one.",
    "QDQToCopy": "A conversion that stays in the engine: the tensor is read and written once more at run time. Count "
    "these lines; the network's input always has one.",
    "ScaleScaleFusion": "Preparation; a BatchNormalization that was taken apart.",
    "EltwiseAddToPwn": "An Add that no convolution took: it is a layer of its own.",
    "MergeLayers": "Convolutions of equal shape on one tensor run as one.",
    "SliceRemoval": "'Eliminating': the Slice costs nothing; 'Replacing ... with copy': it is a copy.",
    "ConcatRemoval": "'Retargeting': this part is written straight into the result and costs nothing; 'Generating "
    "copy': it is copied.",
}

HEADINGS: dict[str, str] = {
    "Original": "The network as the parser made it.",
    "After dead-layer removal": "Layers that no output depends on are gone.",
    "After Myelin optimization": "Scale constants are in their Q and DQ, and post-processing went to Myelin.",
    "After slice removal": "Slices that are views are gone.",
    "After concat removal": "Concats are gone; copies that they need were added.",
    "After reformat layers": "Reformats of layout were added; they are no conversions.",
    "After vertical fusions": "Layers in a row were fused.",
    "After dupe layer removal": "Equal layers are one.",
    "After final dead-layer removal": "Layers that no output depends on are gone.",
    "After tensor merging": "Tensors in one place of memory are one.",
    "QDQ graph optimizer - constant folding of Q/DQ initializers": "Scales and zero points go into their Q and DQ.",
    "QDQ graph optimizer forward pass - DQ motions and fusions": "A heading only: the passes' lines come behind the "
    "last of these headings.",
    "QDQ graph optimizer backward pass": "A heading only: the passes' lines come behind the last of these headings.",
    "QDQ graph optimizer quantization pass - Generate quantized ops": "What follows decides which layers run in INT8.",
    "QDQ graph optimizer quantization epilogue pass": "What follows turns the Q and DQ that are left into conversions.",
    "QDQ graph optimizer constant fold dangling QDQ pass": "Quantized weights of float layers are dequantized here.",
    "QDQ optimization pass": "Part of the epilogue; no line was seen under it.",
    "Applying generic optimizations to the graph for inference": "Preparation begins.",
    "Trying to split Reshape and strided tensor": "The graph is done; tactics are timed next.",
}
