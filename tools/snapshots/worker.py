"""Run steps of scenarios with the qdqtool of one checkout.

``python worker.py CHECKOUT``, controlled by pipes.

A line of JSON on stdin contains a folder and its steps. The answer is a line of JSON on stdout with
exit codes and processor times. Each step runs in a process that is forked after the import of
qdqtool. Its output streams are files in the folder.

This file imports only the standard library and modules of the checkout, so that the same file runs
old and new commits.
"""

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

SECONDS = 300  # if a step takes longer, the recording fails


def main() -> None:
    _import_product(Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        ends = [_run_forked(folder, number, step) for number, step in enumerate(request["steps"])]
        if not folder.exists():  # the recording failed and ended
            break
        print(json.dumps(ends), flush=True)


def _import_product(repository: Path) -> None:
    import onnx  # noqa: F401

    import calibration
    import qdqtool

    for package in (qdqtool, calibration):
        assert Path(str(package.__file__)).is_relative_to(repository), package.__file__
        for name in package.__all__:
            getattr(package, name)


def _run_forked(folder: Path, number: int, step: dict[str, Any]) -> tuple[int, float]:
    """Return the exit code and the processor seconds of a step."""
    child = os.fork()
    if child:
        _, status, usage = os.wait4(child, 0)
        return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    code = 70
    try:
        signal.alarm(SECONDS)
        os.chdir(folder)
        _redirect(0, os.devnull, os.O_RDONLY)
        _redirect(1, f"{number}.stdout", os.O_WRONLY | os.O_CREAT)
        _redirect(2, f"{number}.stderr", os.O_WRONLY | os.O_CREAT)
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
        code = _run(step)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _redirect(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, descriptor)
    os.close(opened)


def _run(step: dict[str, Any]) -> int:
    if "script" in step:
        functions = runpy.run_path(step["script"])
        answer = functions[step["function"]](**step["keywords"])
        print(json.dumps(answer))
        return 0
    sys.argv = ["qdqtool", *(_fill_in(word) for word in step["arguments"])]
    try:
        runpy.run_module("qdqtool", run_name="__main__", alter_sys=False)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def _fill_in(word: str) -> str:
    """Replace ``{finding}`` by the first finding of the last JSON that a step printed."""
    if word != "{finding}":
        return word
    for path in sorted(Path().glob("*.stdout"), key=lambda p: int(p.stem), reverse=True):
        text = path.read_text(encoding="utf-8")
        findings = json.loads(text).get("findings") if text.startswith("{") else None
        if findings:
            return str(findings[0]["code"])
    return "NO-FINDING"


if __name__ == "__main__":
    main()
