"""Probes of this machine's GPUs: what each can do for routed experts, tried in a moment.

``python -m ktbridge.experts.gpu.probe`` prints torch's CUDA and the facts of each GPU, each as a line of JSON
behind ``MARK``, for callers that don't import torch themselves. This module imports it only where GPUs are
looked at.
"""

from __future__ import annotations

import json
import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MARK = "ktbridge:"
_TRANSFERRED = 256 << 20  # bytes: some 5 ms on a fast link, a quarter of a second on a slow one
ONE_BY_ONE = (
    "torch's grouped GEMM is a loop over experts there, which waits for the GPU in each call, so stream and "
    "resident are slower than the link and the GPU allow, the more so the fewer tokens a step has"
)
"""Consequence for training of a GPU of ``loops_over_experts``."""
NO_KERNEL = (
    "ktbridge has no kernel of its own for these GPUs yet, because it was never measured on one: try "
    "kt_experts: cpu beside it, and more tokens a step"
)
_FILE = 16 << 20  # bytes: more than the 8 MiB that many systems let a process lock


@dataclass(frozen=True)
class GpuFacts:
    """One GPU. Reasons are in the words of who gave them, "" where there is nothing in the way."""

    index: int
    name: str
    capability: str = ""
    """As NVIDIA writes it: "9.0"."""
    tensor_cores: bool = False
    """True where it multiplies bfloat16 in tensor cores, without which experts stay on the CPU."""
    grouped_gemm: bool = False
    link: float = 0.0
    """Bytes a second from pinned host memory."""
    not_in_place: str = ""
    """Reason why the pages of a mapped file can't be registered with the driver."""
    no_triton: str = ""
    error: str = ""
    """Reason why nothing else is known."""
    one_by_one: bool = False
    """True where grouped GEMM is a loop over experts on it, which waits for the GPU in each call."""
    memory: int = 0
    """Bytes."""


def loops_over_experts(capability: str) -> bool:
    """Return whether torch's grouped GEMM is known to be a loop on GPUs of this compute capability.

    ``capability`` is as NVIDIA writes it ("8.6"; "" where unknown). So it is from sm80 to sm89.
    """
    return capability.startswith("8.")


def probe_gpus() -> Iterator[GpuFacts]:
    """Yield the facts of each GPU that torch sees. Raises nothing for what is tried on one."""
    import torch

    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        try:
            yield _probe_gpu(index)
        except (OSError, RuntimeError) as error:  # CUDA's are of the latter
            reason = str(error).strip().partition("\n")[0]
            error_text = f"{type(error).__name__}: {reason}"
            yield GpuFacts(index, found.name, memory=found.total_memory, error=error_text)


def _probe_gpu(index: int) -> GpuFacts:
    """Probe one GPU. Raises what CUDA does (out of memory), and OSError without room in /tmp."""
    import torch

    from ktbridge.experts.gpu import operations

    device = torch.device("cuda", index)
    found = torch.cuda.get_device_properties(device)
    cores = operations.has_tensor_cores(device)
    with torch.cuda.device(device):
        kernels = operations.triton_or_reason(device)
        return GpuFacts(
            index=index,
            name=found.name,
            memory=found.total_memory,
            capability=f"{found.major}.{found.minor}",
            tensor_cores=cores,
            grouped_gemm=cores and operations.IN_TORCH,
            one_by_one=cores and operations.IN_TORCH and _waits(device),
            link=link_speed(device),
            not_in_place=in_place_obstacle(),
            no_triton=kernels if isinstance(kernels, str) else "",
        )


def _waits(device: torch.device) -> bool:
    """Return whether a grouped product on ``device`` waits for it, as the loop does to know its bounds."""
    import torch
    from torch.nn import functional

    rows = torch.zeros(32, 64, dtype=torch.bfloat16, device=device)
    matrices = torch.zeros(2, 64, 64, dtype=torch.bfloat16, device=device)
    ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
    functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)  # what the first call sets up may wait
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def link_speed(device: torch.device, seconds: float = 0.0) -> float:
    """Return the bytes a second from pinned memory to ``device``, by copies for some ``seconds``."""
    import torch

    from ktbridge.experts.gpu.timing import median_seconds

    pinned = torch.empty(_TRANSFERRED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_TRANSFERRED, dtype=torch.uint8, device=device)
    return _TRANSFERRED / median_seconds(lambda: there.copy_(pinned, non_blocking=True), device, seconds)


def in_place_obstacle() -> str:
    """Return why the current GPU can't read a file that is mapped as checkpoints are; "" if it can."""
    import numpy as np

    from ktbridge.experts.gpu.copying import Registration, register
    from ktbridge.experts.gpu.layout import CopySpan, Group

    with tempfile.TemporaryFile() as file:
        file.write(b"x" * _FILE)
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            address = np.frombuffer(pages, np.uint8).ctypes.data
            done = register([Group((0,), (CopySpan(address, 0, _FILE),), {}, _FILE, ())])
            if isinstance(done, Registration):
                done.close()  # before the map goes
                return ""
            return done


def _main() -> None:
    import torch

    def answer(facts: dict[str, object]) -> None:
        print(f"\n{MARK}{json.dumps(facts)}", flush=True)

    answer({"cuda": torch.version.cuda})
    for each in probe_gpus():
        answer(asdict(each))


if __name__ == "__main__":
    _main()
