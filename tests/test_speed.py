import resource
import sys
from pathlib import Path

import pytest

from benchmarks import speed

#: Uses processor time in the system, in the process and in a child, and writes how much.
WORK = """
import os
from pathlib import Path
with open("/dev/urandom", "rb") as source:
    while os.times().system < 0.05:
        source.read(1 << 16)
while os.times().user < 0.05:
    pass
if os.fork():
    os.wait()
else:
    while os.times().user < 0.05:
        pass
Path("took").write_text(str(sum(os.times()[:4])))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /dev/urandom and forks")
def test_measure_counts_the_processor_time_of_children(tmp_path: Path) -> None:
    (tmp_path / "works.py").write_text(WORK)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = speed.measure([sys.executable, "-m", "works"], tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert run.cpu == pytest.approx(used, rel=1e-3)
    assert run.cpu >= float((tmp_path / "took").read_text()) and run.wall > 0 and run.peak > 5


def test_measure_failed_process_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3: nothing"):
        speed.measure([sys.executable, "-c", "print('nothing'); raise SystemExit(3)"], tmp_path)


def test_compare_runs_two_versions_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees: list[Path] = []

    def measure(command: list[str], tree: Path) -> speed.Run:
        trees.append(tree)
        seconds = len(trees) * (3.0 if tree == tmp_path else 1.0)  # the machine gets slower
        return speed.Run(seconds, 2 * seconds, 10.0)

    monkeypatch.setattr(speed, "sources", lambda commit, folder: {"abc": tmp_path}[commit])
    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed.subprocess, "run", lambda *command, **how: None)
    (row,) = speed.compare("abc", ["help"], 4, None, None)
    here = speed.ROOT
    assert trees == [
        here,
        tmp_path,
        tmp_path,
        here,
        here,
        tmp_path,
        tmp_path,
        here,
    ]
    # 1 to 2 * 3, 4 to 3 * 3, 5 to 6 * 3 and 8 to 7 * 3: the median is the mean of the middle two
    assert row[:3] == ["`--help`", "2.0 s", f"{(5 / 18 + 8 / 21) / 2:.2f} [0.17, 0.44]"]
    assert "now/before" in capsys.readouterr().out
