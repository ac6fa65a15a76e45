"""Every finding about an adapter, as a table: code, severity, what it means, what to do.

Codes never change meaning. The hundreds tell the subject: 0 files, 1 configuration, 2 keys and
inventory, 3 shapes and dtypes, 4 values, 5 several directories together, 6 the base model,
7 conversion, 9 one engine version (8 is the evaluation's). A rule's severity is what it means for
serving; where the same finding is harmless (an rsLoRA adapter that has yet to be converted), the
check says so by passing its own. docs/rules.md is written from this table by scripts/make_rules.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ktbridge.errors import Problem, Severity

if TYPE_CHECKING:
    from ktbridge.adapter.adapter import Part


class Rule(NamedTuple):
    """One rule: ``meaning`` completes "It is reported when ..."; ``next_step`` is the remedy."""

    code: str
    severity: Severity
    meaning: str
    next_step: str


_CONVERT = "ktbridge convert DIR --merged-output-dir D, or the layout it has"
_RESAVE = "save the adapter again from training"
_RETRAIN = "train without it, or merge the adapter with PEFT"
_RECONVERT = "convert the adapter again from the raw directory"

RULES: tuple[Rule, ...] = (
    Rule("KTB001", "error", "the path is not an adapter directory", "check the path"),
    Rule("KTB002", "error", "adapter_config.json can't be read", _RESAVE),
    Rule("KTB003", "error", "the directory has no LoRA tensors", _RESAVE),
    Rule("KTB004", "error", "weights are pickled (adapter_model.bin), which loading would execute",
         "save with safe_serialization=True"),
    Rule("KTB005", "error", "a safetensors file is truncated or malformed", "copy or save it again"),
    Rule("KTB006", "error", "the directory holds fully trained experts, not LoRA",
         "serve it as a checkpoint; it can't be served as an adapter"),
    Rule("KTB007", "error", "a serving directory has safetensors that engines would load as well",
         "remove the file or move it elsewhere"),
    Rule("KTB008", "error", "a shard of the adapter is missing", "copy the missing file"),
    Rule("KTB009", "info", "a file can't be read by other users, who would see no adapter",
         "chmod a+r the file"),
    Rule("KTB010", "error", "the manifest is unreadable or doesn't say the adapter is ready",
         _RESAVE),
    Rule("KTB011", "error", "a file is missing or has another size than the manifest says", _RESAVE),
    Rule("KTB012", "error", "a file's content doesn't match the hash in the manifest",
         "copy the adapter again from where it is intact, or save it again from training"),
    Rule("KTB013", "error", "the fused file's tensors are not those in the manifest", _RESAVE),
    Rule("KTB014", "error", "one tensor is given twice, under two keys or in two files", _RESAVE),
    Rule("KTB015", "info", "the weights' time stamp says nothing (an archive's or an image's fixed one):"
         " an engine that keeps a split copy by path, time and size may serve the old one",
         "touch the file after replacing an adapter in place"),
    Rule("KTB016", "error", "the adapter is a GGUF file, which KT engines don't read",
         "ktbridge convert FILE --from gguf --to raw --output D"),
    Rule("KTB017", "error", "an expert or merged directory has weights in other files than"
         " adapter_model.safetensors, the only one that expert loaders read", _CONVERT),
    Rule("KTB101", "error", "peft_type is not LORA, or missing where engines read it", _RETRAIN),
    Rule("KTB102", "error", "r is missing or not a positive integer", "set r in adapter_config.json"),
    Rule("KTB103", "error", "lora_alpha is missing or not a positive number: engines assume scale 1",
         "set lora_alpha to the value used in training"),
    Rule("KTB104", "error", "lora_alpha in the configuration and in the manifest disagree",
         _RECONVERT),
    Rule("KTB105", "error", "the manifest's rank is not the tensors' rank", _RESAVE),
    Rule("KTB106", "error", "target_modules is not a list, which engines need", _CONVERT),
    Rule("KTB107", "error", "use_rslora is set: engines serve alpha/r all the same", _CONVERT),
    Rule("KTB108", "error", "rank_pattern gives a module of the adapter another rank", _RETRAIN),
    Rule("KTB109", "error", "alpha_pattern gives a module of the adapter another scale, which engines ignore",
         _RETRAIN),
    Rule("KTB110", "error", "the adapter uses DoRA, whose magnitudes engines ignore", _RETRAIN),
    Rule("KTB111", "error", "the adapter has bias terms, which engines ignore", _RETRAIN),
    Rule("KTB112", "error", "the adapter has whole modules beside LoRA, which engines ignore",
         _RETRAIN),
    Rule("KTB113", "error", "fan_in_fan_out is set, which engines ignore", _RETRAIN),
    Rule("KTB114", "error", "init_lora_weights changed the base weights, which engines don't have",
         "save with path_initial_model_for_weight_conversion, which turns it into plain LoRA"),
    Rule("KTB115", "error", "the configuration asks for something engines ignore", _RETRAIN),
    Rule("KTB116", "info", "the base model isn't named",
         "pass --base-model to ktbridge convert"),
    Rule("KTB117", "warning", "a targeted module has no tensors: it was not found in training",
         "check target_modules against the base model and train again"),
    Rule("KTB118", "error", "tensors belong to a module that target_modules doesn't list", _CONVERT),
    Rule("KTB119", "warning", "configuration and manifest name different base models",
         "check which of the two the adapter was trained upon"),
    Rule("KTB120", "warning", "the manifest's expert_weight_format is none that is known",
         "check it against the KTransformers version that trained the adapter"),
    Rule("KTB201", "error", "a tensor is not LoRA of a known kind: it would go nowhere",
         "remove it, or report the key as a bug"),
    Rule("KTB202", "error", "a LoRA A has no B or the reverse: engines skip the pair silently",
         _RESAVE),
    Rule("KTB203", "error", "an expert lacks tensors that other experts of the layer have", _RESAVE),
    Rule("KTB204", "error", "layers have different numbers of experts", _RESAVE),
    Rule("KTB205", "warning", "an expert key has a prefix that makes engines search every key",
         _CONVERT),
    Rule("KTB206", "error", "a tensor of a vision or audio tower would land in the text layer of its number",
         "train the text model only"),
    Rule("KTB207", "error", "a tensor belongs to a draft (MTP) layer, which engines don't adapt",
         "exclude the MTP layers in training"),
    Rule("KTB208", "error", "expert LoRA is in PEFT's fused layout, which KT engines don't read",
         "ktbridge convert DIR --from peft-fused --to raw --output D"),
    Rule("KTB209", "warning", "q_proj and v_proj are not both adapted: engines fail at start-up",
         "train both, or serve with the embedded engine"),
    Rule("KTB210", "warning", "up_proj is adapted without gate_proj: engines fail at start-up",
         "train both, or serve with the embedded engine"),
    Rule("KTB211", "error", "expert LoRA is of a kind that can't be served as LoRA",
         "train with routed-expert LoRA (gate, up and down)"),
    Rule("KTB212", "warning", "layers of one kind are not adapted alike: the rest stays at the base",
         "check that training saved every layer"),
    Rule("KTB213", "error", "an embedding or head is adapted, which engines ignore", _RETRAIN),
    Rule("KTB214", "error", "expert keys are as in training, one tensor for all experts included: KT"
         " engines don't find them", _CONVERT),
    Rule("KTB215", "info", "layers without LoRA lie irregularly between others: whether they are missing"
         " can't be told without the base model", "add --base-model (a config.json is enough)"),
    Rule("KTB216", "error", "expert LoRA of all experts is one tensor (upstream SGLang's layout), which KT"
         " engines don't read", "ktbridge convert DIR --from sglang-3d --to raw --output D"),
    Rule("KTB301", "error", "a tensor's rank is not the configuration's", _RESAVE),
    Rule("KTB302", "error", "a tensor's shape doesn't fit the others'", _RESAVE),
    Rule("KTB303", "error", "a tensor's dtype is not a float that engines load",
         "save the adapter in bfloat16"),
    Rule("KTB304", "info", "engines round a tensor to bfloat16", "train or save in bfloat16"),
    Rule("KTB401", "error", "a tensor has NaN or infinite values",
         "go back to the last good checkpoint; lower the learning rate"),
    Rule("KTB402", "error", "every pair is zero: this adapter changes nothing",
         "check that training updated it: after one step, B is no longer zero"),
    Rule("KTB403", "warning", "a whole projection or layer is zero: it was never trained",
         "check that training reached it"),
    Rule("KTB404", "info", "some experts are zero: no token was routed to them in training",
         "nothing to do if the data was small"),
    Rule("KTB501", "warning", "directories of a set have different rank or alpha", _RECONVERT),
    Rule("KTB502", "error", "directories of a set name different base models", _RECONVERT),
    Rule("KTB503", "warning", "a half of the raw adapter is in none of the serving directories",
         "add its directory to the command, or convert again"),
    Rule("KTB504", "error", "a directory's tensors are not those of the source it is compared with",
         _RECONVERT),
    Rule("KTB505", "error", "a serving directory scales its tensors otherwise than training did",
         _RECONVERT),
    Rule("KTB506", "error", "two directories have one layout, and none given covers all the others to"
         " compare them with", "validate them in separate commands"),
    Rule("KTB601", "warning", "the adapter names another base model", "check that it is the same"),
    Rule("KTB602", "info", "the base model's family is unknown: only its sizes are checked",
         "add a row to ktbridge/model/families.py"),
    Rule("KTB603", "error", "expert layers are not the base model's MoE layers",
         "check that adapter and base belong together"),
    Rule("KTB604", "error", "the number of experts is not the base model's",
         "check that adapter and base belong together"),
    Rule("KTB605", "error", "a tensor's shape doesn't fit the base model",
         "check that adapter and base belong together"),
    Rule("KTB606", "error", "a tensor is for a layer that the base model doesn't have",
         "check that adapter and base belong together"),
    Rule("KTB607", "error", "a module is adapted in some layers only, though all of them have it",
         "check that training saved every layer"),
    Rule("KTB608", "warning", "a module is adapted that SGLang-KT can't apply in this family",
         "serve with the embedded engine, or train without it"),
    Rule("KTB609", "error", "the base model has no routed experts", "pass the model trained upon"),
    Rule("KTB610", "error", "a module is adapted in a layer where the base model has no such module",
         "check that adapter and base belong together"),
    Rule("KTB611", "error", "the base model's config.json can't be read: nothing is checked against it",
         "point at a model directory as transformers saves it"),
    Rule("KTB612", "error", "the adapter was trained on another base model, by the fingerprint in its"
         " manifest", "use the model it was trained on; if this one is meant, merge and serve take"
         " --allow-other-base"),
    Rule("KTB613", "warning", "the base model's config.json is not the one that was trained with",
         "use the config.json of training, or check that the difference is meant"),
    Rule("KTB614", "warning", "the base model can't be read in all it has: it is not compared with the"
         " one that the adapter was trained on", "download or copy the base model again"),
    Rule("KTB701", "error", "the output directory can't be written", "choose another directory"),
    Rule("KTB702", "error", "one configuration can't hold two ranks",
         "write the split layout: --expert-output-dir and --nonexpert-output-dir"),
    Rule("KTB703", "error", "one configuration can't hold both scales without rounding",
         "write the split layout: --expert-output-dir and --nonexpert-output-dir"),
    Rule("KTB704", "error", "the adapter has nothing for a requested output", "leave that output out"),
    Rule("KTB705", "error", "nothing names the base model", "pass --base-model"),
    Rule("KTB706", "error", "output directories contain each other or the input",
         "give every output a directory of its own"),
    Rule("KTB707", "info", "--lora-alpha overrides what the adapter says", "check that it is meant"),
    Rule("KTB708", "info", "PEFT would take non-expert modules for routed experts and load them wrongly",
         "nothing for engines; for PEFT, write --to peft-fused"),
    Rule("KTB709", "error", "a file that is read was written to, replaced or removed meanwhile",
         "wait until nothing writes to it, then run the command again"),
    Rule("KTB720", "error", "the requested format can't hold the adapter exactly",
         "choose another format"),
    Rule("KTB721", "info", "a conversion did more than move bytes", "nothing to do if that is meant"),
    Rule("KTB731", "error", "an adapter tensor has no weight in the base model to be merged into",
         "merge into the model that the adapter was trained on"),
    Rule("KTB732", "error", "a weight to be merged into is quantised",
         "dequantise the checkpoint to bfloat16 first, or serve the adapter beside it"),
    Rule("KTB733", "error", "a weight to be merged into is tied to another",
         "train without it: merged, it would change the tied weight's other use as well"),
    Rule("KTB734", "error", "an adapter tensor's shape doesn't fit the weight it belongs to",
         "merge into the model that the adapter was trained on"),
    Rule("KTB735", "error", "two adapter tensors belong to one place in a weight",
         "remove one of the two"),
    Rule("KTB736", "error", "the merged model's directory can't be written",
         "choose another output directory"),
    Rule("KTB737", "error", "the disk has too little space for the merged model",
         "free space, or choose an output directory on another disk"),
    Rule("KTB738", "error", "a rank_pattern or alpha_pattern is more than module names",
         "merge it with PEFT, which has the model in memory"),
    Rule("KTB901", "error", "the engine version doesn't accept this layout", _CONVERT),
    Rule("KTB902", "info", "the engine version is none of those looked at: the next known contract holds",
         "nothing to do if the adapter serves; report where it doesn't"),
    Rule("KTB903", "error", "the engine version never applies a module's LoRA, or ends over it at start-up",
         "serve with sglang-kt 0.7.2, or with the embedded engine"),
    Rule("KTB904", "warning", "the engine version has no method for the weights experts were trained upon",
         "serve with a newer version, or from bf16 weights and compare with ktbridge verify"),
    Rule("KTB905", "error", "the engine's method for these expert weights has LoRA of one rank only",
         "train with that rank, or serve from another weight format"),
    Rule("KTB906", "warning", "a name has a colon: requests MODEL:ADAPTER are cut at the first one, and"
         " the base model answers", "serve it under another --served-model-name"),
    Rule("KTB907", "error", "the engine's expert LoRA has no kernel for this activation",
         "serve with the embedded engine"),
)  # fmt: skip

_BY_CODE = {rule.code: rule for rule in RULES}


def problem(
    code: str,
    where: str,
    found: str,
    expected: str = "",
    *,
    next_step: str | None = None,
    severity: Severity | None = None,
) -> Problem:
    """A finding of the rule ``code``; severity and next step are the rule's unless given."""
    rule = _BY_CODE[code]
    return Problem(
        code=code,
        severity=severity or rule.severity,
        where=where,
        found=found,
        expected=expected,
        next_step=rule.next_step if next_step is None else next_step,
    )


def many(
    code: str,
    parts: list[Part],
    found: str,
    expected: str = "",
    severity: Severity | None = None,
    next_step: str | None = None,
) -> Iterator[Problem]:
    """One problem for all of ``parts``, placed at the first; nothing when there are none."""
    if parts:
        if len(parts) > 1:
            found += f" ({len(parts)} tensors like it)"
        where = parts[0].where
        yield problem(code, where, found, expected, severity=severity, next_step=next_step)
