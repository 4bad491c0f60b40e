"""tools/gpu_tests.py: every test is accounted for, whatever one of them does to its process."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = """
import os, time
import pytest

@pytest.mark.parametrize("i", range(20))
def test_some(i):
    if i == 1:
        pytest.skip("has no kernel")
    if i == 3:
        os.kill(os.getpid(), 11)
    if i == 8:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if i == 12:
        time.sleep(600)
    assert i != 17
"""


def test_a_crash_and_a_test_that_hangs_are_failures_and_not_the_end(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_more.py").write_text("def test_one(): pass\n")
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    command = [sys.executable, "tools/gpu_tests.py", str(tmp_path), "--marks", "not gpu", "--most", "6"]
    command += ["--jobs", "2", "--test-seconds", "10", "--times", str(tmp_path / "times.json")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    last = result.stdout.splitlines()[-1]
    assert re.match(r"16 passed, 5 failed, 1 skipped in", last), result.stdout + result.stderr
    assert result.returncode == 1
    for i in (3, 8, 12, 17):
        assert f"test_some[{i}]" in result.stdout
    assert "ends its process (-11)" in result.stdout and "stands still for 10 s" in result.stdout
    assert "no_such_module" in result.stdout
    assert len(json.loads((tmp_path / "times.json").read_text())) == 3


def test_a_process_hands_on_what_it_has_no_time_for(tmp_path):
    (tmp_path / "test_slow.py").write_text(
        "import pytest, time\n@pytest.mark.parametrize('i', range(5))\ndef test_slow(i): time.sleep(1)\n"
    )
    command = [sys.executable, "tools/gpu_tests.py", str(tmp_path), "--marks", "not gpu", "--piece-seconds", "0"]
    result = subprocess.run([*command, "--jobs", "1"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout.startswith("5 passed, 0 failed, 0 skipped in"), result.stdout
    assert result.returncode == 0


def test_the_end_of_the_time_leaves_a_summary(tmp_path):
    (tmp_path / "test_long.py").write_text("import time\ndef test_long(): time.sleep(600)\ndef test_b(): pass\n")
    command = [sys.executable, "tools/gpu_tests.py", str(tmp_path), "--marks", "not gpu", "--seconds", "12"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    assert "CUT" in result.stdout and "not reached in 1" in result.stdout.splitlines()[-1], result.stdout


def test_a_later_call_goes_on_where_the_first_was_cut(tmp_path):
    (tmp_path / "test_two.py").write_text(
        f"import os\ndef test_one(): pass\ndef test_two(): assert os.path.exists({str(tmp_path / 'mended')!r})\n"
    )
    command = [sys.executable, "tools/gpu_tests.py", str(tmp_path), "--marks", "not gpu", "--jobs", "1"]
    command += ["--state", str(tmp_path / "state.json")]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    (tmp_path / "mended").touch()
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "1 passed, 1 failed" in first.stdout and first.returncode == 1
    assert "1 tests ended well in calls before this one\n1 passed, 0 failed" in second.stdout
    assert second.returncode == 0


def test_what_a_sanitizer_says_at_the_end_of_a_process_is_shown(tmp_path):
    words = "b'a.h:1: runtime error: null\\n' + b'#1 main\\n' * 999"
    (tmp_path / "test_one.py").write_text(f"import os\ndef test_one():\n    os.write(2, {words})\n    os._exit(1)\n")
    command = [sys.executable, "tools/gpu_tests.py", str(tmp_path), "--marks", "not gpu", "--jobs", "1", "-s"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "a.h:1: runtime error: null" in result.stdout and "ends its process (1)" in result.stdout
