"""A training run before it starts: what it needs of memory, disk and time, and what to change.

Reads config.json, the headers of the safetensors and the rows; torch is imported only to measure::

    from ktbridge.sft.config import load_config
    from ktbridge.sft.plan import make_plan, this_machine

    config = load_config("run.yaml")
    plan = make_plan(config, this_machine(Path(config.output_dir)), measure=False)
    plan.fits, plan.total("GPU"), [str(verdict) for verdict in plan.verdicts]
"""

from __future__ import annotations

from ktbridge.model import resolve_model
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.plan.advice import advise
from ktbridge.sft.plan.lengths import read_lengths
from ktbridge.sft.plan.memory import CUDA_HOST, LIBRARIES, Setting, predict
from ktbridge.sft.plan.parts import GB, Advice, Pace, Part, Plan, Verdict, Where, total
from ktbridge.sft.plan.shape import read_shape
from ktbridge.sft.plan.target import Target, parse_size, this_machine

__all__ = [
    "Advice",
    "Pace",
    "Part",
    "Plan",
    "Target",
    "Verdict",
    "make_plan",
    "parse_size",
    "this_machine",
]


def make_plan(config: TrainConfig, target: Target, measure: bool = True) -> Plan:
    """What the run of ``config`` will need, against what ``target`` has.

    ``measure`` times the kernels on this machine, for tokens/s. Raises KtbridgeError for a model that is
    missing, has no safetensors or is of an unknown kind, and what reading the rows raises.
    """
    base = resolve_model(config.model_name_or_path)
    other = config.kt_config.kt_weight_path
    shape = read_shape(base, resolve_model(other) if other else None)
    lengths = read_lengths(config, base)
    cuda = target.gpu_memory is not None and not config.use_cpu
    threads = config.kt_config.kt_num_threads or target.cores
    setting = Setting(shape, config, lengths, cuda, threads)
    parts = predict(setting)

    checks: list[tuple[Verdict, tuple[Where, ...]]] = []
    if cuda:
        gpu: tuple[Where, ...] = ("GPU",)
        checks.append((Verdict("GPU memory", total(parts, "GPU"), target.gpu_memory), gpu))
    own = total(parts, "RAM")
    cached = own + total(parts, "page cache")
    checks.append((Verdict("memory of its own", own, target.memory), ("RAM",)))
    if cached > own:
        held = Verdict("memory with the experts in the page cache", cached, target.memory)
        checks.append((held, ("page cache", "RAM")))
    checks.append((Verdict("disk", total(parts, "disk"), target.disk), ("disk",)))

    pace = None
    if measure:
        from ktbridge.sft.plan.speed import measure_pace

        pace = measure_pace(setting, target.memory)
    return Plan(
        model=str(base),
        model_type=shape.config.model_type,
        device="GPU" if cuda else "CPU",
        parts=tuple(parts),
        verdicts=tuple(verdict for verdict, _ in checks),
        advice=tuple(advise(setting, [check for check in checks if not check[0].fits])),
        notes=(*_notes(setting, target), *(pace.notes if pace else ())),
        rows=lengths.rows,
        longest=lengths.longest,
        mean_tokens=lengths.mean,
        steps=setting.steps,
        pace=pace,
    )


def _notes(setting: Setting, target: Target) -> list[str]:
    """What a reader must know of how sure the numbers are."""
    notes = []
    shape, config = setting.shape, setting.config
    if not setting.lengths.counted:
        notes.append(
            "rows were not counted by the model's tokenizer (no tokenizer.json that can be read): a token "
            "is taken as 3 bytes"
        )
    if config.kt_config.kt_backend == "kt-kernel":
        notes.append(
            "kt-kernel keeps two copies of the experts in the process's own memory, where kt_backend: auto "
            "maps the checkpoint; its speed is not measured, the pace is our kernels'"
        )
    if setting.cuda and target.gpus > 1:
        each = (LIBRARIES + CUDA_HOST) / GB
        notes.append(
            f"there are {target.gpus} GPUs, and this is the plan of one process: with more, rank 0 needs "
            f"what is listed here, each other process {each:.1f} GB of memory and its GPU's parts "
            "(docs/several-gpus.md)"
        )
    if any(name.startswith("linear_attn.") for layer in shape.layers for name in layer.linears):
        notes.append(
            "linear attention is counted as transformers computes it without extra kernels"
        )
    if not shape.mappable:
        notes.append(
            "the experts can't be mapped as this checkpoint stores them; scripts/quantize_experts.py or "
            "scripts/dequantize_checkpoint.py writes one whose experts cost no memory of the process's own"
        )
    return notes
