"""Warnings and errors of TensorRT are recognised by their wording."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqtool.explain.errors import KINDS, KNOWN, KnownError, lookup, named_node, parse_error, short
from tests.tables import rows


def known(text: str) -> KnownError:
    found = lookup(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "text", ["", "Conv_1", "Parsing node: conv [Conv]", "Engine built in 5 sec.", "x" * 100_000]
)
def test_other_texts_are_not_explained(text: str) -> None:
    assert lookup(text) is None


def test_entries_are_complete_and_found_by_their_own_words() -> None:
    assert len({entry.id for entry in KNOWN}) == len(KNOWN)
    for entry in KNOWN:
        assert entry.title and entry.source and entry.severity in ("error", "warning", "harmless")
        assert entry.cause.endswith(".") and entry.fix.rstrip().endswith((".", ")."))
    # No entry stands behind another one that takes all of its texts; they are those that users reported
    for wanted, text in rows("messages.tsv"):
        assert known(f"[11/21/2026-12:00:00] [E] [TRT] {text}").id == wanted, text
    found = known("In node 7 (parseNode): UNSUPPORTED_NODE: Foo is not there.")
    assert found.id == "unknown-error" and "the ONNX parser" in found.title
    assert "UNSUPPORTED_NODE: Foo is not there." in found.cause


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
def test_advice_is_for_the_kind_of_node(node: str, kind: str, advice: str) -> None:
    """Of a quantized convolution it is the entry's own."""
    named, found = named_node(NODE.format(node)), known(NODE.format(node))
    assert named is not None and (named.kind.id, found.id) == (kind, "no-implementation")
    own = next(entry for entry in KNOWN if entry.id == found.id)
    assert found.fix == (KINDS[advice].fix if advice else own.fix)


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
def test_an_unknown_error_is_told_by_its_form(
    text: str, part: str, code: int | None, function: str, condition: str
) -> None:
    parsed = parse_error(text)
    assert (parsed.part, parsed.code, parsed.function, parsed.condition) == (
        part,
        code,
        function,
        condition,
    )
    found = known(text)
    assert found.id == "unknown-error" and found.unknown.startswith("Its cause")
    assert part in found.title and condition in found.cause


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
def test_a_marked_line_is_never_passed_over_in_silence(text: str, severity: str) -> None:
    found = known(text)
    assert found.severity == severity and found.id == f"unknown-{severity}"
    assert "These words are new" in found.unknown


@pytest.mark.parametrize(
    "text",
    [
        "[11/21/2026-12:00:00] [I] [TRT] These words are new",
        "[W] another program",
        "WARNING: another program",
        "[11/21/2026-12:00:00] [E] [TRT] ",
    ],
)
def test_other_lines_are_not_taken_for_errors(text: str) -> None:
    assert lookup(text) is None


# As `st.text()`, which makes a table of all characters first.
_CHARACTERS = (
    st.integers(0, 0x7F) | st.integers(0x80, 0xD7FF) | st.integers(0xE000, 0x10FFFF)
).map(chr)


@given(st.lists(_CHARACTERS, max_size=300).map("".join))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    for words in (
        text,
        f"Could not find any implementation for node {text}.",
        f"Assertion {text} failed",
    ):
        found = lookup(words)
        assert found is None or (found.cause and found.fix)


WORDS = [
    "Assertion ",
    "Error Code 1",
    "[a.cpp::b::",
    "Conv_1 + ",
    "_1",
    "In function ",
    "(",
    "due to ",
]


@pytest.mark.parametrize("word", WORDS)
def test_no_text_takes_long(word: str) -> None:
    started = time.process_time()
    lookup(word * (200_000 // len(word)))
    lookup("Could not find any implementation for node " + word * (200_000 // len(word)))
    assert time.process_time() - started < 3


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
def test_the_name_of_a_node_without_a_kernel(rest: str, name: str | None) -> None:
    found = named_node(f"[E] Error Code 10: Could not find any implementation for node{rest}")
    assert (found.name if found is not None else None) == name
    assert named_node("Could not find any kernel for node conv") is None


def test_long_names_are_cut_in_the_midst() -> None:
    assert short("x" * 90) == "x" * 90
    assert short("a" * 45 + "b" * 46) == f"{'a' * 40}...{'b' * 40}"
