"""``qdqtool fix``."""

import numpy as np
import onnx
import pytest

from qdqtool.base import budgets
from qdqtool.base.notes import Remark
from tests.explain.graphs import GRAPHS
from tests.explain.lint.test_api import simple
from tests.explain.test_causes import residual


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(residual("float"), path)
    return str(path)


def test_report_metadata_and_names(model, tmp_path, cli):
    out = tmp_path / "fixed.onnx"
    said = cli("fix", model, "-o", out)
    assert said.startswith(f"1 fix applied, written to {out}\n")
    said = " ".join(said.split())
    assert "before 4 convolutions: 4 INT8 (1 to INT8, 3 to float), 0 float; 3 conversions" in said
    assert "after 4 convolutions: 4 INT8 (3 to INT8, 1 to float), 0 float; 1 conversion" in said
    assert "SKIP-FLOAT (1)" in said
    cli("predict", out, "--fail-on", "warning")
    proto = onnx.load(model)
    entry = proto.metadata_props.add()
    entry.key, entry.value = "names", "{0: 'cat'}"
    onnx.save(proto, model)
    out = tmp_path / "f.onnx"
    cli("fix", model, "-o", out)
    fixed = onnx.load(out)
    assert fixed.metadata_props[0].value == "{0: 'cat'}"
    assert [o.name for o in fixed.graph.output] == [o.name for o in proto.graph.output]
    assert {n.name for n in proto.graph.node} <= {n.name for n in fixed.graph.node}


def test_parameters_are_options_in_text_and_json(model, tmp_path, monkeypatch, cli):
    monkeypatch.setattr(budgets, "SESSION_WORK", 1)
    for form in ("text", "json"):
        said = " ".join(cli("fix", model, "-o", tmp_path / "f.onnx", "--format", form).split())
        assert "raise it with --effort" in said and "`" not in said


def test_what_was_asked_for_and_left(model, tmp_path, cli):
    np.savez(tmp_path / "in.npz", x=np.ones((1, 16, 16, 16), np.float32))
    cli("fix", model, "-o", tmp_path / "f.onnx", "--inputs", tmp_path / "in.npz")
    onnx.save(simple(scale=float("nan"), zero=3), tmp_path / "bad.onnx")
    assert "left: " in cli(
        "fix", tmp_path / "bad.onnx", "-o", tmp_path / "f.onnx", "--only", "ADD-BOTH", code=1
    )
    onnx.save(GRAPHS["weights-not-constant"](), tmp_path / "m.onnx")
    arguments = ["--only", "W-NONCONST", "--only", "ADD-BOTH", "--target", "trt8.5"]
    answer = cli.json("fix", tmp_path / "m.onnx", "-o", tmp_path / "f.onnx", *arguments)
    assert answer["applied"] == [] and answer["notes"] == [
        Remark.CODE_NOT_FOUND(code="ADD-BOTH", target="trt8.5")
    ]
    assert [(c["code"], c["node"], bool(c["why_not"])) for c in answer["refused"]] == [
        ("W-NONCONST", "c", True)
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "NOPE"], "no finding has the code 'NOPE'"),
        (["--only", "CH-ALIGN"], "no automatic fix"),
        (["--target", "trt7"], "unknown target"),
        (["--inputs", "missing.npz"], "missing.npz: no such file"),
        (["--inputs", "x.npz"], "not an npz file"),
    ],
)
def test_bad_usage(model, tmp_path, monkeypatch, cli, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.npz").write_bytes(b"hello")
    out = tmp_path / "f.onnx"
    assert said in cli.refused("fix", model, "-o", out, *arguments)
    assert not out.exists()
