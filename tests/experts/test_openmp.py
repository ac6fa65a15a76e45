"""torch's idle OpenMP threads go to sleep soon, so that the kernels have the CPUs to themselves."""

import os
import subprocess
import sys

import pytest

# CPU seconds of the whole process while the main thread sleeps 10 ms after each parallel operation: idle
# threads that spin burn them, threads that sleep don't.
SCRIPT = """
import sys, time
{imports}
if torch.get_num_threads() < 2 or "libgomp" not in open("/proc/self/maps").read():
    sys.exit(77)
values = torch.zeros(1 << 20)
used = 0.0
for _ in range(30):
    values.add_(1)
    before = time.process_time()
    time.sleep(0.01)
    used += time.process_time() - before
print(used)
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    environment = kept | environment
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def idle_seconds(imports: str) -> float:
    done = run(SCRIPT.format(imports=imports), OMP_NUM_THREADS="2")
    if done.returncode == 77:
        pytest.skip("torch's threads are not GNU OpenMP's, or there is one only")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
def test_idle_threads_sleep_when_ktbridge_is_imported_before_torch():
    spinning = idle_seconds("import torch, ktbridge.sft")
    assert idle_seconds("import ktbridge.sft, torch") < spinning / 2
    assert idle_seconds("import ktbridge.experts, torch") < spinning / 2


@pytest.mark.parametrize(
    ("chosen", "kept"), [({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_the_users_choice_stays(chosen, kept):
    done = run("import ktbridge.experts, os; print(os.environ.get('GOMP_SPINCOUNT'))", **chosen)
    assert done.stdout.strip() == kept, done.stderr
