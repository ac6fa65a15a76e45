"""kt-kernel 0.7.2's SFT layer, called as its own training code calls it (kt_kernel/sft/wrapper.py, base.py).

``AMXBF16_SFT`` is its only method for bfloat16 weights; despite the name the wheel also has it in the
AVX512-BF16 variant of the extension, which it takes on CPUs without AMX. The rest is set in its favor:

* no autograd around it: ``forward`` and ``backward`` are timed bare (they copy inputs in and results out)
* ``chunked_prefill_size`` = T, ``max_cache_depth`` = 1: the smallest buffers
* ``share_backward_bb`` stays off: the transposed weights for backward are kept, not repacked each step
* LoRA and its gradients are plain bfloat16 tensors, so each backward overwrites instead of accumulating
* one pool of ``threads`` threads on NUMA node 0, which it pins to the first cores of that node
"""

from __future__ import annotations

import torch
from peers.cases import LORA_NAMES, PROJECTIONS, RESULTS
from peers.layer import Case, serve


class KtKernel:
    def __init__(self, case: Case) -> None:
        import kt_kernel

        shape = case.shape
        self.layer = kt_kernel.KTMoEWrapper(
            layer_idx=0,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.inner,
            gpu_experts_mask=None,
            num_gpu_experts=0,
            cpuinfer_threads=case.threads,
            threadpool_count=1,
            weight_path="",
            chunked_prefill_size=shape.tokens,
            method="AMXBF16_SFT",
            mode="sft",
            lora_rank=case.rank,
            lora_alpha=case.alpha,
            max_cache_depth=1,
        )
        logical = torch.arange(shape.experts, dtype=torch.int64)
        weights = [case.weights.pop(name) for name in PROJECTIONS]
        self.layer.load_weights_from_tensors(*weights, logical)
        del weights  # packed into its own buffers by now
        self.d_lora = {name: torch.zeros_like(case.lora[name]) for name in LORA_NAMES}
        gradients = {f"grad_{name}": tensor for name, tensor in self.d_lora.items()}
        self.layer.init_lora_weights(**case.lora, **gradients)
        self.case = case
        version = getattr(kt_kernel, "__version__", "?")
        self.about = {"version": version, "isa": kt_kernel.__cpu_variant__}
        self.reset()

    def reset(self) -> None:
        self.out: torch.Tensor | None = None
        self.gradients: tuple[torch.Tensor, ...] = ()

    def forward(self) -> None:
        case = self.case
        self.out = self.layer.forward(case.hidden, case.topk_ids, case.topk_weights, save_for_backward=True)

    def backward(self) -> None:
        self.gradients = self.layer.backward(self.case.d_out)

    def results(self) -> dict[str, torch.Tensor]:
        d_lora = (self.d_lora[name] for name in LORA_NAMES)
        return dict(zip(RESULTS, (self.out, *self.gradients, *d_lora), strict=True))


if __name__ == "__main__":
    serve(KtKernel)
