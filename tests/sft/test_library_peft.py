"""A wrapped model in other people's hands: PEFT, Trainer, trl, accelerate, in any order, and nothing is lost.

Most of what is tested here is done by PEFT, which takes the expert LoRA for one of its own layers
(``ktbridge.experts.layer``). A version of PEFT that does it otherwise fails here.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from findings import codes
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from tinymoe import add_adapter, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from ktbridge.adapter import read_adapter, validate_adapter
from ktbridge.errors import KtbridgeError, ProblemsError, UsageError
from ktbridge.sft import (
    RawAdapterCallback,
    expert_layers,
    freeze_expert_lora,
    load_for_kernels,
    load_raw_adapter,
    save_raw_adapter,
    set_expert_lora,
    trainable_parameters,
    wrap_experts,
)
from ktbridge.sft.output import IN_CHECKPOINT

IDS = torch.arange(80).reshape(4, 20) % 64
EXPERT, ATTENTION = 36_864, 3_584
"""LoRA parameters of rank 8 in the tiny model: of the experts, of q_proj and v_proj."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def lora(targets: Any = ("q_proj", "v_proj"), **options: Any) -> LoraConfig:
    targets = targets if isinstance(targets, str) else [*targets]
    options = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM", **options}
    return LoraConfig(target_modules=targets, **options)


def peft_last(model: Any = None, **options: Any) -> Any:
    return get_peft_model(wrap_experts(model or tiny_model()), lora(**options))


def added_last() -> Any:
    """transformers' own way to PEFT."""
    model = wrap_experts(tiny_model())
    add_adapter(model, lora())
    return model


def added_first() -> Any:
    model = tiny_model()
    add_adapter(model, lora())
    return wrap_experts(model)


def peft_first(model: Any = None, **options: Any) -> Any:
    return wrap_experts(get_peft_model(model or tiny_model(), lora(**options)))


def alone(model: Any = None) -> Any:
    return wrap_experts(model or tiny_model())


ORDERS = [peft_last, peft_first, added_last, added_first, alone]


def expert_b(model: Any) -> list[torch.Tensor]:
    layers = expert_layers(model).values()
    return [getattr(layer, name) for layer in layers for name in layer.lora_names if name[-1] == "b"]


def was_trained(model: Any) -> bool:
    return all(bool(b.any()) for b in expert_b(model))


def train(model: Any, steps: int = 2, optimizer: Any = None) -> Any:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(parameters, lr=1e-2)
    model.train()
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def fit(model: Any, path: Path, *callbacks: Any, resume: Any = None) -> Any:
    arguments = TrainingArguments(
        output_dir=str(path), max_steps=4, save_steps=2, learning_rate=1e-2, report_to=[],
        per_device_train_batch_size=2, use_cpu=True, disable_tqdm=True, logging_steps=100,
    )  # fmt: skip
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS.tolist()])
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[*callbacks])
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("peft") / "base"
    tiny_model().save_pretrained(path)
    return path


def loaded_from(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)


# --- training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_comes_first_the_expert_lora_is_trained_and_nothing_but_lora(order):
    model = order()
    found = trainable_parameters(model)
    attention = 0 if order is alone else ATTENTION
    assert (found.expert_lora, found.other_lora, found.others) == (EXPERT, attention, 0)
    assert found.total == sum(p.numel() for p in tiny_model().parameters()) + found.trained
    assert f"{found.trained:,} of {found.total:,}" in str(found)
    if isinstance(model, PeftModel):
        assert model.get_nb_trainable_parameters()[0] == found.trained
    assert was_trained(train(model))
    if order is alone:  # unless it is asked for
        assert trainable_parameters(wrap_experts(tiny_model(), freeze_rest=False)).others > 30_000


@pytest.mark.quick("all-linear")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:target_parameters=.* were set but no parameter:RuntimeWarning")
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "gate_proj", "up_proj", "down_proj")])
def test_any_targets_will_do_after_wrapping_and_leave_a_valid_adapter(targets, base, tmp_path):
    model = train(peft_last(loaded_from(base), targets=targets))
    assert was_trained(model)
    save_raw_adapter(model, tmp_path / "raw")
    assert validate_adapter([tmp_path / "raw"], base_model=base).ok
    loaded = loaded_from(base)
    effect = (logits(model) - logits(loaded)).norm()
    again = load_raw_adapter(loaded, tmp_path / "raw")
    assert (logits(again) - logits(model)).norm() < 0.05 * effect


def test_trl_trains_both_halves_in_both_ways(tmp_path):
    conversation = [
        {"role": "user", "content": "hello who are you"},
        {"role": "assistant", "content": "i am a cat model"},
    ]
    for number, (model, config) in enumerate([(alone(), lora()), (peft_first(), None)]):
        trainer = SFTTrainer(
            model=model,
            peft_config=config,
            processing_class=tiny_tokenizer(),
            train_dataset=Dataset.from_list([{"messages": conversation}] * 4),
            callbacks=[RawAdapterCallback("some/base", tmp_path / f"raw{number}")],
            args=SFTConfig(
                output_dir=str(tmp_path / f"{number}"), max_steps=2, learning_rate=1e-2, use_cpu=True,
                report_to=[], disable_tqdm=True, assistant_only_loss=True,
            ),
        )  # fmt: skip
        trainer.train()
        assert was_trained(trainer.model)
        assert validate_adapter([tmp_path / f"raw{number}"]).ok


@pytest.mark.slow
def test_trls_dpo_has_the_base_for_its_reference_and_resumes(tmp_path):
    """Its reference is a second PEFT adapter, with which the expert LoRA must be off, recomputed or not."""
    row = {
        "prompt": [{"role": "user", "content": "hello who are you"}],
        "chosen": [{"role": "assistant", "content": "i am a cat"}],
        "rejected": [{"role": "assistant", "content": "yes no sky"}],
    }

    def trained(directory: str, resume: Path | None) -> list[Any]:
        torch.manual_seed(0)
        trainer = DPOTrainer(
            model=peft_first(),
            processing_class=tiny_tokenizer(),
            train_dataset=Dataset.from_list([row] * 4),
            args=DPOConfig(
                output_dir=str(tmp_path / directory), max_steps=3, save_steps=2, logging_steps=1,
                learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True, bf16=False,
            ),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        assert was_trained(trainer.model)
        return [record for record in trainer.state.log_history if "rewards/margins" in record]

    first = trained("first", None)
    assert first[0]["rewards/chosen"] == 0  # policy and reference are the same model still
    assert first[2]["rewards/margins"] > 0
    if int(version("transformers").split(".")[1]) < 23:
        return  # docs/library.md: its Trainer doesn't resume a model with two adapters as it was
    again = trained("again", tmp_path / "first" / "checkpoint-2")
    assert again[-1]["loss"] == first[-1]["loss"]


def test_accelerate_trains_saves_and_restores(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = peft_last().train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(parameters, lr=1e-2))
    for _ in range(2):
        accelerator.backward(model(input_ids=IDS, labels=IDS).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "state"))
    before = [b.clone() for b in expert_b(model)]
    with torch.no_grad():
        for b in expert_b(model):
            b.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert all(map(torch.equal, before, expert_b(model)))
    assert was_trained(model)


# --- what would train nothing is refused -----------------------------------------------------------------


def froze_everything_but_pefts(model: Any) -> None:
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_A" in name or "lora_B" in name)


@pytest.mark.slow
def test_a_frozen_expert_lora_is_refused_unless_it_is_meant(tmp_path):
    made = get_peft_model(prepare_model_for_kbit_training(alone()), lora())
    by_hand = peft_first()
    froze_everything_but_pefts(by_hand)
    for model in (made, by_hand):
        with pytest.raises(KtbridgeError, match="frozen") as caught:
            train(model)
        assert "freeze_expert_lora(model, False)" in caught.value.next_step
        logits(model.eval())  # only training is refused
        freeze_expert_lora(model)
        assert not was_trained(train(model))
        freeze_expert_lora(model, False)
        assert was_trained(train(model))
    froze_everything_but_pefts(by_hand)
    freeze_expert_lora(by_hand, False)
    freeze_expert_lora(by_hand.get_base_model().model.layers[0])  # a part of it
    train(by_hand)
    model = peft_last()
    expert_layers(model)[1].requires_grad_(False)
    with pytest.raises(KtbridgeError, match="frozen"):
        fit(model, tmp_path)
    with pytest.raises(KtbridgeError, match="no wrapped experts"):
        freeze_expert_lora(tiny_model())


@pytest.mark.quick("True")
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_the_expert_lora_is_refused(fused):
    model = get_peft_model(tiny_model(), lora())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=fused)
    wrap_experts(model)
    with pytest.raises(KtbridgeError, match="made before wrap_experts"):
        train(model, 12, optimizer)
    # Two optimizers are fine, in whatever rhythm.
    model = peft_first().train()
    own = [p for layer in expert_layers(model).values() for p in layer.parameters()]
    rest = [p for n, p in model.named_parameters() if p.requires_grad and ".kt." not in n]
    first, second = (torch.optim.AdamW(each, lr=1e-2, fused=fused) for each in (rest, own))
    for step in range(12):
        model(input_ids=IDS, labels=IDS).loss.backward()
        first.step()
        first.zero_grad()
        if step % 4 == 3:
            second.step()
            second.zero_grad()
    assert was_trained(model)


# --- saving and resuming ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("order", [peft_last, peft_first])
def test_a_trainers_checkpoints_have_both_halves_and_resume_bit_by_bit(order, tmp_path):
    torch.manual_seed(0)
    whole = order()
    fit(whole, tmp_path / "run", RawAdapterCallback("some/base"))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    saved = load_file(checkpoint / "adapter_model.safetensors")
    assert sum(".experts.kt." in name for name in saved) == 12
    for place in (tmp_path / "run" / "raw_adapter", checkpoint / IN_CHECKPOINT):
        assert validate_adapter([place]).ok
        assert (place / "fused_expert_lora.safetensors").is_file()
    last = read_adapter(tmp_path / "run" / "raw_adapter")
    trained = expert_layers(whole)[1].up_lora_b.bfloat16()
    assert torch.equal(last.expert_tensor(1, "up_lora_b").torch(), trained)
    torch.manual_seed(1)
    resumed = order()
    fit(resumed, tmp_path / "again", RawAdapterCallback("some/base"), resume=checkpoint)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    if order is peft_first:  # a checkpoint from before wrapping has none of it
        fit(get_peft_model(tiny_model(), lora()), tmp_path / "plain")
        with pytest.raises(KtbridgeError, match="no expert LoRA"):
            fit(order(), tmp_path / "on", resume=tmp_path / "plain" / "checkpoint-2")


def test_what_peft_saves_peft_loads(tmp_path):
    model = train(peft_first())
    model.save_pretrained(tmp_path / "peft")
    loaded = PeftModel.from_pretrained(alone(), tmp_path / "peft")
    assert torch.equal(logits(loaded), logits(model))
    report = validate_adapter([tmp_path / "peft"])
    assert codes(report, "error") == {"KTB201"}
    assert "save_raw_adapter" in report.problems[0].next_step
    # One that has no expert LoRA would leave it as it is.
    get_peft_model(tiny_model(), lora()).save_pretrained(tmp_path / "attention")
    save_raw_adapter(model, tmp_path / "raw", "some/base")
    for place in ("attention", "raw"):
        with pytest.raises(KtbridgeError, match="no expert LoRA") as caught:
            PeftModel.from_pretrained(alone(), tmp_path / place)
        assert "load_raw_adapter" in caught.value.next_step
    PeftModel.from_pretrained(wrap_experts(tiny_model(), lora_rank=0), tmp_path / "attention")
    model.load_adapter(tmp_path / "peft", "same")  # the values that it has
    train(other := peft_first(tiny_model(seed=1)))
    with pytest.raises(KtbridgeError, match="overwrite"):
        other.load_adapter(tmp_path / "peft", "second")


def test_what_could_not_be_saved_is_said_and_by_the_callback_at_the_start(tmp_path):
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "notes.txt").write_text("mine")
    untied = peft_first(tiny_model(tie_word_embeddings=False), modules_to_save=["lm_head"])
    plain = get_peft_model(tiny_model(), lora())
    for model, callback, words in (
        (plain, RawAdapterCallback("base"), "no wrapped experts"),
        (peft_first(), RawAdapterCallback(), "name of the base model"),
        (peft_first(), RawAdapterCallback("base", occupied), "is not an adapter directory"),
        (untied, RawAdapterCallback("base"), r"lm_head\.modules_to_save"),
    ):
        with pytest.raises(KtbridgeError, match=words) as caught:
            fit(model, tmp_path / "run", callback)
        assert caught.value.next_step
    with pytest.warns(UserWarning, match="belong to neither half"):
        save_raw_adapter(train(untied), tmp_path / "raw", "base")
    with pytest.warns(UserWarning, match="every B in it is zero"):
        save_raw_adapter(peft_first(), tmp_path / "untrained", "some/base")
    for model, name, words in (
        (peft_first(), "", "name of the base"),
        (plain, "base", "no wrapped"),
    ):
        with pytest.raises(KtbridgeError, match=words):
            save_raw_adapter(model, tmp_path / "none", *filter(None, [name]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* has the expert LoRA alone")
def test_without_peft_a_raw_adapter_is_saved_and_it_is_said(base, tmp_path):
    model = alone(loaded_from(base))
    trainer = fit(model, tmp_path / "run")
    trainer.save_model()  # into a directory that holds the checkpoints
    with pytest.warns(UserWarning, match="load_raw_adapter"):
        model.save_pretrained(tmp_path / "saved")
    for place in ("run/checkpoint-2", "run", "saved"):
        assert validate_adapter([tmp_path / place], base_model=base).ok
        assert read_adapter(tmp_path / place).nonexpert_keys() == ()
    again = load_raw_adapter(loaded_from(base), tmp_path / "saved")
    assert (logits(again) - logits(model)).norm() < 0.02 * logits(model).norm()
    with pytest.raises(ValueError, match="checkpoint"):  # transformers' own refusal
        fit(alone(), tmp_path / "again", resume=tmp_path / "run" / "checkpoint-2")
    with pytest.raises(KtbridgeError, match="inside of a PeftModel"):
        peft_first().get_base_model().save_pretrained(tmp_path / "inner")
    assert not (tmp_path / "inner").exists()


# --- switching --------------------------------------------------------------------------------------------


@pytest.mark.quick("peft_first")
@pytest.mark.parametrize("order", [peft_last, peft_first])
def test_pefts_switch_turns_the_expert_lora_off_with_its_own(order):
    base = logits(wrap_experts(tiny_model(), lora_rank=0))
    model = train(order())
    tuned = logits(model)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), tuned)
    set_expert_lora(model, False)
    assert not torch.equal(logits(model), tuned)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    set_expert_lora(model, True)
    assert torch.equal(logits(model), tuned)
    assert model.get_model_status().enabled is True


@pytest.mark.quick("peft_last")
@pytest.mark.filterwarnings("ignore:Adapter second was active which is now deleted:UserWarning")
@pytest.mark.parametrize("order", [peft_last, peft_first])
def test_the_expert_lora_goes_with_the_adapter_that_came_first(order, tmp_path):
    model = train(order())
    base, tuned = logits(wrap_experts(tiny_model(), lora_rank=0)), logits(model)
    model.add_adapter("second", lora())
    assert torch.equal(logits(model), tuned)
    model.set_adapter("second")
    assert torch.equal(logits(model), base)
    with pytest.raises(KtbridgeError, match="belongs to 'default'"):
        train(model)
    freeze_expert_lora(model)
    before = [b.clone() for b in expert_b(model)]
    assert not torch.equal(logits(train(model)), base)
    assert all(map(torch.equal, before, expert_b(model)))
    model.delete_adapter("second")
    assert torch.equal(logits(model), tuned)
    save_raw_adapter(model, tmp_path / "raw", "some/base")
    assert len(read_adapter(tmp_path / "raw").nonexpert_keys()) == 8


def test_an_adapter_may_have_any_name(tmp_path):
    for number, wrapped in enumerate((True, False)):
        model = get_peft_model(alone() if wrapped else tiny_model(), lora(), adapter_name="neko")
        model = train(model if wrapped else wrap_experts(model))
        assert was_trained(model)
        save_raw_adapter(model, tmp_path / f"{number}", "some/base")
        assert len(read_adapter(tmp_path / f"{number}").nonexpert_keys()) == 8


@pytest.mark.filterwarnings("ignore:Already unmerged:UserWarning")
@pytest.mark.parametrize("order", [peft_last, peft_first])
def test_what_would_leave_the_expert_lora_behind_is_refused_before_anything_is_done(order):
    model = train(order())
    tuned = logits(model)
    for method in ("merge_and_unload", "unload"):
        with pytest.raises(KtbridgeError, match="expert LoRA") as caught:
            getattr(model, method)()
        assert caught.value.next_step
        assert torch.equal(logits(model), tuned)
    with pytest.raises(KtbridgeError, match="unmerge_adapter"):
        model.merge_adapter()
    model.unmerge_adapter()
    assert not any(module.merged for module in model.modules() if isinstance(module, LoraLayer))


# --- loading ----------------------------------------------------------------------------------------------


@pytest.mark.quick("True")
@pytest.mark.parametrize("mapped", [False, True])
def test_a_raw_adapter_is_put_on_a_model_to_run_and_to_train_on(mapped, base, tmp_path):
    def load() -> Any:
        return load_for_kernels(str(base)) if mapped else loaded_from(base)

    options = {"use_rslora": True, "lora_dropout": 0.1, "r": 4}
    model = train(get_peft_model(wrap_experts(load(), 3, 12), lora(**options)), 4)
    save_raw_adapter(model, tmp_path / "raw")
    loaded = load_raw_adapter(load(), tmp_path / "raw")
    assert trainable_parameters(loaded).trained == 0
    assert not loaded.training
    plain = wrap_experts(load(), 0)
    error, effect = logits(loaded) - logits(model), logits(model) - logits(plain)
    # Of most tokens: for a rounding one may go to another expert.
    assert error.norm(dim=-1).median() < 0.05 * effect.norm(dim=-1).median()
    further = load_raw_adapter(load(), tmp_path / "raw", trainable=True)
    assert trainable_parameters(further) == trainable_parameters(model)
    before = [b.clone() for b in expert_b(further)]
    train(further)
    assert not any(map(torch.equal, before, expert_b(further)))
    save_raw_adapter(further, tmp_path / "further")
    assert validate_adapter([tmp_path / "further"], base_model=base).ok


def test_half_an_adapter_is_loaded_as_it_is_and_what_does_not_fit_is_refused(tmp_path):
    attention = wrap_experts(get_peft_model(tiny_model(), lora()), lora_rank=0)
    save_raw_adapter(train(attention), tmp_path / "attention", "some/base")
    loaded = load_raw_adapter(tiny_model(), tmp_path / "attention")
    assert all(layer.lora_rank == 0 for layer in expert_layers(loaded).values())
    save_raw_adapter(train(alone()), tmp_path / "experts", "some/base")
    load_raw_adapter(tiny_model(), tmp_path / "experts")
    for model in (alone(), get_peft_model(tiny_model(), lora())):
        with pytest.raises(UsageError, match="takes the base model"):
            load_raw_adapter(model, tmp_path / "experts")
    for half, other in (("attention", {"num_key_value_heads": 4}), ("experts", {"num_experts": 4})):
        with pytest.raises(ProblemsError) as caught:
            load_raw_adapter(tiny_model(**other), tmp_path / half)
        assert codes(caught) == {"KTL002"}


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "^model.layers.1.self_attn.q_proj",
        "q_proj",
    ],
)
@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
def test_patterns_that_name_a_layer_are_saved_and_loaded(tmp_path: Path, pattern: str, field: str) -> None:
    """PEFT matches them with names in the base model, whatever LoRA is put into here."""
    value = 256 if field == "alpha_pattern" else 4
    model = train(peft_last(**{field: {pattern: value}}))
    save_raw_adapter(model, tmp_path / "raw", "base")
    again = load_raw_adapter(tiny_model(), tmp_path / "raw")

    def numbers(of: Any, name: str) -> Any:
        layer = of.get_submodule(f"base_model.model.model.layers.1.self_attn.{name}")
        return layer.r, layer.lora_alpha

    for name in ("q_proj", "v_proj"):
        assert numbers(again, name) == numbers(model, name)
    assert numbers(again, "q_proj") != numbers(again, "v_proj")
    # By rounding to bfloat16; with the scale of all others it is 0.4.
    assert float((logits(again) - logits(model)).abs().max()) < 0.12


def test_a_deleted_adapter_leaves_no_expert_lora_to_the_next() -> None:
    model = train(peft_last())
    model.add_adapter("b", lora())
    model.set_adapter("b")
    before = logits(model)
    model.delete_adapter("default")
    assert torch.equal(logits(model), before)


@pytest.mark.filterwarnings("ignore")
def test_a_dpo_reference_of_half_an_adapter_is_refused(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "hello", "chosen": " a cat", "rejected": " who"}] * 4)
    options = DPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = DPOTrainer(
        train(peft_last()), args=options, train_dataset=rows, processing_class=tiny_tokenizer()
    )
    with pytest.raises(KtbridgeError, match="a reference would be half an adapter"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:.*lora_bias=True.*")
def test_what_could_not_be_saved_or_loaded_at_the_end_is_refused_at_the_start(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS.tolist()])
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    for model, options, found in (
        (peft_last(lora_bias=True), {}, "parameters that no raw adapter holds: .*lora_B.default.bias"),
        (wrap_experts(tiny_model()), best, "load_best_model_at_end needs a PeftModel"),
    ):
        arguments = TrainingArguments(
            str(tmp_path / "out"), report_to=[], use_cpu=True, max_steps=1, **options
        )
        callback = RawAdapterCallback(base_model="base")
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
        with pytest.raises(KtbridgeError, match=found):
            trainer.train()
