"""What `ktbridge doctor` tells of a GPU, tried on one."""

import torch

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
