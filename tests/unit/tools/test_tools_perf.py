"""The load tool: what it makes of perf_analyzer's records, and of those that are not all there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from paged_engine.tools import perf

RECORDS = '{"experiments": [{"requests": [{"timestamp": 0, "response_timestamps": [2000000, 5000000]}]}]}'
PERF_ANALYZER = """#!/bin/bash
for word in "$@"; do case $word in --profile-export-file=*) file=${word#*=} ;; esac; done
echo run >>"$COUNT"
if (($(wc -l <"$COUNT") > NUM_UNFINISHED)); then echo "$RECORDS" >"$file"; else echo "${RECORDS:0:40}" >"$file"; fi
"""


@pytest.mark.parametrize(("num_unfinished", "code"), [(0, 0), (2, 0), (3, 1)])
def test_unfinished_records_are_measured_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_unfinished: int,
    code: int,
) -> None:
    binary, count = tmp_path / "perf_analyzer", tmp_path / "count"
    binary.write_text(PERF_ANALYZER)
    binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
    environment = {
        "PATH": "/usr/bin:/bin",
        "COUNT": str(count),
        "RECORDS": RECORDS,
        "NUM_UNFINISHED": str(num_unfinished),
    }
    monkeypatch.setattr(perf, "find_perf_analyzer", lambda cache_dir: (binary, environment))
    assert perf.main(["--url", "nowhere:1", "--cache-dir", str(tmp_path), "--concurrency", "1"]) == code
    assert len(count.read_text().splitlines()) == min(num_unfinished + 1, 3)
    output = capsys.readouterr()
    if code == 0:
        assert output.out.splitlines()[-1].split()[:5] == ["1", "200.00", "12800.0", "2.0", "2.0"]
    else:
        assert "left its records unfinished 3 times" in output.err
