"""Plan a local launch and check it before any weight is read; and a fingerprint of what it serves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from ktbridge.adapter import Adapter, validate_adapter
from ktbridge.errors import KtbridgeError, Problem, ProblemsError, UsageError, has_errors
from ktbridge.files import digests
from ktbridge.install import install_hint, without_kernels
from ktbridge.kernel_choice import has_bf16_instructions, has_kernels
from ktbridge.model import ModelConfig, open_checkpoint, read_model_config, resolve_model
from ktbridge.model.hub import short_name
from ktbridge.serve.doctor import PACKAGES
from ktbridge.serve.request import Limits, ServeRequest
from ktbridge.server_api.hosts import is_loopback
from ktbridge.server_api.served_names import ServedArm, check_adapter_name, check_served_name, list_arms


@dataclass(frozen=True)
class ServePlan:
    """A launch of the embedded engine. ``nonexpert`` holds (adapter name, directory).

    ``expert`` is the directory of the only expert LoRA; where several adapters have one, ``experts`` holds
    (adapter name, directory) of each. ``readings`` say which adapters were read from other tools' formats.
    """

    model: Path
    served_name: str
    host: str
    port: int
    threads: int | None
    expert: Path | None
    nonexpert: tuple[tuple[str, Path], ...]
    arms: tuple[ServedArm, ...]
    experts: tuple[tuple[str, Path], ...] = ()
    api_key: str | None = field(default=None, repr=False)
    bf16: bool = True
    """Whether all but the experts is computed in bfloat16; float32 on CPUs without BF16 instructions."""
    limits: Limits = field(default_factory=Limits)
    problems: tuple[Problem, ...] = ()
    readings: tuple[str, ...] = ()

    @property
    def models(self) -> dict[str, str]:
        """The names that requests may use, with what answers."""
        return {arm.name: arm.description for arm in self.arms}

    def as_dict(self) -> dict[str, object]:
        several = {"expert_adapters": {name: str(path) for name, path in self.experts}}
        return (several if self.experts else {}) | {
            "engine": "local",
            "model": str(self.model),
            "served_name": self.served_name,
            "host": self.host,
            "port": self.port,
            "api_key": self.api_key is not None,
            "threads": self.threads,
            "bf16": self.bf16,
            "limits": asdict(self.limits),
            "expert_adapter": None if self.expert is None else str(self.expert),
            "nonexpert_adapters": {name: str(path) for name, path in self.nonexpert},
            "models": self.models,
            "problems": [problem.as_dict() for problem in self.problems],
        }


def plan_local(request: ServeRequest, limits: Limits | None = None) -> ServePlan:
    """Check and plan a launch; reads configs and headers only.

    Raises UsageError for a request that makes no sense, ProblemsError for adapters that do not fit,
    and KtbridgeError for what cannot be read. ``problems`` of the plan are warnings.
    """
    base = Path(resolve_model(request.model))
    open_checkpoint(base)  # headers only: a truncated file is reported now, not after loading
    served = request.served_name if request.served_name is not None else short_name(base)
    check_served_name(served)
    _check_access(request.api_key, request.host)
    opened = _open_all(request)
    expert, nonexpert, whole = _halves(opened)
    several = len(expert) > 1
    if several and any(name is None for name, adapter in opened if adapter.expert_layers()):
        who = " and ".join(source for source, _ in expert)
        raise UsageError(
            f"{who} both bring an expert LoRA, and that of --expert-adapter is for every name.",
            "give each adapter whole as --adapter NAME=DIR: then every name has its own experts",
        )
    return ServePlan(
        model=base,
        served_name=served,
        host=request.host,
        port=request.port,
        threads=request.threads,
        expert=expert[0][1] if len(expert) == 1 else None,
        experts=tuple(expert) if several else (),
        nonexpert=tuple(nonexpert),
        arms=list_arms(
            served,
            expert=len(expert) == 1,
            whole=whole,
            nonexpert=[name for name, _ in nonexpert],
            experts=[name for name, _ in expert] if several else (),
        ),
        api_key=request.api_key or None,
        bf16=has_bf16_instructions(),
        limits=_within(limits or Limits(), read_model_config(base)),
        problems=_check_adapters(base, request),
        readings=tuple(adapter.reading for _, adapter in opened if adapter.reading),
    )


def _check_access(api_key: str | None, host: str) -> None:
    """Refuse a key that no client could send, and a public address without one (UsageError)."""
    if api_key and (api_key != api_key.strip() or not api_key.isprintable()):
        raise UsageError(
            "the API key has spaces around it or a control character in it; no client could send it.",
            "set KTBRIDGE_API_KEY (or --api-key) to the key alone",
        )
    if not api_key and not is_loopback(host):
        raise UsageError(
            f"{host} can be reached from other machines and no API key is set.",
            "set KTBRIDGE_API_KEY (or --api-key), or bind to 127.0.0.1",
        )


Named = list[tuple[str, Path]]


def _open_all(request: ServeRequest) -> list[tuple[str | None, Adapter]]:
    """Every adapter of the request by name; None for a bare expert one."""
    opened: list[tuple[str | None, Adapter]] = []
    for name, directory, layout in request.directories():
        if name is not None:
            check_adapter_name(name)
            if name in dict(opened):
                raise UsageError(f"two adapters are named {name!r}.", "give each its own NAME")
        opened.append((name, request.open_adapter(directory, layout)))
    return opened


def _halves(opened: Sequence[tuple[str | None, Adapter]]) -> tuple[Named, Named, list[str]]:
    """Directories with expert LoRA (by name or option), with non-expert LoRA, names without the latter."""
    expert: Named = []
    nonexpert: Named = []
    whole: list[str] = []
    for name, adapter in opened:
        if name is None:
            expert.append(("--expert-adapter", adapter.path))
            continue
        if adapter.expert_layers():
            expert.append((name, adapter.path))
        if adapter.nonexpert_keys():
            nonexpert.append((name, adapter.path))
        else:
            whole.append(name)
    return expert, nonexpert, whole


def check_installed() -> None:
    """Raises KtbridgeError where our kernels or a package that the engine needs aren't here; imports none."""
    missing = [name for name, (_, extra) in PACKAGES.items() if extra == "serve" and find_spec(name) is None]
    if missing:
        raise KtbridgeError(
            f"the embedded engine needs {', '.join(missing)}, not installed here.", install_hint("serve")
        )
    if not has_kernels():
        raise without_kernels()


def _within(limits: Limits, config: ModelConfig) -> Limits:
    """``limits`` with no more context than the model has."""
    own = config.text.get("max_position_embeddings")
    if type(own) is not int or own < 1 or own >= limits.context:
        return limits
    return replace(limits, context=own)


def _check_adapters(base: Path, request: ServeRequest) -> tuple[Problem, ...]:
    """Return whether headers and configurations fit the base; values are checked by `ktbridge validate`.

    Returns warnings; raises ProblemsError if something else than what was trained would be
    served.
    """
    problems: dict[Problem, None] = {}
    for directory in dict.fromkeys(directory for _, directory, _ in request.directories()):
        report = validate_adapter(
            [directory],
            base_model=base,
            from_format=request.format_of(directory),
            structure_only=True,
            allow_other_base=request.allow_other_base,
            read_here=True,
        )
        problems.update(dict.fromkeys(report.problems))
    if has_errors(problems):
        raise ProblemsError(
            f"the adapter cannot be served with {base}.",
            problems,
            "serve it with the base it was trained on, or look closer with `ktbridge validate`",
        )
    return tuple(problems)


_CHUNK = 1 << 20
_SMALL = 64 << 20


def fingerprints(plan: ServePlan) -> dict[str, str]:
    """Hex SHA-256 by served name, over the base and the halves of the adapter that take part.

    Adapters are hashed byte by byte. A base may be hundreds of gigabytes: there every small file
    (configurations, the tokenizer in any format) is hashed, and of each weight file its size, its
    header and the first and last MiB of its data.
    """
    base = digests.of_parts(_base_parts(plan.model))
    files: dict[Path, str] = {}

    def adapter(directory: Path | None) -> str:
        if directory is None:
            return ""
        if directory not in files:
            files[directory] = digests.of_parts(
                part
                for path in sorted(directory.iterdir())
                if path.suffix == ".safetensors" or path.name == "adapter_config.json"
                for part in (path.name.encode(), *_chunks(path))
            )
        return files[directory]

    nonexpert, experts = dict(plan.nonexpert), dict(plan.experts)

    def one(arm: ServedArm) -> str:
        parts = {
            "base": base,
            "expert": adapter(experts.get(arm.expert_of or "", plan.expert)) if arm.expert else "",
            "nonexpert": adapter(nonexpert[arm.nonexpert]) if arm.nonexpert else "",
        }
        if not plan.bf16:  # beside it as before, so that runs kept then are still found
            parts["outside experts"] = "float32"
        return digests.of_parts([json.dumps(parts, sort_keys=True).encode()])

    return {arm.name: one(arm) for arm in plan.arms}


def _base_parts(model: Path) -> Iterable[bytes]:
    for path in sorted(model.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix != ".safetensors":
            if path.stat().st_size <= _SMALL:
                yield path.name.encode()
                yield from _chunks(path)
        else:
            with open(path, "rb") as file:
                header = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                yield f"{path.name} {size}".encode()
                yield file.read(header + _CHUNK)
                file.seek(max(0, size - _CHUNK))
                yield file.read(_CHUNK)


def _chunks(path: Path) -> Iterable[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk
