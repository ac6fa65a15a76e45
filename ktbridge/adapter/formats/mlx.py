"""mlx-lm's adapters: adapters.safetensors, and an adapter_config.json of mlx-lm's own.

======================================  ==============================  ==============================
module                                  lora_a                          lora_b
======================================  ==============================  ==============================
a Linear, ``self_attn.q_proj``          [in, r]: A turned round         [r, out]: B turned round
experts, ``mlp.switch_mlp.gate_proj``   [E, r, in], or [E*r, in]        [E, out, r]
======================================  ==============================  ==============================

mlx-lm multiplies by ``scale`` of lora_parameters as it is, which is alpha/r of PEFT's. DoRA and full
fine-tuning have files of the same name and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ktbridge.adapter.adapter import CONFIG_FILE, MLX_FILE, Adapter, is_number
from ktbridge.adapter.blocks import Block, block_of
from ktbridge.adapter.checks.inventory import check_expert_modules, check_tensors
from ktbridge.adapter.formats.raw_form import ExpertPair, Pairs, Request, fail_if, raw_form, stack_experts
from ktbridge.adapter.keys import CANONICAL, HALVES, is_expert_like, parse_key, peft_key, plain_name
from ktbridge.adapter.numbers import Numbers, whole
from ktbridge.codes import problem
from ktbridge.errors import Problem
from ktbridge.files.digests import take_stamps
from ktbridge.model import TensorRef, open_tensor_file
from ktbridge.model.families import BLOCKS
from ktbridge.model.jsonfile import read_json_file

_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<half>[ab])")
_EXPERTS = re.compile(
    rf"(?P<prefix>(?:.*\.)?)layers\.(?P<layer>[0-9]{{1,4}})\.(?:{'|'.join(BLOCKS)})"
    r"\.(?:switch_mlp|switch_glu|experts)\.(?P<name>gate_proj|up_proj|down_proj|w[123])"
)


def read_mlx(request: Request) -> tuple[Adapter, list[Problem]]:
    """An adapter of mlx-lm; ProblemsError with everything in it that has no place elsewhere."""
    path = request.path
    config = read_json_file(path / CONFIG_FILE)
    file = open_tensor_file(path / MLX_FILE)
    lora = config.get("lora_parameters")
    rank, scale = (lora.get(name) if isinstance(lora, dict) else None for name in ("rank", "scale"))
    findings = [*_numbers(str(path / CONFIG_FILE), config.get("fine_tune_type"), rank, scale)]
    fail_if(path, findings)
    assert isinstance(rank, int)
    assert is_number(scale)
    numbers = Numbers(rank, whole(scale * rank))
    model = config.get("model")
    told = {"r": rank, "lora_alpha": numbers.alpha, "base_model_name_or_path": model}
    count = config.get("num_layers")
    end = 1 + max((parse_key(name).layer for name in file.entries), default=-1)
    if type(count) is int and count > 0:  # of all layers, the last ones are trained
        told["layers_to_transform"] = [*range(max(0, end - count), end)]
    made = raw_form(Adapter(path, told, None), "mlx")
    made.stamps = {**take_stamps((path / CONFIG_FILE,)), file.path: file.stamp}
    made.tensors_in = len(file.entries)
    nonexpert: dict[str, Block] = {}
    experts: dict[tuple[int, str], dict[str, Block]] = {}
    tensors: dict[str, str] = {}
    turned = 0
    for name, entry in file.entries.items():
        where = f"{file.path}: {name}"
        match = _KEY.fullmatch(plain_name(name).name)
        if match is None:
            findings.append(problem("KTB201", where, "has no place in an mlx adapter"))
            continue
        module, half = match["module"], match["half"].upper()
        block = block_of(TensorRef.of(file, entry))
        if found := _EXPERTS.fullmatch(module):
            made.prefix = found["prefix"]
            tensors.setdefault(module, where)
            slot = int(found["layer"]), CANONICAL[found["name"]]
            experts.setdefault(slot, {})[half] = block
        elif is_expert_like(module):
            found_text = "looks like a routed expert's, and has no place in an mlx adapter"
            findings.append(problem("KTB218", where, found_text))
        elif len(block.shape) == 2:
            turned += 1
            rows, columns = block.shape
            nonexpert[peft_key(module, half)] = block.then((columns, rows), lambda bits: bits.T)
        else:
            findings.append(problem("KTB302", where, f"has shape {list(block.shape)}", "a matrix"))
    findings += check_expert_modules(tensors)
    pairs = _pairs(str(path), experts, numbers, findings)
    fail_if(path, findings)
    made.hold(stack_experts(made, pairs, numbers), nonexpert)
    fail_if(path, [*check_tensors(made)])
    found_turned = f"{turned} matrices are turned round, as mlx-lm has them [in, r]"
    return made, [problem("KTB721", str(path), found_turned)]


def _numbers(where: str, kind: object, rank: object, scale: object) -> Iterator[Problem]:
    if kind not in (None, "lora"):
        yield problem("KTB101", where, f"fine_tune_type is {kind!r}"[:200], "lora")
    if type(rank) is not int or rank <= 0:
        yield problem("KTB102", where, f"rank is {rank!r}"[:200], "a positive integer")
    if not is_number(scale):
        step = "set scale in lora_parameters to the value used in training"
        yield problem("KTB103", where, f"scale is {scale!r}"[:200], "a positive number", next_step=step)


def _pairs(
    where: str, experts: dict[tuple[int, str], dict[str, Block]], numbers: Numbers, findings: list[Problem]
) -> Pairs:
    """A [E,r,in] and B [E,out,r] of each projection; mlx-lm once had A flat."""
    pairs: Pairs = {}
    for (layer, name), halves in sorted(experts.items()):
        place = f"{where}: layer {layer} {name}_proj"
        if {*halves} != {*HALVES}:
            findings.append(problem("KTB202", place, "has no counterpart", "lora_a and lora_b"))
            continue
        a, b = halves["A"], halves["B"]
        if len(a.shape) == 2 and len(b.shape) == 3 and a.shape[0] == b.shape[0] * numbers.rank:
            shape = (b.shape[0], numbers.rank, a.shape[1])
            a = a.then(shape, lambda bits, shape=shape: bits.reshape(shape))  # type: ignore[misc]
        if len(a.shape) != 3 or len(b.shape) != 3 or a.shape[0] != b.shape[0]:
            found = f"has lora_a {list(a.shape)} and lora_b {list(b.shape)}"
            findings.append(problem("KTB302", place, found, "[E, r, in] and [E, out, r]"))
            continue
        pairs[layer, name] = ExpertPair(a, b, (numbers,))
    return pairs
