"""vLLM's and upstream SGLang's own LoRA code, asked what it would add to which module.

KTBRIDGE_LOADERS_PYTHON names an interpreter with the packages that both import (`make test-loaders` makes
one); without it these tests skip. The engines themselves are the Python files of their published wheels.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from askedprocess import Asked, fetched_wheel, unpacked
from rawadapter import write_raw
from realengine import trained

from ktbridge.adapter import read_adapter

PYTHON = "KTBRIDGE_LOADERS_PYTHON"
# No two sizes alike, so that nothing fits where it doesn't belong.
HIDDEN, INNER, EXPERTS, LAYERS, RANK = 48, 40, 3, 2, 4
PLAIN = (".py", ".json", ".pyi", ".h", ".cuh")
Deltas = dict[str, np.ndarray]
ATTENTION = {
    "self_attn.q_proj": (64, HIDDEN),
    "self_attn.k_proj": (32, HIDDEN),
    "self_attn.v_proj": (32, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 64),
}
NARROW = {
    "self_attn.q_proj": (48, HIDDEN),
    "self_attn.k_proj": (24, HIDDEN),
    "self_attn.v_proj": (24, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 48),
}
SHARED = {
    "mlp.shared_experts.gate_proj": (INNER, HIDDEN),
    "mlp.shared_experts.up_proj": (INNER, HIDDEN),
    "mlp.shared_experts.down_proj": (HIDDEN, INNER),
}
GATE = {"mlp.gate": (EXPERTS, HIDDEN)}
LINEAR = {
    "linear_attn.in_proj_qkv": (64, HIDDEN),
    "linear_attn.in_proj_z": (32, HIDDEN),
    "linear_attn.in_proj_b": (4, HIDDEN),
    "linear_attn.in_proj_a": (4, HIDDEN),
    "linear_attn.out_proj": (HIDDEN, 32),
}
SHARED_ONE = {
    "mlp.shared_expert.gate_proj": (56, HIDDEN),
    "mlp.shared_expert.up_proj": (56, HIDDEN),
    "mlp.shared_expert.down_proj": (HIDDEN, 56),
    "mlp.shared_expert_gate": (1, HIDDEN),
}
MLA = {
    "self_attn.q_proj": (64, HIDDEN),
    "self_attn.kv_a_proj_with_mqa": (24, HIDDEN),
    "self_attn.kv_b_proj": (96, 16),
    "self_attn.o_proj": (HIDDEN, 64),
}
QUERY_RANK = {
    "self_attn.q_a_proj": (20, HIDDEN),
    "self_attn.q_b_proj": (64, 20),
    **{name: shape for name, shape in MLA.items() if name != "self_attn.q_proj"},
}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 128,
}  # fmt: skip
# model_type, after a slash what sets one of several rows apart: architecture, what its config.json has
# besides, prefix of adapters' keys, other modules
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, tuple[int, int]]]] = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}, "model.", ATTENTION | GATE),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 16, "head_dim": None, "num_key_value_heads": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 0, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
            "topk_method": "greedy", "scoring_func": "softmax", "rope_parameters": YARN,
        },
        "model.",
        MLA | SHARED,
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "kv_lora_rank": 16, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 16, "head_dim": None, "num_key_value_heads": 4, "n_shared_experts": 1,
            "first_k_dense_replace": 0, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
            "rope_parameters": YARN,
            "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        },
        "model.",
        QUERY_RANK | SHARED,
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {"n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
        "model.",
        ATTENTION | SHARED,
    ),
    "mixtral": (
        "MixtralForCausalLM",
        # SGLang makes the heads of hidden_size / num_attention_heads, as the published models are.
        {"intermediate_size": INNER, "head_dim": 12},
        "model.",
        NARROW,
    ),
    "olmoe": ("OlmoeForCausalLM", {"intermediate_size": INNER, "head_dim": 16}, "model.", {}),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {
            "layer_types": ["linear_attention"] * LAYERS, "full_attention_interval": 4,
            "shared_expert_intermediate_size": 56,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "vision_config": {
                "model_type": "qwen3_5_moe", "depth": 1, "hidden_size": 32, "num_heads": 2,
                "intermediate_size": 32, "out_hidden_size": HIDDEN, "deepstack_visual_indexes": [],
            },
        },
        "model.language_model.",
        LINEAR | GATE | SHARED_ONE,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]},
            "vision_config": {
                "model_type": "qwen3_vl_moe", "depth": 1, "hidden_size": 32, "num_heads": 2,
                "intermediate_size": 32, "out_hidden_size": HIDDEN, "deepstack_visual_indexes": [],
            },
        },
        "model.language_model.",
        ATTENTION | GATE,
    ),
    "gpt_oss": ("GptOssForCausalLM", {"intermediate_size": INNER}, "model.", ATTENTION),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {"shared_expert_intermediate_size": 56, "head_dim": 12},
        "model.",
        NARROW | GATE | SHARED_ONE,
    ),
}  # fmt: skip
_QWEN35 = FAMILIES["qwen3_5_moe"]
FAMILIES["qwen3_5_moe/full"] = (  # the other kind of its layers, where a gate comes with q
    _QWEN35[0],
    {
        **_QWEN35[1],
        "layer_types": ["full_attention"] * LAYERS,
        "full_attention_interval": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [1, 1, 0],
            "partial_rotary_factor": 0.25,
        },
    },
    _QWEN35[2],
    ATTENTION | {"self_attn.q_proj": (128, HIDDEN)} | GATE | SHARED_ONE,
)


class Refusal(str):
    """What an engine raised, and when: ``stage`` is "adapter", or "request", once the server is up."""

    def __new__(cls, error: str, stage: str) -> Refusal:
        text = super().__new__(cls, error)
        text.stage = stage
        return text

    stage: str


class Loader:
    """One version of one engine: what it would add to each module, by the module's path from layers on."""

    def __init__(self, package: str, version: str, root: Path) -> None:
        self.package, self.version, self._root = package, version, root
        site = unpacked(
            fetched_wheel(package, version),
            root / "site",
            # SGLang looks for its kernels' headers as it is imported.
            lambda name: name.endswith(PLAIN) or ".dist-info/" in name,
        )
        driver = Path(__file__).parent / "loaders_cpu" / f"drive_{package}.py"
        command = [os.environ[PYTHON], "-W", "ignore", str(driver)]
        self._asked = Asked(command, {"PYTHONPATH": str(site), "TMPDIR": str(root)}, root)

    def load(self, model: Path, adapter: Path, fused: bool = False, **flags: Any) -> Deltas | Refusal:
        """The deltas, float64, or what the engine raised."""
        import torch
        from safetensors.torch import load_file

        out = self._root / "out.safetensors"
        asked = {"model": str(model), "adapter": str(adapter), "fused": fused, "out": str(out)}
        if self.package == "vllm":
            flags = {"max_lora_rank": 8, **flags}
        told = self._asked.ask({**asked, "flags": flags})
        if "error" in told:
            assert told["stage"] in ("adapter", "request"), told["error"]
            return Refusal(told["error"], told["stage"])
        return {name: value.to(torch.float64).numpy() for name, value in load_file(out).items()}

    def end(self) -> None:
        self._asked.end()


def make_raw(directory: Path, model_type: str, model: Path, without: Sequence[str] = (), **kind: Any) -> Path:
    """A raw adapter of all experts and of all that the family has besides, but ``without``."""
    _, _, prefix, modules = FAMILIES[model_type]
    modules = {name: shape for name, shape in modules.items() if name not in without}
    return write_raw(
        directory, layers=tuple(range(LAYERS)), experts=EXPERTS, hidden=HIDDEN, inter=INNER,
        prefix=prefix, modules=modules, block="", base_model=str(model), seed=3, **{"rank": RANK, **kind},
    )  # fmt: skip


def deltas_of(raw: Path) -> Deltas:
    """What training meant: scale * B A of each module, float64."""
    pairs = trained(read_adapter(raw))
    return {path[path.index("layers.") :]: b @ a for path, (a, b) in pairs.items()}


def outcome(found: Deltas | str, whole: Deltas) -> str:
    """What became of a damaged adapter: "refuses", "ignores", "takes" other values or "drops" some."""
    if isinstance(found, str):
        return "refuses"
    served = {path: found.get(path, np.zeros_like(delta)) for path, delta in whole.items()}
    changed = {p: served[p] for p, d in whole.items() if not np.allclose(served[p], d, 1e-12, 1e-12)}
    if not changed:
        return "ignores"
    return "takes" if any(delta.any() for delta in changed.values()) else "drops"


def same(found: Deltas | str, expected: Deltas) -> None:
    """Every delta at its place, and zero everywhere else."""
    assert not isinstance(found, str), found
    unknown = expected.keys() - found.keys()
    assert not unknown, f"nowhere: {sorted(unknown)}, there are {sorted(found)}"
    for path, delta in found.items():
        wanted = expected.get(path)
        if wanted is None:
            assert not delta.any(), path
            continue
        beyond = delta.copy()  # what an engine pads its modules by
        beyond[: wanted.shape[0], : wanted.shape[1]] = 0
        assert not beyond.any(), path
        # Sums of exact products: bfloat16 times bfloat16, added in float64 in one order or another.
        np.testing.assert_allclose(
            delta[: wanted.shape[0], : wanted.shape[1]],
            wanted,
            rtol=1e-12,
            atol=1e-12,
            err_msg=path,
        )
