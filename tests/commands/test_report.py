import json
from pathlib import Path

import pytest

from tests import contract
from tests.commands.conftest import Cli, next_commands
from tests.reporting.conftest import NetworkFiles
from tests.reporting.test_collect import result


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    contract.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> NetworkFiles:
    return NetworkFiles(tmp_path_factory.mktemp("network"))


def sections(page: Path) -> set[str]:
    return {part.partition('"')[0] for part in page.read_text().split('<section id="')[1:]}


def test_report_has_a_section_for_each_input(
    network: NetworkFiles, tmp_path: Path, cli: Cli
) -> None:
    tuning, page = tmp_path / "t.json", tmp_path / "r.html"
    tuning.write_text(json.dumps(result()))
    text = cli(
        *("report", network.model, "--float", network.float, "--calib-cache", network.cache),
        *("--tuning", tuning, "--gpu", "T4", "-o", page),
    )
    assert cli.err == "" and str(page) in text
    assert sections(page) >= {
        "network",
        "findings",
        "convolutions",
        "layers",
        "scales",
        "time",
        "histograms",
        "weights",
        "tuning",
    }


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "r.html"


@pytest.mark.parametrize(("log", "agree"), [("agrees.log", 6), ("differs.log", 5)])
def test_report_compares_with_a_build(
    builds: Path, cli: Cli, log: str, agree: int, page: Path
) -> None:
    assert cli.json("report", builds / "whole.onnx", builds / log, "-o", page)[
        "agreement"
    ].startswith(f"{agree} of 6 ")
    assert cli.err == "" and "verification" in sections(page)


def test_report_prints_the_verdict_on_a_float_model_once(
    network: NetworkFiles, cli: Cli, page: Path
) -> None:
    text = cli("report", network.float, "-o", page)
    assert [t.count("Nothing is quantized:") for t in (text, page.read_text())] == [1, 1]


def test_report_cache_of_another_model_is_refused(
    builds: Path, network: NetworkFiles, tmp_path: Path, cli: Cli
) -> None:
    assert network.cache.name in cli.refuse(
        *("report", builds / "residual.onnx", "--calib-cache", network.cache),
        *("-o", tmp_path / "r.html"),
    )


def test_report_default_name(cli: Cli, network: NetworkFiles, current_folder: Path) -> None:
    repeated = ["--gpu", "T4", "--assume", "silu-add=fused"]
    assert next_commands(cli("report", network.model, *repeated))[0][-4:] == repeated
    assert [p.name for p in current_folder.iterdir()] == ["model_qdq_report.html"]
