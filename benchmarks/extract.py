"""Size of what `qdqtool extract` cuts out for each finding of the evidence graphs and of two spoilt YOLOv8n.

usage: python benchmarks/extract.py [--builds N] [--private N] [--only WORD] [--keep rows.json]
                                    [--page docs/extract.md]

For each finding: does the extract show the same finding (code, node, message and fix) with the convolutions that it
names predicted alike, and with how many nodes? Targets: all do, at most 20 nodes in the median of each network. With
TensorRT-RTX installed, the extracts of N findings of each network, spread over its codes, are built: each has to build
where its whole network does. --private repeats it for N findings of each, made private; these are searched for every
name of the whole. Nothing was chosen on these networks but the limit of hops.
"""

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from common import kept_rows, publish, table
from onnx import helper, numpy_helper

import qdqtool
import qdqtool.errors
from qdqtool.builders import build
from qdqtool.builders.child import is_installed
from qdqtool.commands.demo_run import yolov8n
from qdqtool.extraction.private import made_private, texts
from qdqtool.extraction.select import choose, key
from qdqtool.insertion.api import insert
from qdqtool.model.editor import Editor
from qdqtool.model.graph import Model
from qdqtool.model.modelfile import load
from qdqtool.model.view import View

EVIDENCE = Path(__file__).resolve().parents[1] / "tests" / "data" / "evidence"
MEDIAN_NODES = 20


@functools.cache
def slow(size: int = 320) -> Model:
    """A quantized YOLOv8n without some of its pairs: it builds, and runs slower than it could."""
    random = np.random.default_rng(0)
    images = [{"images": random.random((1, 3, size, size), dtype=np.float32)} for _ in range(2)]
    return Model(_without_pairs(Model(insert(yolov8n(size), images).model)))


def defective() -> Model:
    """The same with defects that a builder refuses, each at another place."""
    proto = onnx.ModelProto()
    proto.CopyFrom(slow().proto)
    _spoil(proto)
    return Model(proto)


def _without_pairs(model: Model) -> onnx.ModelProto:
    """Skip branches, some convolutions' inputs and a MaxPool lose their pairs."""
    view, editor = View(model), Editor(model)
    for number, (q, dqs) in enumerate(view.pairs()):
        readers = {r.op for dq in dqs for r in model.readers(dq.output)}
        if "Add" in readers or number % 11 == 5 or ("MaxPool" in readers and number % 2):
            editor.bypass(q, dqs)
    return editor.finish()


def _spoil(proto: onnx.ModelProto) -> None:
    """Wrong scales, zero points and weights."""
    constants = {t.name: t for t in proto.graph.initializer}
    qs = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] not in constants]
    dqs: dict[str, list[onnx.NodeProto]] = {}
    for node in proto.graph.node:
        if node.op_type == "DequantizeLinear":
            dqs.setdefault(node.input[0], []).append(node)

    def own(nodes: list[onnx.NodeProto], place: int, value: np.ndarray, name: str) -> None:
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
        for node in nodes:
            while len(node.input) <= place:
                node.input.append("")
            node.input[place] = name

    for number, node in enumerate(qs):
        pair = [node, *dqs.get(node.output[0], ())]
        scale = numpy_helper.to_array(constants[node.input[1]])
        if number == 7:
            own(pair, 1, np.float32(-abs(scale)), "bad.negative")
        elif number == 12:
            own(pair, 2, np.int8(3), "bad.zero_point")
        elif number == 16:
            own(pair, 1, np.reshape(scale, (1,)), "bad.vector")
        elif number == 20:
            own(pair, 2, np.uint8(0), "bad.unsigned")
        elif number in (24, 31, 38):
            own(pair, 1, np.float32(scale * 1.7), f"bad.scale{number}")
        elif number == 45:
            own(pair, 1, np.float16(scale), "bad.half")
    weights = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in constants]
    values = numpy_helper.to_array(constants[weights[9].input[0]]).copy()
    values[0] = 0
    constants[weights[9].input[0]].CopyFrom(numpy_helper.from_array(values, weights[9].input[0]))
    scale = numpy_helper.to_array(constants[weights[14].input[1]])
    pair = [weights[14], *dqs.get(weights[14].output[0], ())]
    own(pair, 1, np.float32(scale.max()).reshape(()), "bad.one_for_all")
    for node in pair:
        own([node], 2, np.int8(0), "bad.one_zero")
    final = proto.graph.output[0].name
    proto.graph.node.append(helper.make_node("SecretNMS", [final], ["kept"], "nms", domain="plugins"))
    proto.graph.output[0].name = "kept"
    proto.opset_import.append(helper.make_opsetid("plugins", 1))
    unique: dict[str, onnx.TensorProto] = {t.name: t for t in proto.graph.initializer}
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(unique.values())


def networks() -> dict[str, Callable[[], Model]]:
    """Name to what makes the model."""
    found: dict[str, Callable[[], Model]] = {
        path.parent.name: functools.partial(load, path) for path in sorted(EVIDENCE.glob("*/model.onnx.gz"))
    }
    return {**found, "yolov8n without some pairs": slow, "yolov8n with defects": defective}


def builds(proto: onnx.ModelProto) -> bool:
    """Whether TensorRT-RTX builds it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        onnx.save(proto, path)
        return build(path).status == "built"


def spread(findings: Sequence[str], most: int) -> set[str]:
    """At most so many, the first of each code before the second of any."""
    return set(sorted(findings, key=lambda f: int(f.partition(":")[2]))[:most])


class Measuring:
    """One network after the other, each made once.

    Args:
        builds, private: Findings of each network to do that for.
    """

    def __init__(self, builds: int, private: int) -> None:
        self.builds, self.private = builds, private
        self.made = networks()
        self.at: tuple[str, Model, qdqtool.Prediction] | None = None

    def model(self, name: str) -> tuple[Model, qdqtool.Prediction]:
        if self.at is None or self.at[0] != name:
            model = self.made[name]()
            self.at = name, model, qdqtool.predict(model)
        return self.at[1:]

    def network(self, name: str) -> dict[str, Any]:
        """Its size, its findings, and whether it builds."""
        model, prediction = self.model(name)
        counts: dict[str, int] = {}
        found = []
        for finding in prediction.findings:
            counts[finding.code] = counts.get(finding.code, 0) + 1
            found.append(f"{finding.code}:{counts[finding.code]}")
        return {"nodes": len(model.nodes), "findings": found, "builds": self.builds > 0 and builds(model.proto)}

    def finding(self, name: str, which: str, whole: dict[str, Any]) -> dict[str, Any]:
        """One extract: its size, and what is wrong with it."""
        model, prediction = self.model(name)
        start = time.process_time()
        wrong: list[str] = []
        row: dict[str, Any] = {"wrong": wrong}
        try:
            result = qdqtool.extract(model, finding=which)
        except qdqtool.errors.QdqtoolError as error:
            wrong.append(str(error))
            return row
        row.update(nodes=result.nodes[0], seconds=round(time.process_time() - start, 1))
        if key(choose(prediction, which, None)) not in {key(f) for f in result.prediction.findings}:
            wrong.append("another finding")
        if whole["builds"] and which in spread(whole["findings"], self.builds):
            row["builds"] = builds(result.proto)
            if not row["builds"]:
                wrong.append("does not build, the whole does")
        if which in spread(whole["findings"], self.private):
            row["private"] = self._private(model, result)
            wrong += [f"private: {row['private']}"] if row["private"] else []
        return row

    def _private(self, model: Model, result: qdqtool.Extraction) -> str:
        """What is wrong with the private extract; empty where nothing is."""
        try:
            proto, _ = made_private(model, result.proto, result.prediction)
        except qdqtool.errors.QdqtoolError as error:
            return str(error)
        private = qdqtool.predict(proto)
        if [(c.op, c.precision, c.inputs, c.output) for c in private.convolutions] != [
            (c.op, c.precision, c.inputs, c.output) for c in result.prediction.convolutions
        ] or private.findings_by_code() != result.prediction.findings_by_code():
            return "another prediction"
        names = {n.name for n in model.nodes} | set(model.producers) | set(model.initializers) | set(model.inputs)
        left = names & set(texts(proto))
        text = "\n".join(texts(proto))
        left |= {n for n in names if len(n) > 5 and n in text}
        return f"'{min(left)}' is left" if left else ""


def page(wholes: dict[str, Any], rows: dict[str, Any]) -> str:
    """The table, and the figures of all networks."""
    lines = []
    for name, whole in [*wholes.items(), ("all", {})]:
        here = {r.partition(" | ")[2]: rows[r] for r in rows if name == "all" or r.partition(" | ")[0] == name}
        found = here.values() if name != "all" else rows.values()
        sizes = [r["nodes"] for r in found if "nodes" in r]
        built = [r["builds"] for r in found if "builds" in r]
        private = [not r["private"] for r in found if "private" in r]
        lines.append((
            name, whole.get("nodes", ""), f"{len(found)} ({len({w.partition(':')[0] for w in here})})",
            f"{statistics.median(sizes) if sizes else 0:g}", max(sizes, default=0),
            f"{sum(built)} of {len(built)}" if built else "the whole does not" if whole else "-",
            f"{sum(private)} of {len(private)}",
        ))  # fmt: skip
    text = table(("network", "nodes", "findings (codes)", "nodes in the median", "at most", "built", "private"), lines)
    spent = sorted(r["seconds"] for r in rows.values() if "seconds" in r)
    if spent:
        text += f"\n\nCPU time of an extract: {statistics.median(spent):g} s in the median, {spent[-1]:g} s at most."
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--builds", type=int, default=10**6, help="most extracts to build for each network")
    parser.add_argument("--private", type=int, default=0, help="findings of each network to make private as well")
    parser.add_argument("--only", default="", help="networks whose name holds this")
    parser.add_argument("--keep", type=Path, help="rows measured so far: written after each, taken up where it ended")
    parser.add_argument("--page", type=Path, help="page to write the table into")
    options = parser.parse_args()
    measuring = Measuring(options.builds if is_installed("tensorrt_rtx") else 0, options.private)
    names = [n for n in measuring.made if options.only in n]
    suffix = options.keep.suffix if options.keep else ""
    wholes = kept_rows(names, options.keep and options.keep.with_suffix(f".networks{suffix}"), measuring.network)
    cells = {f"{n} | {which}": (n, which) for n in names for which in wholes[n]["findings"]}
    rows = kept_rows(cells, options.keep, lambda cell: measuring.finding(*cells[cell], wholes[cells[cell][0]]))
    failed = [f"{cell}: {wrong}" for cell, row in rows.items() for wrong in row["wrong"]]
    for name in names:
        sizes = [rows[c]["nodes"] for c in cells if cells[c][0] == name and "nodes" in rows[c]]
        if sizes and statistics.median(sizes) > MEDIAN_NODES:
            failed.append(f"{name}: more than {MEDIAN_NODES} nodes in the median")
    publish("extract", page(wholes, rows), options.page)
    print("\n".join(f"FAILED {line}" for line in failed))
    return int(bool(failed or not rows))


if __name__ == "__main__":
    sys.exit(main())
