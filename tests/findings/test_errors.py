import pytest
from hypothesis import given, strategies as st

from qdqtool.findings.codes import CODES
from qdqtool.findings.errors import (
    KNOWN_ERRORS,
    NODE_KINDS,
    explain_messages,
    lookup,
    parse_error,
    parse_missing_kernel,
    shorten_name,
)
from qdqtool.findings.partial_errors import find_by_part
from tests.growth_factor import LINEAR, growth_factor
from tests.tables import rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Conv_1",
        "Parsing node: conv [Conv]",
        "Engine built in 5 sec.",
        "x" * 100_000,
        "[11/21/2026-12:00:00] [I] [TRT] These words are new",
        "[W] another program",
        "WARNING: another program",
        "[11/21/2026-12:00:00] [E] [TRT] ",
    ],
    ids=lambda text: text[:30],
)
def test_lookup_ignores_other_texts(text: str) -> None:
    assert lookup(text) is None


def test_known_errors_have_title_cause_fix_and_source() -> None:
    for error in KNOWN_ERRORS:
        assert error.title and error.source
        assert error.cause.endswith(".") and error.fix.rstrip().endswith((".", ")."))


@pytest.mark.parametrize(("name", "text"), rows("messages.tsv"))
def test_lookup_finds_messages_that_users_reported(name: str, text: str) -> None:
    """An entry that matches too much would hide the entries after it."""
    assert lookup(f"[11/21/2026-12:00:00] [E] [TRT] {text}").id == name


@pytest.mark.parametrize("prefix", ["", "Error[3]: ITensor::setInput: "])
def test_lookup_knows_the_errors_that_findings_quote(prefix: str) -> None:
    quotes = {text for entry in CODES.values() for _, text in entry.error}
    assert len(quotes) > 10
    known = {error.id for error in KNOWN_ERRORS}
    errors = {quote: lookup(prefix + quote) for quote in quotes}
    assert [q for q, error in errors.items() if error is None or error.id not in known] == []


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("input has type Int32 but must have type FP8", "dq-type"),
        ("b/DQ: input has type Int32 but must ha", "dq-type"),
        ("of scales is not equal to the number of output channels. In node 3", "scale-count"),
        ("zero point is not supported. Please set kENABLE_UINT8", "zero-point"),
        ("Could not find any implementation for", "no-implementation"),
        ("scales is not equal", "scale-count"),
        ("scales is not eq", None),
        ("The number of words that follow here", None),
    ],
)
def test_error_is_found_by_a_part_of_its_text(part: str, name: str | None) -> None:
    assert lookup(part) is None
    error = find_by_part(part)
    assert error is None if name is None else error.id == name and "a part of it" in error.unknown


@pytest.mark.parametrize(
    ("text", "search"),
    [
        ("Error[3]: ITensor::setInput: foo bar", "'ITensor::setInput: foo bar'"),
        ("Error Code 3:\n  foo\n bar", "'foo bar'"),
        ("[E] Error[3]: ", "'[E] Error[3]:'"),
    ],
)
def test_unknown_error_proposes_its_words_as_search(text: str, search: str) -> None:
    error = lookup(text)
    assert error.id == "unknown-error" and search in error.unknown


def test_lookup_explains_unknown_parser_error_by_its_form() -> None:
    error = lookup("In node 7 (parseNode): UNSUPPORTED_NODE: Foo is not there.")
    assert error.id == "unknown-error" and "the ONNX parser" in error.title
    assert "UNSUPPORTED_NODE: Foo is not there." in error.cause


NODE = "[optimizer.cpp::computeCosts] Error Code 10: Internal Error (Could not find any implementation for node {}.)"


@pytest.mark.parametrize(
    ("node", "kind", "advice"),
    [
        ("/0/model.22/Range", "shape", "shape"),
        ("/m/Shape_3", "shape", "shape"),
        (
            "{ForeignNode[a.weight...Transpose_259 + (Unnamed Layer* 379) [Shuffle]]}",
            "region",
            "region",
        ),
        (
            "w + QuantizeLinear_222_quantize_scale_node + Conv_224 + Add_243 + Relu_244",
            "convolution",
            "",
        ),
        ("/c/Conv + PWN(/c/act/LeakyRelu)", "convolution", "convolution"),
        ("002_convolutional", "convolution", "convolution"),
        ("up.weight + QuantizeLinear_629 + ConvTranspose_631", "deconvolution", "deconvolution"),
        ("/c/input_quantizer/QuantizeLinear_clone_0", "quantizer", "quantizer"),
        ("/model.23/EfficientIdxNMS_TRT", "plugin", "plugin"),
        ("/layers.0/LayerNormalization", "normalization", "normalization"),
        ("(Unnamed Layer* 12) [ElementWise]", "pointwise", "plain"),
        ("/pool/MaxPool", "pooling", "plain"),
    ],
)
def test_lookup_advises_by_the_kind_of_node(node: str, kind: str, advice: str) -> None:
    """A quantized convolution gets the advice of the entry itself."""
    named, error = parse_missing_kernel(NODE.format(node)), lookup(NODE.format(node))
    assert named is not None and (named.kind.id, error.id) == (kind, "no-implementation")
    entry = next(entry for entry in KNOWN_ERRORS if entry.id == error.id)
    assert error.fix == (NODE_KINDS[advice] if advice else entry).fix


@pytest.mark.parametrize(
    ("text", "part", "code", "function", "condition"),
    [
        (
            "[E] Error[2]: [fooOpt.cpp::doThing::12] Error Code 2: Internal Error (Assertion mScaleVec.size() == n failed)",
            "",
            2,
            "doThing",
            "mScaleVec.size() == n",
        ),
        (
            "../builder/Layers.cpp (3986) - Assertion Error in validate: 0 (nbResizeDim >= 0)",
            "the network API",
            None,
            "validate",
            "nbResizeDim >= 0",
        ),
        (
            "ERROR: builtin_op_importers.cpp:2249 In function importFoo:\n[8] Assertion failed: weights.rank() > 2",
            "the ONNX parser",
            None,
            "importFoo",
            "weights.rank() > 2",
        ),
        (
            "trtexec: /x/myelin/src/optimizer/kqv_gemm_split.cpp:658: void f(): Assertion `status == myelinSuccess' failed.",
            "Myelin",
            None,
            "",
            "status == myelinSuccess",
        ),
        (
            "[TRT] [E] 1: [caskUtils.cpp::createHardwareInfo::852] Error Code 1: Cask (Failed)",
            "the kernels of convolutions and matrix products",
            1,
            "createHardwareInfo",
            "",
        ),
    ],
)
def test_unknown_error_is_described_by_its_form(
    text: str, part: str, code: int | None, function: str, condition: str
) -> None:
    form = parse_error(text)
    assert (form.part, form.code) == (part, code)
    assert (form.function, form.condition) == (function, condition)
    error = lookup(text)
    assert error.id == "unknown-error" and error.unknown.startswith("The cause")
    assert part in error.title and condition in error.cause
    assert (f", function {function}" in error.cause) == bool(function)


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("[11/21/2026-12:00:00] [W] [TRT] These words are new", "warning"),
        ("[TRT] [E] These words are new", "error"),
        ("[TensorRT] WARNING: These words are new", "warning"),
        ("[2022-05-10 08:31:40   ERROR] These words are new", "error"),
        (
            "build started\n2022-12-30 [E:onnxruntime:, x.h:5] [2022-12-30 12:38:57   ERROR] These words are new",
            "error",
        ),
    ],
)
def test_lookup_reports_every_marked_line(text: str, severity: str) -> None:
    error = lookup(text)
    assert error.severity == severity and error.id == f"unknown-{severity}"
    assert "These words are new" in error.unknown


# `st.text()` would build a table of all characters first.


@given(
    st.lists(
        (st.integers(0, 0x7F) | st.integers(0x80, 0xD7FF) | st.integers(0xE000, 0x10FFFF)).map(chr),
        max_size=300,
    ).map("".join)
)
def test_lookup_of_any_text_has_cause_and_fix_or_none(text: str) -> None:
    for message in (
        text,
        f"Could not find any implementation for node {text}.",
        f"Assertion {text} failed",
    ):
        error = lookup(message)
        assert error is None or (error.cause and error.fix)


@pytest.mark.parametrize("begin", ["", "Could not find any implementation for node "])
@pytest.mark.parametrize(
    "word",
    [
        "Assertion ",
        "Error Code 1",
        "[a.cpp::b::",
        "Conv_1 + ",
        "_1",
        "In function ",
        "(",
        "due to ",
    ],
)
def test_lookup_of_long_text_takes_linear_time(word: str, begin: str) -> None:
    """Patterns may be quadratic on the first 4,096 characters, so the shortest text is that long."""

    def look(length: int) -> object:
        return lookup(begin + word * (16 * length // len(word)))

    assert growth_factor(look, LINEAR) <= LINEAR


@pytest.mark.parametrize(
    ("rest", "name"),
    [
        (" /model.0/conv/Conv.\nnext line", "/model.0/conv/Conv"),
        (" conv due to insufficient workspace", "conv"),
        (" PWN(a, b).", "PWN(a, b)"),
        (" (conv).)", "(conv)"),
        (" conv)", "conv"),
        (" .:", None),
        ("", None),
        ("\nconv", None),
        (f" {'x' * 3999}yz", "x" * 3999),
    ],
)
def test_named_node_has_the_name_of_the_message(rest: str, name: str | None) -> None:
    text = f"[E] Error Code 10: Could not find any implementation for node{rest}"
    assert getattr(parse_missing_kernel(text), "name", None) == name
    assert parse_missing_kernel(text.replace("implementation", "kernel")) is None


def test_shorten_name_cuts_the_middle_of_long_names() -> None:
    assert shorten_name("x" * 90) == "x" * 90
    assert shorten_name("a" * 45 + "b" * 46) == f"{'a' * 40}...{'b' * 40}"


def test_note_of_a_skipped_tactic_needs_no_action() -> None:
    text = (
        "Error[9]: Error Code: 9: Skipping tactic 0x0 due to exception [type.cpp:186: infer_type] "
        "Could not infer output types for operation: dequantize"
    )
    messages = [{"level": level, "text": text} for level in ("note", "error")]
    note, error = explain_messages({"command": None, "messages": messages})["messages"]
    assert (note["known"], note["severity"]) == ("tactic-skipped", "warning")
    assert error["known"] != "tactic-skipped"


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("* GPU compute time is unstable, with coefficient of variance = 7.7%.", "--useSpinWait"),
        ("* Throughput may be bound by Enqueue Time rather than GPU Compute", "--useCudaGraph"),
    ],
)
def test_fix_advises_no_option_of_the_command(text: str, option: str, is_used: bool) -> None:
    command = f"trtexec {option} --best" if is_used else None
    facts = {"command": command, "messages": [{"level": "warning", "text": text}]}
    assert (option in explain_messages(facts)["messages"][0]["fix"]) != is_used
