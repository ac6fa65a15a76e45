"""`stage: dpo`: the reference is the base itself, the losses are the ones asked for."""

import math

import pytest
import torch
from torch.nn.functional import logsigmoid
from trainrun import losses, train, write_run

from ktbridge.experts.inject import set_expert_lora
from ktbridge.sft.config import load_config

# trl's and transformers' advice, which `ktbridge train` silences too
pytestmark = pytest.mark.filterwarnings("ignore")

ANSWERS = [("i am a cat meow", "no"), ("yes meow", "no no no"), ("the sky is blue", "hello you")]
BOTH_LORAS = {"q_proj", "v_proj", "gate"}  # "gate" is the router, whose LoRA PEFT keeps elsewhere


@pytest.fixture
def run_dir(tmp_path, base_dir):
    asked = [{"from": "human", "value": "who are you ?"}]
    pairs = [
        {
            "conversations": asked,
            **{key: {"from": "gpt", "value": said} for key, said in answers.items()},
        }
        for answers in ({"chosen": good, "rejected": bad} for good, bad in ANSWERS * 4)
    ]
    return write_run(
        tmp_path, base_dir, pairs=pairs, dataset="pairs.jsonl", stage="dpo",
        lora_target=",".join(sorted(BOTH_LORAS)), learning_rate=1e-2, per_device_train_batch_size=6,
        max_steps=4, save_steps=0, cutoff_len=2048, kt_config={"kt_num_threads": 2},
    )  # fmt: skip


def batch(trainer):
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


@torch.no_grad()
def policy_logps(trainer, inputs):
    """Log-probabilities of the chosen and rejected answers, by plain logits."""
    ids, mask = inputs["input_ids"], inputs["completion_mask"][:, 1:].bool()
    logits = trainer.model(input_ids=ids, attention_mask=inputs["attention_mask"]).logits
    each = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return (each * mask).sum(1).chunk(2)


def _notes(run_dir, *overrides):
    from ktbridge.sft.prepare import prepare

    found = prepare(load_config(run_dir / "run.yaml", overrides)).notes
    return {note.where: note.code for note in found}


def test_the_reference_is_the_base_before_and_after_training(make, run_dir):
    trainer = make(lora_dropout=0.1, kt_lora_dropout=0.2)
    notes = _notes(run_dir, "lora_dropout=0.1", "kt_lora_dropout=0.2")
    assert notes == {"lora_dropout": "KTC012", "kt_config.kt_lora_dropout": "KTC012"}
    dropouts = [m for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout)]
    assert dropouts
    assert not any(module.p for module in dropouts)
    names = {name for name, value in trainer.model.named_parameters() if value.requires_grad}
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names if ".kt." not in name} == (
        BOTH_LORAS
    )
    assert not any(".ref." in name for name, _ in trainer.model.named_parameters())
    inputs = batch(trainer)
    with torch.no_grad():
        assert trainer.compute_loss(trainer.model, inputs).item() == pytest.approx(math.log(2))
    base = torch.stack(trainer.reference_logps(trainer.model, inputs))
    torch.testing.assert_close(base, torch.stack(policy_logps(trainer, inputs)))

    trainer.train()
    log = [record for record in trainer.state.log_history if "loss" in record]
    assert log[0]["loss"] == pytest.approx(math.log(2))
    assert (log[0]["rewards/chosen"], log[0]["rewards/rejected"]) == (0, 0)
    assert log[-1]["loss"] < log[0]["loss"]
    assert log[-1]["rewards/margins"] > 0

    policy = torch.stack(policy_logps(trainer, inputs))
    assert torch.equal(torch.stack(trainer.reference_logps(trainer.model, inputs)), base)
    assert torch.equal(torch.stack(policy_logps(trainer, inputs)), policy)  # switched on again
    assert trainer.model.training
    # Each half of the LoRA has learned, so that the reference would be wrong with either.
    set_expert_lora(trainer.model, False)
    without_experts = torch.stack(policy_logps(trainer, inputs))
    with trainer.model.disable_adapter():
        torch.testing.assert_close(torch.stack(policy_logps(trainer, inputs)), base)
    assert (without_experts - policy).abs().max() > 1e-3
    assert (without_experts - base).abs().max() > 1e-3


def test_the_losses_are_the_ones_asked_for(make, run_dir):
    from ktbridge.sft.stages import trainer_arguments

    asked = {
        "sigmoid": "pref_loss=sigmoid",
        "smoothed": "dpo_label_smoothing=0.2",
        "hinge": "pref_loss=hinge",
        "ipo": "pref_loss=ipo",
        "ftx": "pref_ftx=0.5",
    }
    arguments = {
        name: trainer_arguments(
            load_config(run_dir / "run.yaml", ["pref_beta=0.3", override]),
            torch.device("cpu"),
            str(run_dir / "scratch"),
        )
        for name, override in asked.items()
    }
    trainer = make()
    trainer.train()
    inputs = batch(trainer)
    loss_of = {}
    for name, args in arguments.items():
        trainer.beta, trainer.label_smoothing = args.beta, args.label_smoothing
        trainer.loss_types, trainer.loss_weights = args.loss_type, args.loss_weights
        with torch.no_grad():
            loss_of[name] = trainer.compute_loss(trainer.model, inputs).item()

    policy = policy_logps(trainer, inputs)
    reference = trainer.reference_logps(trainer.model, inputs)
    ratios = [mine - base for mine, base in zip(policy, reference, strict=True)]
    margin = 0.3 * (ratios[0] - ratios[1])
    counts = inputs["completion_mask"].sum(1).chunk(2)
    each = ratios[0] / counts[0] - ratios[1] / counts[1]
    clean, flipped = -logsigmoid(margin), -logsigmoid(-margin)
    expected = {
        "sigmoid": clean.mean(),
        "smoothed": (0.8 * clean + 0.2 * flipped).mean(),
        "hinge": (1 - margin).relu().mean(),
        "ipo": ((each - 1 / (2 * 0.3)) ** 2).mean(),
        "ftx": clean.mean() - 0.5 * policy[0].sum() / counts[0].sum(),
    }
    for name, value in expected.items():
        assert loss_of[name] == pytest.approx(value.item(), rel=2e-3), name
    assert len({round(value, 3) for value in loss_of.values()}) == 5


def test_pairs_of_an_epochs_last_batch_weigh_as_all_others(run_dir):
    """In batches of eight and four, as in micro-batches of any size."""
    same = (
        "per_device_train_batch_size=8",
        "gradient_accumulation_steps=2",
        "max_grad_norm=0",
        "max_steps=3",
    )
    found = []
    for tokens in ("auto", "1000"):
        train(run_dir, *same, f"tokens_per_pass={tokens}", f"output_dir={run_dir}/of-{tokens}")
        found.append([loss for _, loss in losses(run_dir / f"of-{tokens}")])
    assert found[0][-1] < 0.95 * found[0][0]
    assert found[0] == pytest.approx(found[1], rel=2e-3)
