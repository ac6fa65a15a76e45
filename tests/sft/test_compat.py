"""What ktbridge takes of other libraries that they don't promise: it is still there, and does the same."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from moefamilies import FAMILIES, made
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOTrainer, KTOTrainer, SFTTrainer
from trl.trainer import add_fused_lm_head, utils

from ktbridge.sft import compat
from ktbridge.sft.config import TrainConfig
from ktbridge.sft.stages import CHECKPOINTING, DpoTrainer, KtoTrainer, SftTrainer, trainer_arguments
from ktbridge.sft.trainer import RunTrainer

OVERRIDDEN = {
    name: value
    for name, value in vars(RunTrainer).items()
    if inspect.isfunction(value) and hasattr(Trainer, name) and not name.startswith("__")
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_trainer_calls_what_is_overridden_with_these_arguments(name):
    ours = inspect.signature(OVERRIDDEN[name]).parameters.values()
    theirs = inspect.signature(getattr(Trainer, name)).parameters
    if not any(each.kind is each.VAR_POSITIONAL for each in ours):
        assert [each.name for each in ours] == [*theirs]
    private = [each for each in OVERRIDDEN if each.startswith("_")]
    assert len(private) == 10
    if name.startswith("_"):  # else it could be gone, and ours never be called
        assert f"self.{name}(" in inspect.getsource(Trainer)


@pytest.mark.parametrize("stage", ["sft", "dpo", "kto"])
def test_trainers_get_their_arguments_by_names_that_stay(stage, tmp_path):
    """A deprecated one's FutureWarning is an error here."""
    config = TrainConfig(model_name_or_path="base", dataset=("rows.jsonl",), output_dir="out", stage=stage)
    made = trainer_arguments(config, torch.device("cpu"), str(tmp_path))
    assert getattr(made, CHECKPOINTING) is False


@pytest.mark.parametrize("theirs", [DPOTrainer, KTOTrainer])
def test_trl_prepares_all_rows_in_one_place(theirs):
    """Which ours leaves out: they come as tokens; and takes the reference from the batch where told."""
    source = inspect.getsource(theirs)
    for kind in ("train", "eval"):
        assert f"{kind}_dataset = self._prepare_dataset({kind}_dataset, " in source
    assert "self._tokenize(" not in source
    assert "if self.precompute_ref_logps:" in inspect.getsource(theirs._compute_loss)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SftTrainer, SFTTrainer), (DpoTrainer, DPOTrainer), (KtoTrainer, KTOTrainer)],
)
def test_no_method_is_overridden_twice(ours, theirs):
    order = ours.__mro__
    assert order[1] is RunTrainer
    own = order[2 : order.index(theirs)]
    assert not {name for cls in (ours, *own) for name in vars(cls)} & {*OVERRIDDEN}
    assert not [name for cls in own for name in vars(cls) if hasattr(theirs, name) and name[:2] != "__"]


def test_one_process_has_one_gpu(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    compat.on_one_gpu(arguments)
    assert arguments.n_gpu == 1


def test_a_scheduler_reports_the_rates_it_was_given():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    compat.set_logged_rates(scheduler, [0.25])
    assert scheduler.get_last_lr() == [0.25]


def test_ddp_takes_the_names_that_it_is_to_ignore():
    module = nn.Linear(2, 2)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["x"])
    (attribute,) = [name for name in vars(module) if "ignore" in name]
    other = nn.Linear(2, 2)
    compat.leave_out_of_ddp(other, ["x"])
    assert getattr(other, attribute) == ["x"]


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer, KTOTrainer])
def test_trl_keeps_its_metrics_where_passes_look_for_them(trainer):
    source = inspect.getsource(trainer)
    assert "self._metrics = {" in source
    assert '"train": defaultdict(list)' in source
    assert '"eval": defaultdict(list)' in source
    gathers = {"gather(", "gather_for_metrics("}  # and by nothing else, see without_gathering
    assert {*re.findall(r"self\.accelerator\.(gather\w*\()", source)} <= gathers


def test_a_model_is_made_with_the_attention_that_was_chosen():
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=16, num_hidden_layers=1, vocab_size=8, num_experts=2,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=8, moe_intermediate_size=8,
    )  # fmt: skip
    compat.set_attention(config, "eager")
    assert AutoModelForCausalLM.from_config(config).config._attn_implementation == "eager"


def test_trl_projects_only_labeled_positions(monkeypatch):
    """The same loss and gradients as of all positions."""
    if not hasattr(utils, "_use_triton"):
        pytest.skip("this trl has no choice")
    model = made("mixtral", FAMILIES["mixtral"])
    ids = torch.randint(3, 60, (2, 20))
    labels = ids.masked_fill(torch.rand(2, 20) < 0.7, -100)
    labels[:, 1] = ids[:, 1]
    add_fused_lm_head(model)
    seen: list[int] = []
    head = utils._ChunkedLogProbFunction

    class Watched:
        @staticmethod
        def apply(hidden: torch.Tensor, *rest: object) -> object:
            seen.append(len(hidden))
            return head.apply(hidden, *rest)

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Watched)

    def once() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=labels, fused_lm_head=True).loss
        loss.backward()
        return loss.detach(), model.get_input_embeddings().weight.grad.clone()

    compat.score_labels_only()
    ours = once()
    compat.score_labels_only(False)
    theirs = once()
    assert seen == [int((labels[:, 1:] != -100).sum()), 38]
    torch.testing.assert_close(ours, theirs)
