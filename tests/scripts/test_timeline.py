"""scripts/timeline.py: what is told of a recorded step, from events as torch's profiler names them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

SCRIPTS = Path(__file__).parents[2] / "scripts"
LINK, BACK = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"
EVENTS = [
    (LINK, 10, 40),
    ("k1", 5, 30),
    ("ncclDevKernel_AllReduce", 35, 60),
    (LINK, 70, 90),
    (BACK, 90, 95),
]


def test_a_step_is_told_by_link_gpu_and_pauses(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import timeline

    path = tmp_path / "v2-6.json"
    path.write_text(json.dumps(timeline.summarize(EVENTS, 100.0)))
    command = [sys.executable, str(SCRIPTS / "timeline.py"), "show", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = done.stdout
    assert told.split("v2-6", 1)[1].split()[:5] == ["100", "50", "50", "25", "25"]
    assert "40 to 70 (30): ncclDevKernel_AllReduce 20.0" in told
    assert "90 to 100 (10): no kernel" in told


def test_calls_of_the_host_keep_no_gpu_busy(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import timeline

    def event(name, begin, end, device, **more):  # µs
        device = DeviceType(device.value)  # an object of its own, as each of the profiler's
        return FunctionEvent(1, name, 0, begin, end, device_type=device, **more)

    recorded = [
        event("k1", 10_000, 20_000, DeviceType.CUDA),
        event("cudaLaunchKernel", 0, 9_000, DeviceType.CPU),
        event("Optimizer.step", 0, 30_000, DeviceType.CUDA, is_user_annotation=True),
        event("cudaDeviceSynchronize", 15_000, 40_000, DeviceType.CPU),
    ]
    found = timeline.device_events(recorded, 50.0)
    assert found == [("k1", pytest.approx(20), pytest.approx(30))]
    assert timeline.sum_lengths(timeline.summarize(found, 50.0)["gpu"]) == pytest.approx(10)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 1}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    command = [sys.executable, str(SCRIPTS / "timeline.py"), "show", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"{path} is no recorded step" in done.stderr.replace("\n", "")


def test_a_run_without_the_step_is_no_success(tmp_path):
    command = [sys.executable, str(SCRIPTS / "timeline.py"), "record", str(tmp_path / "step.json")]
    done = subprocess.run([*command, "--", "doctor"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "nothing was recorded" in done.stderr


ENDS = st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: tuple(sorted(pair)))


@given(st.lists(ENDS))
def test_what_is_covered_and_its_pauses_make_the_whole(intervals):
    sys.path.insert(0, str(SCRIPTS))
    try:
        import timeline
    finally:
        sys.path.remove(str(SCRIPTS))
    covered = timeline.join_intervals(intervals)
    free = timeline.find_pauses(covered, 50)
    inside = {n for begin, end in intervals for n in range(begin, end)}
    assert timeline.sum_lengths(covered) == len(inside)
    assert timeline.sum_lengths(free) == 50 - len(inside)
