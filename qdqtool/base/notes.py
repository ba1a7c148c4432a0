"""Notes and warnings of results as records: what each one says of which values, and its words, which stand here alone.

A note is a string, so that whoever has results prints them as they are. Programs and tests ask for its ``remark`` and
``values``; nothing reads the words again.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from qdqtool.base.said import Said


class Note(Said):
    """A note or a warning: its words, with the remark that it makes and the values in it.

    A string that was read from a file, where the words alone are kept, or that is a user's has no remark.
    """

    remark: Remark | None = None


class Remark(Enum):
    """Every remark; called with its values it is a note."""

    # Images and ranges
    NOT_REUSED = "{cache}: not reused, data from an iterator cannot be recognised again"
    NOT_USED = "{cache}: not used, {why}; calibrating again"
    UNFINISHED = "{cache}: not used, it is unfinished and has no '{tensor}'; calibrating again"
    REUSED = "{cache}: reused, {images} images, same model and data; nothing was run"
    REUSED_IN_PART = "{cache}: reused for all but {missing} tensors that it does not have"
    RESUMED = "{cache}: resumed after {images} images"
    OTHER_FORMATS = "pictures of other formats are not read ({formats:joined , }): convert them to one of {kinds}"
    DEAD_LINKS = "passed over {count:counted link} to nothing, {first} first"
    BROKEN_IMAGES = "{broken} of {total} images could not be read and were skipped"
    FEW_IMAGES = "only {images:counted calibration image}; {enough} or more give steadier ranges"
    FAR_INPUTS = (
        "inputs reach from {low:g} to {high:g}; YOLO models take 0 to 1: is the division by 255 missing "
        "(scale 1/255)?"
    )
    SMALL_INPUTS = (
        "inputs never exceed {high:g}; YOLO models take 0 to 1: were they divided by 255 twice?"
    )
    CONSTANT_IMAGES = "{constant} of {total} images are constant (every value the same)"
    NONFINITE_SAMPLES = "{nonfinite} of {total} samples hold NaN or infinities"
    NONFINITE_TENSOR = (
        "tensor '{tensor}': {nonfinite} of {total} values are NaN or infinite and were left out"
    )
    ALWAYS_ZERO = "'{tensor}' is always zero on the calibration data; its scale says nothing"
    UNREAD_IMAGES = (
        "{count} of the images to choose and judge on could not be read and were left out; the first, "
        "{file}: {reason}"
    )

    # The float model, prepared
    WIDENED = "float16 widened to float32: {target} takes no FP16 scales; let the builder use FP16"
    INLINED = "the model's own functions were inlined"
    OPSET_RAISED = "opset raised from {before} to {after}"
    NODES_NAMED = "{count:were node} named after an output: onnxruntime wants names that differ"
    LOWER_CASE = "{count:were Einsum equation} written in lower case, as TensorRT's parser wants"
    SUMS_AS_ADDS = "{count:were two-input Sum} written as Add, which TensorRT fuses"
    PRODUCTS_WRITTEN = (
        "{count:were matrix product} written as MatMul instead of Einsum, so that it can be INT8"
    )
    WEIGHTS_COMPUTED = "{count:were weight tensor} computed from constants"
    WEIGHTS_COPIED = "{count:were weight tensor} copied for nodes that shared one"
    NORMS_FOLDED = "{count:were BatchNormalization node} folded into the convolution in front"
    NORMS_FOLDED_BEHIND = "{count:were BatchNormalization node} folded into the convolutions behind"
    INT8_WEIGHTS_UNREAD = "{target} cannot read int8 weights; use {`weights`:'float'} for it"

    # Placement
    NO_ATTENTION = "{`attention`:'int8'} changes nothing: there is no Softmax between two MatMuls of computed tensors"
    NO_RESIDUAL = (
        "{`residual`:'{residual}'} changes nothing: there is no Add behind a convolution whose result is "
        "quantized next"
    )
    NO_LINEAR = "{`smooth`:{alpha:g}} changes nothing: no Linear is quantized"
    NONE_SMOOTHED = (
        "{`smooth`:{alpha:g}} changes nothing: of {tensors} tensors that quantized Linears read, "
        "{reasons:joined , }{further}"
    )
    TOO_LARGE_TO_SMOOTH = (
        "{`smooth`:{alpha:g}} changes nothing: values or constants are not finite, or too large for "
        "FP16"
    )
    SMOOTHED = (
        "{`smooth`:{alpha:g}}: scales of the activations that {linears} Linears read were moved into their "
        "weights, at {places} places"
    )
    SMOOTHED_IN_PART = SMOOTHED + "; not of {reasons:joined , }{further}"
    FEED_INT8 = (
        "input '{name}' is int8: feed rint(x / {scale:.8g}) clipped to -128 ... 127, x as the float model "
        "takes it"
    )
    FEED_INT8_PIXELS = FEED_INT8 + "; from pixels, rint(pixel * {factor:.8g})"
    FEED_UINT8 = (
        "input '{name}' is uint8: feed pixels from 0 to 255 (scale, mean and std are in it)"
    )
    FEED_UINT8_SCALED = (
        "input '{name}' is uint8: feed pixels from 0 to 255 ({scale:.6g} is in the first scale)"
    )
    OF_FINDING = "{code}: {finding.message}"
    OF_FINDING_TO_FIX = OF_FINDING + " {finding.fix}"
    OF_FINDINGS_TO_FIX = OF_FINDING + " (and {more} more) {finding.fix}"
    OF_ALL_TO_FIX = OF_FINDING + " So do {more} more. {finding.fix}"

    # What is not quantized in FP16
    HALF_BY_DEFAULT = (
        "what is not quantized is FP16, inputs and outputs apart: {target} computes in the types of the "
        "file ({`high_precision`:'fp32'} leaves FP32)"
    )
    HALF_IMPOSSIBLE = "what is not quantized stays FP32 and runs so on {target}: {error}"
    STAY_FP32 = (
        "{count} tensors stay FP32, with what writes and reads them, because their largest value nears FP16's "
        "65504: {kept:each %s (%.4g)}"
    )
    NORMS_WRITTEN = (
        "{count} normalizations in pieces were written as LayerNormalization: FP16 cannot hold their "
        "squares"
    )
    NORMS_STAY_FP32 = (
        "{count} normalizations in pieces stay FP32 ({first} first): FP16 cannot hold their squares, "
        "and no LayerNormalization computes the same"
    )
    SQUARES_STAY_FP32 = "{count} other sums of squares stay FP32 ({first} first)"
    NOT_LOOKED_AT = (
        "tensors without Q/DQ were not looked at for values that FP16 cannot hold: {error}"
    )
    SCALES_RAISED = (
        "the scales of {count} tensors are raised to what FP16 holds ({least:.3g} at least), those of "
        "{tensor} {factor:.3g} times ({`high_precision`:'fp32'} keeps them)"
    )

    # Accuracy
    LOSSES_NOT_MEASURED = "what limits accuracy was not measured: {error}"
    AGREEMENT_NOT_MEASURED = "agreement with the float model was not measured: {error}"
    HALF_DIFFERS = (
        "INT8 activations change the outputs by {int8:.1%}, with FP16 it is {half:.0%}: compare with "
        "{`high_precision`:'fp32'}"
    )
    NOT_PREDICTED = "not predicted: {error}"

    # tune
    RANGES_ON = "ranges from {room} of {images} images: more would not have fitted the time limit"
    CHOSEN_ON = "chosen on {room} of {images} images: more would not have fitted the time limit"
    JUDGED_ON = "judged on {room} of {images} images: more would not have fitted the time limit"
    RANGES_NOT_TAKEN = "other ranges had a smaller output error and not a better metric: not taken"
    GOAL_NOT_REACHED = (
        "the choices that were tried together do not reach the goal with anything in INT8"
    )
    NO_TIME_TO_JUDGE = (
        "the time limit left no time to judge all of the front, or what each choice bought"
    )
    HALF_NOT_MEASURED = "agreement of the FP16 model with the float model was not measured: {error}"
    MEASURED_IN_FP32 = (
        "accuracy was measured with FP32 where nothing is quantized; against the float model's outputs "
        "the error is {before:.2%} of their standard deviation so, and {after:.2%} in FP16, as written"
    )
    FLOAT_FITS = (
        "the float model itself is predicted to take {ms:.4g} ms, which fits: no INT8 is needed"
    )
    FLOAT_FITS_AND_WRITTEN = (
        "the float model itself is predicted to take {ms:.4g} ms, which fits and is what was "
        "written: no INT8 is needed"
    )
    FLOAT_WRITTEN = (
        "the float model is predicted to take {ms:.4g} ms and is what was written: no placement that is "
        "accurate enough is faster"
    )
    HARDLY_PAYS = (
        "not expected to be at least {pays:g} times as fast as the float model, which is predicted to take "
        "{ms:.4g} ms: {times:.2f} times"
    )

    # fix
    CODE_NOT_FOUND = "{code} is not found in this model for {target}"
    COMPARED_IN_BODY = (
        "the whole model cannot be compared ({error}): outputs were compared behind its last "
        "convolutions"
    )
    WEAK_COMPARISON = (
        "the outputs are {error:.0%} from the float network: the inputs do not fit the scales, so the "
        "comparison is weak; give images with {`data`}"
    )
    COMPARED_IN_FRONT = (
        "outputs were compared in front of {nodes:joined , }, which onnxruntime does not have"
    )

    NOT_COMPARABLE = "its outputs cannot be compared with those of the float network: {error}"
    RESULT_CANNOT_RUN = "onnxruntime cannot run the result: {error}"
    SCALE_TOO_COARSE = (
        "one scale would cost '{tensor}' {bits:.1f} bits of its precision, and 2 are the most that a fix gives up: "
        "leave the scales apart, or leave one side in float"
    )
    NO_NUMBERS = "outputs would no longer be numbers"
    DISTANCE_GROWS = (
        "the distance of output '{output}' from the float network would grow from {before:.2%} to "
        "{after:.2%}"
    )
    DISTANCE_OF_PART_GROWS = (
        "the distance of '{part}' in output '{output}' from the float network would grow from {before:.2%} to "
        "{after:.2%}"
    )
    ERROR_GREW = "the error of {output} grew from {before:.2%} to {after:.2%}"
    OUTPUT_LOST = (
        "{output} has one value only, which the float network has not: what it means is lost"
    )
    CONSTANTS_ROUNDED = (
        "{count:were constant} stored as INT8 that are no weights, so that the file lacks their exact values ('{tensor}' has "
        "steps of {step:.4g}): anchors of a detector are off by up to half a step"
    )
    INSERT_IS_BETTER = (
        "the scales are those of another quantizer, and a fix has no data to find better ones: quantize the float model "
        "for full accuracy (qdqtool insert FLOAT.onnx --calib images/)"
    )
    NO_BETTER = "the prediction would not get better"
    BRINGS_ERRORS = "it would bring errors ({codes:joined , })"
    FEWER_INT8 = "there would be {after} INT8 convolutions instead of {before}"
    FEWER_INT8_TO_INT8 = "there would be {after} convolutions INT8 to INT8 instead of {before}"
    MORE_CONVERSIONS = "there would be {after} conversions instead of {before}"
    NOT_SEPARATED = "not separated from the places at fault within {tries} tries"
    NOT_SEPARATED_AS = NOT_SEPARATED + ": {why}"
    LEFT_AFTER_FIX = "it is left after the fix that was applied there"
    FIX_LACKS = "what a fix would need is not there"
    BRINGS_NOTHING = "it would bring nothing here"

    # extract
    CHECKED_BUILD = "{builder}: {status}"
    CHECKED_BUILD_SAYING = CHECKED_BUILD + ": {message}"
    CHECKED_DIFFERENCES = "{builder}: built, but {differences:each predicted %s, built %s}"
    CHECKED_AS_PREDICTED = "{builder}: built as predicted"
    CHECKED_COMMAND = "{command}: exit code {code}"
    CHECKED_COMMAND_SAYING = CHECKED_COMMAND + ", saying '{says}'"
    TRIMMING_ENDED = (
        "trimming ended after {nodes:,} nodes predicted: the part may hold more than what counts; "
        "{`minimize`} makes it smaller"
    )
    NOT_SHOWN = (
        "with these hops the part does not show {missing:first 4 %s}; give more, or no {`hops`}"
    )
    PREDICTED_OTHERWISE = (
        "predicted otherwise than in the whole, because of the cut: "
        "{convolutions:first 3 %s (%s to %s, here %s to %s)}"
    )
    EXIT_CODE_ALONE = (
        "what was held is the exit code, whatever the command says; {`says`} holds a text as well"
    )
    INTERRUPTED = "interrupted after {tries} tries; more may make it smaller"
    STOPPED = "stopped after {tries} tries; a higher {`limit`} may make it smaller"
    STOPPED_EARLY = (
        "stopped after {tries} tries of models that are large or of many nodes, a minute or two; give a "
        "{`limit`} to go on"
    )
    WHOLE_KEPT = (
        "the part alone does not build as the whole does; the whole is kept: use {`minimize`}"
    )

    # Builds
    SEVERAL_DOCUMENTS = (
        "{file} holds {count} whole JSON documents one after the other; the last was read"
    )
    SEVERAL_OF_BOTH = (
        "{file} holds {count} whole JSON documents one after the other; the last listing and the last "
        "profile were read"
    )
    CUT_OFF = "{file} is cut off or damaged; what could be read of it was used"
    NOT_UNDERSTOOD = "{gap} was not read: {lines:,} lines before it were not understood"
    TOO_LONG = (
        "the log is longer than any real one: what came after the first {records:,} records was counted and "
        "not kept"
    )

    # What a log's graph lacks
    CONSTANTS_LACK = (
        "weights and other constants: their values are not in a log; zeros were written"
    )
    SCALES_LACK = (
        "scales of {count} Q and DQ: not in a log; invented, and equal only where the log shows that "
        "TensorRT merged Qs or where they read one constant"
    )
    ATTRIBUTE_INFERRED = (
        "{what} of {count:counted node}: not printed; inferred from shapes (see doc_string)"
    )
    ALPHAS_LACK = "alpha of {count} LeakyRelu: not printed; ONNX's default was left"
    NO_OPERATOR = "{op} ({count}): no operator of ONNX; put into domain 'unknown'"
    INTEGERS_NARROWED = "integers: TensorRT before 10 prints INT64 as INT32; INT64 was written"
    OPSET_LACKS = "opset: not printed; 13 was taken"
    LOG_LACKS = "the log: {gap}"

    # verify and compare
    NO_VERSION = "the build does not state its version; predicted for {target}"
    AMBIGUOUS_VERSION = (
        "the build does not state its version, and its spelling is that of {version} and of 10: "
        "predicted for {target} ({`target`} decides)"
    )
    VERSION_OF_SPELLING = (
        "the build does not state its version; its spelling is that of {version}, taken as {target}"
    )
    SHOWN_BY_BUILD = "shown by the build"
    NOT_SHOWN_BY_BUILD = (
        "{name}: the build does not show which of {values:joined , } it is; compared with {value}"
    )
    SHOWN_AS_ASSUMED = "{name}: the build shows {value}, as is assumed for {target}"
    NEAREST_AS_ASSUMED = (
        "{name}: the build shows {value}, the nearest, though it does not fit everywhere, as is "
        "assumed for {target}"
    )
    SHOWN_OTHERWISE = "{name}: the build shows {value}; {assumed} is what {target} assumes"
    NEAREST_OTHERWISE = (
        "{name}: the build shows {value}, the nearest, though it does not fit everywhere; {assumed} "
        "is what {target} assumes"
    )
    COMPARED_WITH = "{name}: compared with {value}, which the build shows"
    MORE_MISMATCHES = "{count} more mismatches of kind '{kind}'"
    NO_FP16_FLAG = "the float remainder runs in FP32 because --fp16 was not given: a matter of flags, not of placement"
    BUILT_ALIKE = "predicted and built alike: {status}: {message}"
    CONVERSIONS_BETWEEN = "between {few} and {many} conversions predicted, depending on scales"
    LINES_LEFT_OUT = "{count} pass lines depend on scales being equal and were left out"
    NO_ESTIMATE = "{ms:.3f} ms measured ({source}), compared with no estimate: {why}"
    FEW_ALIKE = (
        "only {likeness:.0%} of the layers have their like in the same surroundings: two versions of a "
        "network, or two networks"
    )
    UNTYPED_TIMES = "{files:joined  and }: times of layers without data types; give the layer JSON or the log as well"
    ONE_UNTIMED = "one build has times of its layers, the other has none: give its profile as well"
    OF_FLOAT_MODEL = "the build has no Q/DQ: it was made from a float model"
    BUILT_BEFORE = "the build was made when this demo was written, not on this machine"

    # A line of a log
    PASS_UNKNOWN = (
        "{name} is a pass that no available build shows; qdqtool does not simulate it. A log with it is "
        "worth reporting."
    )
    PASSES_SHARE_LINE = (
        "The line does not say whose it is: it belongs to the pass of the last 'Running: ...' line "
        "above it."
    )

    # Times
    INPUT_TAKEN = "input '{name}' taken as {shape:joined x}"
    BATCH_SCALED = "the model's batch is {own}; work scaled to {batch}"
    WITHOUT_QDQ = "{target} has no INT8 on {gpu}: this is the time without Q/DQ"
    NO_INT8 = "no INT8 on this GPU: nothing to gain"
    IN_MYELIN = (
        "on {architecture} TensorRT runs the network in Myelin: conversions beside kernels that map or copy "
        "values count as part of them, as in one engine seen"
    )
    NO_LAYERS_NAMED = "{target} names no layers: estimated as the engine that {typical} would build"
    NOT_MEASURED = (
        "no {architecture} GPU of compute capability {cc} was measured; the range is wider"
    )
    SLOWED = (
        "{watts:g} W may not keep {clock:.0f} MHz under load: the upper end is for {least:.0f} MHz; {`clock`} is "
        "better"
    )
    SHAPES_UNKNOWN = (
        "the shapes of {unknown} of {layers} layers are not known; they count as a kernel's floor"
    )
    MOST_SHAPES_UNKNOWN = (
        SHAPES_UNKNOWN + ", so that this time says little: export the model with fixed shapes"
    )
    GAIN_UNKNOWN = "what INT8 could gain is not known: {why}"
    OF_GPU = "{notes:joined ; }"

    # GPUs
    LAPTOP = (
        "the laptop part is not in the table: SMs of the {board} at a guessed clock; give {`clock`}"
    )
    RATES_OF_NEAREST = "compute capability {cc} is not known; taken as {nearest} ({architecture})"
    TAKEN_AS = "'{name}' taken as {gpu}; it could be {others:joined , }"
    CLOCK_GUESSED = (
        "clock of {clock:.0f} MHz guessed from {limit:g} W of {watts:g} W; {`clock`} is better"
    )
    SMS_OF_LOG = "the log says {sms} SMs where the {board} has {own}: taken as the log says"
    CLOCK_OF_LOG = (
        "the log prints {clock:.0f} MHz and {memory_clock:.0f} MHz; a Jetson prints the GPU's clock for "
        "the memory's, and the lower one is taken; {`clock`} is better"
    )
    CONTRADICTED = (
        "the log contradicts {gpu}: {device} has {facts:joined  and }; name the GPU that it ran on with "
        "{`gpu`}, or leave that out"
    )
    BANDWIDTH_GUESSED = (
        "the log says nothing of the memory: taken as that of the {near} for as many SMs"
    )

    def __call__(self, **values: Any) -> Note:
        note = Note().saying(self.value, values)
        note.remark = self
        return note


def remarks(notes: Sequence[str]) -> list[Remark | None]:
    """What notes say, in their order; None for a string that is no note."""
    return [note.remark if isinstance(note, Note) else None for note in notes]
