"""The installed SGLang-KT: its packages, the contract of its version, and its known vulnerabilities."""

from __future__ import annotations

import sys

from ktbridge.adapter.engines import REPLAY_HOLE, SERVER_HOLES
from ktbridge.errors import KtbridgeError
from ktbridge.machine import Machine
from ktbridge.serve.doctor_packages import ENGINE_STEP, Check, check_engine_packages

# Every sglang-kt has them. `ktbridge serve` warns of or refuses settings that expose them.
HOLES = (
    f"has {SERVER_HOLES} (its image generator and encoder servers unpickle "
    f"what reaches their sockets), {REPLAY_HOLE} (its replay script does so with dumps) and CVE-2026-7304 "
    "(custom logit processors run code that a request brings)"
)
STEP = "start none of those, as `ktbridge serve` does, and keep its ports off untrusted networks"


def check_engine(machine: Machine, python: str | None, imports: bool) -> list[Check]:
    """SGLang-KT's packages and the contract of its version."""
    from ktbridge.serve.sglang.facts import DISTRIBUTION, KERNEL, read_installed

    try:
        installed = read_installed(python)
    except KtbridgeError as error:
        return [Check(DISTRIBUTION, "problem", error.sentence, error.next_step)]
    versions = {DISTRIBUTION: installed.engine, KERNEL: installed.kernel}
    checks = check_engine_packages(python or sys.executable, versions, imports)
    if installed.engine is None and installed.upstream is not None:
        message = f"sglang {installed.upstream} is installed, which is SGLang without KTransformers"
        checks[0] = Check(DISTRIBUTION, "missing", message, ENGINE_STEP)
    if installed.engine is None:
        return checks
    return [
        *checks,
        *_contract(machine, installed.engine, installed.kernel),
        Check("engine security", "ok", f"{installed.engine} {HOLES}", STEP),
    ]


def _contract(machine: Machine, version: str, kernel: str | None) -> list[Check]:
    """What the installed engine accepts, and whether its kernels and this CPU are compatible."""
    from ktbridge.adapter.engines import ENGINE, contract_for, install_engine

    try:
        contract, known = contract_for(f"{ENGINE}=={version}")
    except KtbridgeError as error:
        return [Check("engine contract", "problem", error.sentence, error.next_step)]
    layouts = [
        name for name in ("split", "merged", "expert", "nonexpert") if getattr(contract, name)
    ]
    text = f"{contract.name}: adapters {', '.join(layouts)}; methods {', '.join(contract.methods)}"
    if not contract.expert:
        text = f"{contract.name}: no expert LoRA"
        return [Check("engine contract", "problem", text, install_engine())]
    if not known:
        step = "compare with `ktbridge verify` before relying on it"
        return [Check("engine contract", "ok", f"{text} (not looked at)", step)]
    if kernel is not None and kernel != version:
        text += f"; kt-kernel is {kernel}"
        return [Check("engine contract", "ok", text, f"pip install kt-kernel=={version}")]
    if "amx_bf16" not in machine.isa:
        step = "its expert LoRA needs AMX; use a machine that has it, or --engine local"
        return [Check("engine contract", "missing", f"{text}; no AMX here", step)]
    return [Check("engine contract", "ok", text)]
