"""Contracts of SGLang-KT's versions on adapter directories: one table, one row per contract.

Taken from the wheels of all versions and tested by running 0.6.4 and 0.7.2; ``contract_for`` returns a
version's row. `make test-engine` compares the table with the wheels: layouts, methods, flags and the
modules that old versions miss. Post-releases are distinguished: the change from the split to the merged
contract came with 0.7.0.post4.
What the loaders ignore silently (rsLoRA, alpha_pattern, DoRA, ...) is the same in all known versions, so
each is a rule (``ktbridge.codes``), not a column.

Example::

    contract, known = contract_for("sglang-kt==0.7.2")
    assert known and not contract.split and contract.merged
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ktbridge.errors import UsageError
from ktbridge.model import Family

ENGINE = "sglang-kt"
VLLM = "vllm"
VLLM_SEEN = "0.33.0"
"""The version whose own code `make test-loaders` runs."""
VLLM_WITHOUT_PATTERNS = "0.27.1"
"""The last version looked at that knows no rank_pattern and no alpha_pattern; later ones were not run."""
MIXED_FLAG = "--enable-mixed-moe-lora-format"
"""With it vLLM wraps every family's experts one by one, and a request says of its adapter which it is."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank; 16 unless given."""
VLLM_HONORS = (
    "KTB107", "KTB109", "KTB117", "KTB118", "KTB208", "KTB209", "KTB212", "KTB214", "KTB608",
)  # fmt: skip
"""Findings that hold for SGLang-KT and not for vLLM: rsLoRA, alpha_pattern, target_modules that say less than
the tensors, PEFT's fused layout, k without q and v, projections and modules of one layer only, w1/w3/w2, and
other modules."""

SGLANG = "sglang"
"""Upstream SGLang, which is not SGLang-KT: another distribution, with LoRA code of its own."""
SGLANG_SEEN = "0.5.23"
"""The version whose own code `make test-loaders` runs."""
SGLANG_HONORS = (
    "KTB017", "KTB106", "KTB118", "KTB121", "KTB205", "KTB209", "KTB210", "KTB608",
)  # fmt: skip
"""Findings that don't hold for upstream SGLang (several files, prefixes, other modules), or that
``checks.sglang`` makes in its own words (target_modules, partners in stacked modules)."""
SEEN = {VLLM: VLLM_SEEN, SGLANG: SGLANG_SEEN}
"""Engines other than SGLang-KT, and the version of each that was looked at."""


@dataclass(frozen=True)
class Contract:
    """The contract of versions ``first`` to ``last`` (inclusive).

    ``split``: an expert and a non-expert directory served together (``--kt-expert-lora-path`` with
    ``--lora-paths``). ``expert``, ``nonexpert``, ``merged``: such a directory served alone.
    ``expert_formats``: values of the manifest's expert_weight_format that a ``--kt-method`` serves;
    ``only_rank`` restricts some of them to one LoRA rank. ``methods``: the values of ``--kt-method``
    that take an expert LoRA. ``base_requests``: whether a request without an adapter is answered
    while a merged adapter is served. ``unapplied``: by family, the modules (path suffixes) whose
    LoRA is read and then never applied, or ends the start-up. ``activations``: of the experts.
    """

    first: str
    last: str
    split: bool
    merged: bool
    expert: bool
    nonexpert: bool = True
    methods: tuple[str, ...] = ()
    expert_formats: tuple[str, ...] = ("bf16", "int8")
    base_requests: bool = True
    only_rank: dict[str, int] = field(default_factory=dict)
    unapplied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu", "swish")

    @property
    def name(self) -> str:
        """The range of versions in words: "0.6.3 to 0.7.0.post3", "up to 0.6.2.post3"."""
        if self.first == "0":
            return f"up to {self.last}"
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


# Up to 0.7.0.post3 the pattern for attention LoRA keys misses these modules of Qwen3.5.
_QWEN35_MISSED = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "mlp.gate",
    "mlp.shared_expert_gate",
    *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
)
# No version has room for q_proj's LoRA where a gate comes with q: it ends at start-up.
_UNSIZED: dict[str, tuple[str, ...]] = {"Qwen3-Next": ("self_attn.q_proj",)}
# Up to 0.7.0.post3 the engine can't size LoRA on the last two families' modules and ends at start-up.
_MISSED: dict[str, tuple[str, ...]] = {
    **_UNSIZED,
    "Qwen3.5-MoE": _QWEN35_MISSED,
    "Qwen3-MoE": ("mlp.gate",),
    "DeepSeek": ("mlp.gate", "self_attn.q_a_proj", "self_attn.q_b_proj"),
}

# Unfixed in every version: unpickling of socket input in servers; the replay script.
SERVER_HOLES = "CVE-2026-3059, CVE-2026-3060 and CVE-2026-7301"
REPLAY_HOLE = "CVE-2026-3989"

# What every version's registry of models has of those that are trained here; of any other architecture the
# engine runs transformers' own modules, which its expert LoRA never reaches.
ARCHITECTURES = frozenset(
    f"{name}ForCausalLM"
    for name in (
        "Afmoe", "BailingMoeV2_5", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Ernie4_5_Moe",
        "ExaoneMoE", "Glm4Moe", "Glm4MoeLite", "GlmMoeDsa", "GptOss", "GraniteMoe", "GraniteMoeHybrid",
        "HunYuanMoEV1", "KimiLinear", "Lfm2Moe", "MiMoV2Flash", "MiniMaxM2", "Mixtral", "Olmoe",
        "PhiMoE", "Qwen2Moe", "Qwen3Moe", "Qwen3Next",
    )
) | frozenset(
    f"{name}ForConditionalGeneration"
    for name in ("Glm4vMoe", "KimiK25", "Qwen3VLMoe", "Qwen3_5Moe")
)  # fmt: skip
# Where kt-kernel (0.7.2) looks for a layer's experts: block, and names of gate, up and down of an expert.
EXPERTS_READ = (
    ("mlp", ("gate_proj", "up_proj", "down_proj")),
    ("block_sparse_moe", ("w1", "w3", "w2")),
)

_METHODS = ("AMXBF16", "BF16", "AMXINT8", "AMXINT4")

CONTRACTS: tuple[Contract, ...] = (
    Contract(
        first="0",
        last="0.6.2.post3",
        split=False,
        merged=False,
        expert=False,  # --kt-expert-lora-path is unknown
        unapplied=_MISSED,
    ),
    Contract(
        first="0.6.3",
        last="0.7.0.post3",
        split=True,
        merged=True,
        expert=True,
        methods=_METHODS,
        unapplied=_MISSED,
    ),
    Contract(
        first="0.7.0.post4",
        last="0.7.0.post4",
        split=False,  # ValueError at start-up
        merged=True,
        expert=True,
        methods=(*_METHODS, "AMXFP8", "FP8", "RAWINT4"),
        expert_formats=("bf16", "int8", "fp8", "rawint4"),
        base_requests=False,
        only_rank={"rawint4": 8},
        unapplied=_UNSIZED,
    ),
    Contract(
        first="0.7.2",
        last="0.7.2",
        split=False,
        merged=True,
        expert=True,
        methods=(*_METHODS, "AMXFP8", "FP8", "RAWINT4", "MXFP4"),
        expert_formats=("bf16", "int8", "fp8", "rawint4", "mxfp4"),
        base_requests=False,
        only_rank={"rawint4": 8},
        unapplied=_UNSIZED,
    ),
)

_VERSION = re.compile(
    r"v?(\d{1,9}(?:\.\d{1,9}){0,5})"
    r"(?P<suffix>(?:[._-]?(?:a|b|c|rc|alpha|beta|pre|preview|post|rev|r|dev)[._-]?\d*){0,3})"
    r"(?:\+[a-z0-9._-]+)?",
    re.IGNORECASE | re.ASCII,
)
_POST = re.compile(r"(?:post|(?<![a-z])r(?:ev)?)[._-]?(\d{0,9})", re.IGNORECASE | re.ASCII)


def install_engine(version: str | None = None) -> str:
    """The command that installs the engine of ``version`` (default: the newest known)."""
    return f"pip install 'ktransformers[sglang]=={version or CONTRACTS[-1].last}'"


def parse_version(text: str) -> tuple[int, ...]:
    """The release of a PEP 440 version, without the zeros at its end: (0, 7) for "0.7.0.post1".

    Pre- and post-releases count as their release. UsageError for anything else.
    """
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is not a version", "write it like 0.7.2")
    release = [int(part) for part in match[1].split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    return tuple(release)


def vllm_prefixes(family: Family) -> set[str]:
    """List what precedes ``layers.N`` in vLLM; a wrapper takes the names of the text model in it as well."""
    fused = {"language_model.model."} if family.vllm_fused else set()
    return {family.prefix, "model.", *fused}


def version_order(text: str) -> tuple[tuple[int, ...], int]:
    """Sort key of a version: the release, then the post-release (0 for none)."""
    release = parse_version(text)
    match = _VERSION.fullmatch(text.strip())
    post = _POST.search(match["suffix"]) if match is not None else None
    return release, int(post[1] or 0) if post else 0


def split_engine(engine: str) -> tuple[str, str]:
    """Name and version of ``sglang-kt==X``, ``vllm==X``, ``sglang==X``, or of the last two alone.

    Those alone are of the version looked at.

    Raises UsageError when ``engine`` is malformed or names another engine.
    """
    name, separator, text = engine.partition("==")
    name = re.sub(r"[-_.]+", "-", name.strip()).lower()
    if name in SEEN and not separator:
        text = SEEN[name]
    elif name not in (ENGINE, *SEEN) or not separator:
        step = f"write it like {ENGINE}==0.7.2, or {VLLM}, or {SGLANG} (which is not SGLang-KT)"
        raise UsageError(f"the engine {engine!r} is not known", step)
    version_order(text)
    return name, text


def contract_for(engine: str) -> tuple[Contract, bool]:
    """The contract of ``sglang-kt==X``, and whether that version is a known one.

    A version between two rows gets the newer row, one after all rows the newest. Raises UsageError
    when ``engine`` is malformed or names another engine.
    """
    name, separator, text = engine.partition("==")
    if re.sub(r"[-_.]+", "-", name.strip()).lower() != ENGINE or not separator:
        raise UsageError(f"the engine {engine!r} is not known", f"write it like {ENGINE}==0.7.2")
    version = version_order(text)
    for contract in CONTRACTS:
        if version <= version_order(contract.last):
            return contract, version >= version_order(contract.first)
    return CONTRACTS[-1], False
