"""Simulation of TensorRT's optimizer on Q/DQ networks.

``importer`` translates an ONNX model to TensorRT's layers, the passes of ``pipeline`` edit the
layers as TensorRT does, and ``outcome`` reads the engine layers and their data types from the
edited network.

Example: a convolution ``Q -> DQ -> Conv -> BatchNormalization -> Relu -> MaxPool -> Q -> DQ``,
whose weights also have a Q and a DQ. These passes change it, in this order:

1. ConstQDQInitializersFusion stores the constant scales and zero points in each Q and DQ.
2. ScaleActivationFusion fuses the Relu into the BatchNormalization (a layer of kind SCALE).
3. ConstWeightsQuantizeFusion quantizes the constant weights: ``<weights> + <Q>``.
4. VanillaSwapWithFollowingQ moves the last Q up past the MaxPool, so that the pooling reads and
   writes INT8. In other networks, HorizontalMergeQNodes merges equal Qs of one tensor, and
   SplitQAcrossPrecedingFanIn moves a Q up past a Concat.
5. QConvScaleFusion folds BatchNormalization and Relu into the convolution.
6. QuantizeDoubleInputNodes lets the convolution absorb both DQs before it and the Q after it. The
   convolution then reads and writes INT8. If a residual Add follows the convolution,
   QuantizeConvWithResidualAdd does this and fuses the Add.
7. ConstWeightsFusion fuses the INT8 weights: ``<weights> + <Q> + <Conv>``.
8. QDQToCopy turns each Q and DQ that no layer has absorbed into a conversion of the engine.
"""
