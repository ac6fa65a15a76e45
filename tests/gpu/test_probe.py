"""What `ktbridge doctor` tells of a GPU, tried on one."""

import os

import torch

from ktbridge.experts.gpu import timing
from ktbridge.experts.gpu.probe import probe_gpus
from ktbridge.serve.doctor import check_gpus


def test_each_gpu_is_tried_and_left_as_it_was():
    found = list(probe_gpus())
    assert [gpu.index for gpu in found] == list(range(torch.cuda.device_count()))
    for gpu in found:
        assert not gpu.error
        assert 0.1e9 < gpu.link < 1e12
        assert gpu.one_by_one == (gpu.capability.startswith("8.") and gpu.grouped_gemm)
        assert gpu.tensor_cores == (float(gpu.capability) >= 8.0)
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2.0] * 3
    there, checks = check_gpus(ask_torch=True)
    assert len(there) == len(checks) - 1 == len(found)
    assert checks[0].state == "ok"
    assert [gpu.not_in_place for gpu in there] == [gpu.not_in_place for gpu in found]


def test_a_profiler_that_was_detached_sees_kernels_again(monkeypatch):
    cuda = torch.device("cuda")
    for _ in range(3):
        assert timing.seconds_busy(lambda: torch.ones(1 << 20, device=cuda).add_(1), cuda) > 0
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as seen:
            torch.ones(3, device=cuda).add_(1)
            torch.cuda.synchronize()
        assert sum(each.count for each in seen.key_averages() if each.self_device_time_total) >= 2
        timing.detach_profiler(cuda)
        assert "TEARDOWN_CUPTI" not in os.environ
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")  # whoever sets it has a reason
    timing.detach_profiler(cuda)
    assert os.environ["TEARDOWN_CUPTI"] == "0"
