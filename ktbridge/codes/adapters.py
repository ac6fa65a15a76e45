"""Findings about adapters. ``validate``, ``convert`` and ``merge`` share them; the severity is
the one for serving; where a finding is harmless (an rsLoRA adapter not yet converted) the check passes its
own.
"""

from __future__ import annotations

from ktbridge.codes.table import Code, Subject

_CONVERT = "ktbridge convert DIR --merged-output-dir D, or the layout it has"
_RESAVE = "save the adapter again from training"
_RETRAIN = "train without it, or merge the adapter with PEFT"
_RECONVERT = "convert the adapter again from the raw directory"
_GATHER = "save the adapter again from training, gathered from all processes (FSDP: FULL_STATE_DICT)"
_BELONG = "check that adapter and base belong together"

FILES = Subject("Files and manifest", "adapter", (
    Code("KTB001", "error", "the path is not an adapter directory", "check the path"),
    Code("KTB002", "error", "adapter_config.json can't be read", _RESAVE),
    Code("KTB003", "error", "the directory has no LoRA tensors", _RESAVE),
    Code("KTB004", "error", "weights are pickled (adapter_model.bin), which loading would execute",
         "save with safe_serialization=True"),
    Code("KTB005", "error", "a safetensors file is truncated or malformed", "copy or save it again"),
    Code("KTB006", "error", "the directory holds fully trained experts, not LoRA",
         "serve it as a checkpoint; it can't be served as an adapter"),
    Code("KTB007", "error", "a serving directory has safetensors that engines would load as well",
         "remove the file or move it elsewhere"),
    Code("KTB008", "error", "a shard of the adapter is missing", "copy the missing file"),
    Code("KTB009", "info", "a file can't be read by other users, who would see no adapter",
         "chmod a+r the file"),
    Code("KTB010", "error", "the manifest is unreadable or doesn't mark the adapter as ready",
         _RESAVE),
    Code("KTB011", "error", "a file is missing or has another size than the manifest has", _RESAVE),
    Code("KTB012", "error", "a file's content doesn't match the hash in the manifest",
         "copy the adapter again from where it is intact, or save it again from training"),
    Code("KTB013", "error", "the fused file's tensors are not those in the manifest", _RESAVE),
    Code("KTB014", "error", "one tensor is given twice, under two keys or in two files", _RESAVE),
    Code("KTB015", "info", "the weights' time stamp means nothing (an archive's or an image's fixed one):"
         " an engine that keeps a split copy by path, time and size may serve the old one",
         "touch the file after replacing an adapter in place"),
    Code("KTB016", "error", "the adapter is a GGUF file, which KT engines don't read",
         "ktbridge convert FILE --from gguf --to raw --output D"),
    Code("KTB017", "error", "an expert or merged directory has weights in other files than"
         " adapter_model.safetensors, the only one that expert loaders read", _CONVERT),
    Code("KTB018", "info", "the adapter is in another format than training writes, and is read as that; as an"
         " error: the format is ambiguous", "nothing, or name the format with --from"),
    Code("KTB019", "error", "the adapter is one of MLX's, which engines and PEFT don't read",
         "ktbridge convert DIR --from mlx --to raw --output D"),
    Code("KTB930", "error", "a file to be read, copied or uploaded is a link out of its directory, and none"
         " of the Hub's cache", "put the file itself there, if that one is meant"),
))  # fmt: skip

CONFIGURATION = Subject("Configuration", "adapter", (
    Code("KTB101", "error", "peft_type is not LORA, or missing where engines read it", _RETRAIN),
    Code("KTB102", "error", "r is missing or not a positive integer", "set r in adapter_config.json"),
    Code("KTB103", "error", "lora_alpha is missing or not a positive number: engines assume scale 1",
         "set lora_alpha to the value used in training, or convert with --lora-alpha ALPHA"),
    Code("KTB104", "error", "lora_alpha in the configuration and in the manifest disagree",
         _RECONVERT),
    Code("KTB105", "error", "the manifest's rank is not the tensors' rank", _RESAVE),
    Code("KTB106", "error", "target_modules is not a list, which engines need", _CONVERT),
    Code("KTB107", "error", "use_rslora is set: engines serve alpha/r all the same; or nothing shows"
         " whether PEFT or KTransformers trained its experts", _CONVERT),
    Code("KTB108", "error", "rank_pattern gives a module of the adapter another rank, which engines ignore",
         _CONVERT),
    Code("KTB109", "error", "a module of the adapter has another scale than others, which engines ignore",
         "ktbridge merge, or ktbridge convert with --dtype f32"),
    Code("KTB110", "error", "the adapter uses DoRA, whose magnitudes engines ignore", _RETRAIN),
    Code("KTB111", "error", "the adapter has bias terms, which engines ignore", _RETRAIN),
    Code("KTB112", "error", "the adapter has whole modules beside LoRA, which engines ignore",
         _RETRAIN),
    Code("KTB113", "error", "fan_in_fan_out is set, which engines ignore", _RETRAIN),
    Code("KTB114", "error", "init_lora_weights changed the base weights, which engines don't have",
         "save with path_initial_model_for_weight_conversion, which turns it into plain LoRA"),
    Code("KTB115", "error", "the configuration asks for something engines ignore", _RETRAIN),
    Code("KTB116", "info", "the base model isn't named",
         "pass --base-model to ktbridge convert"),
    Code("KTB117", "warning", "a targeted module has no tensors: it was not found in training",
         "check target_modules against the base model and train again"),
    Code("KTB118", "error", "tensors belong to a module that target_modules doesn't list", _CONVERT),
    Code("KTB119", "warning", "configuration and manifest name different base models",
         "check which of the two the adapter was trained upon"),
    Code("KTB120", "warning", "the manifest's expert_weight_format is none that is known",
         "check it against the KTransformers version that trained the adapter"),
    Code("KTB121", "warning", "tensors belong to a module that target_modules doesn't list: PEFT and vLLM"
         " would leave them out", "add it to target_modules in adapter_config.json, or train again"),
    Code("KTB122", "warning", "the last layers have no expert LoRA and other LoRA goes on: the experts there"
         " stay at the base",
         "check that training and conversion saved every layer; --base-model tells for certain"),
))  # fmt: skip

KEYS = Subject("Keys and inventory", "adapter", (
    Code("KTB201", "error", "a tensor is not LoRA of a known kind: it would go nowhere",
         "remove it, or report the key as a bug"),
    Code("KTB202", "error", "a LoRA A has no B or the reverse: engines skip the pair silently",
         _RESAVE),
    Code("KTB203", "error", "an expert lacks tensors that other experts of the layer have", _RESAVE),
    Code("KTB204", "error", "layers have different numbers of experts", _RESAVE),
    Code("KTB205", "warning", "an expert key has a prefix that makes engines search every key",
         _CONVERT),
    Code("KTB206", "error", "a tensor of a vision or audio tower would land in the text layer of its number",
         "train the text model only"),
    Code("KTB207", "error", "a tensor belongs to a draft (MTP) layer, which engines don't adapt",
         "exclude the MTP layers in training"),
    Code("KTB208", "error", "expert LoRA is in PEFT's fused layout, which KT engines don't read",
         "ktbridge convert DIR --to raw --output D"),
    Code("KTB209", "warning", "q_proj and v_proj are not both adapted: engines fail at start-up",
         "train both, or serve with the embedded engine"),
    Code("KTB210", "warning", "up_proj is adapted without gate_proj: engines fail at start-up",
         "train both, or serve with the embedded engine"),
    Code("KTB211", "error", "expert LoRA is of a kind that can't be served as LoRA",
         "train with routed-expert LoRA (gate, up and down)"),
    Code("KTB212", "warning", "layers of one kind are not adapted alike: the rest stays at the base",
         "check that training saved every layer"),
    Code("KTB213", "error", "an embedding or head is adapted, which engines ignore", _RETRAIN),
    Code("KTB214", "error", "expert keys are as in training, one tensor for all experts included: KT"
         " engines don't find them", _CONVERT),
    Code("KTB215", "info", "layers without LoRA lie irregularly between others: whether they are missing"
         " can't be known without the base model", "add --base-model (a config.json is enough)"),
    Code("KTB216", "error", "expert LoRA of all experts is one tensor (upstream SGLang's layout), which KT"
         " engines and vLLM don't read", "ktbridge convert DIR --from sglang-3d --to raw --output D"),
    Code("KTB217", "error", "keys have a wrapper's name (torch.compile, FSDP, DDP, checkpointing) in them,"
         " or an adapter's: PEFT and engines find no such module",
         "ktbridge convert DIR --unwrap --to raw --output D"),
    Code("KTB218", "error", "a tensor looks like routed experts' LoRA, and is in no form that is read: it"
         " would go nowhere",
         "merge the adapter where it was trained, or train in a form of docs/adapters.md"),
    Code("KTB219", "info", "a module has a name that isn't known, and without the base model nothing tells"
         " whether it has such a module", "add --base-model (a config.json is enough for a known family)"),
    Code("KTB675", "error", "a key has a layer number that no model has",
         "save the adapter again; a key of it is damaged"),
))  # fmt: skip

SHAPES = Subject("Shapes and dtypes", "adapter", (
    Code("KTB301", "error", "a tensor's rank is not the configuration's", _RESAVE),
    Code("KTB302", "error", "a tensor's shape doesn't fit the others'", _RESAVE),
    Code("KTB303", "error", "a tensor's dtype is not a float that engines load",
         "save the adapter in bfloat16"),
    Code("KTB304", "info", "engines round a tensor to bfloat16", "train or save in bfloat16"),
))  # fmt: skip

VALUES = Subject("Values", "adapter", (
    Code("KTB401", "error", "a tensor has NaN or infinite values",
         "go back to the last good checkpoint; lower the learning rate"),
    Code("KTB402", "error", "every pair is zero: this adapter changes nothing",
         "check that training updated it: after one step, B is no longer zero"),
    Code("KTB403", "warning", "a whole projection or layer is zero: it was never trained",
         "check that training reached it"),
    Code("KTB404", "info", "some experts are zero: no token was routed to them in training",
         "nothing to do if the data was small"),
    Code("KTB405", "error", "a tensor has values in one block of 1/n of its rows or columns and zeros in all"
         " others: one process saved its share of a sharded tensor", _GATHER),
    Code("KTB406", "error", "half or more of the ranks are in only one of A and B; or, a warning, ranks are"
         " so alike that a quarter of them would do", _GATHER),
    Code("KTB407", "warning", "experts of a layer have equal LoRA; an info where neighbors share it in all"
         " layers, as some trainers do",
         "compare with the trainer's own weights: one process's experts may have been saved for all"),
    Code("KTB408", "warning", "in every layer the same 1/n of the experts has LoRA and all others none: one"
         " expert-parallel process may have saved its own", _GATHER),
    Code("KTB409", "warning", "values of a layer are a thousand times larger or smaller than most layers'",
         "compare with an earlier checkpoint; save the adapter again from training"),
))  # fmt: skip

SETS = Subject("Several directories together", "adapter", (
    Code("KTB501", "warning", "directories of a set have different rank or alpha", _RECONVERT),
    Code("KTB502", "error", "directories of a set name different base models", _RECONVERT),
    Code("KTB503", "warning", "a half of the raw adapter is in none of the serving directories",
         "add its directory to the command, or convert again"),
    Code("KTB504", "error", "a directory's tensors are not those of the source it is compared with",
         _RECONVERT),
    Code("KTB505", "error", "a serving directory scales its tensors otherwise than training did",
         _RECONVERT),
    Code("KTB506", "error", "two directories have one layout, and none given covers all the others to"
         " compare them with", "validate them in separate commands"),
))  # fmt: skip

BASE_MODEL = Subject("Against the base model", "adapter", (
    Code("KTB601", "warning", "the adapter names another base model", "check that it is the same"),
    Code("KTB602", "info", "the base model's family is unknown: only its sizes are checked",
         "add a row to ktbridge/model/families.py"),
    Code("KTB603", "error", "expert layers are not the base model's MoE layers",
         _BELONG),
    Code("KTB604", "error", "the number of experts is not the base model's",
         _BELONG),
    Code("KTB605", "error", "a tensor's shape doesn't fit the base model",
         _BELONG),
    Code("KTB606", "error", "a tensor is for a layer that the base model doesn't have",
         _BELONG),
    Code("KTB607", "error", "a module is adapted in some layers only, though all of them have it",
         "check that training saved every layer"),
    Code("KTB608", "warning", "a module is adapted that SGLang-KT can't apply in this family",
         "serve with the embedded engine, or train without it"),
    Code("KTB609", "error", "the base model has no routed experts", "pass the model trained upon"),
    Code("KTB610", "error", "a module is adapted in a layer where the base model has no such module",
         _BELONG),
    Code("KTB611", "error", "the base model's config.json can't be read: nothing is checked against it",
         "point at a model directory as transformers saves it"),
    Code("KTB612", "error", "the adapter was trained on another base model, by the fingerprint in its"
         " manifest", "use the model it was trained on; if this one is meant, merge and serve take"
         " --allow-other-base"),
    Code("KTB613", "warning", "the base model's config.json is not the one that was trained with",
         "use the config.json of training, or check that the difference is meant"),
    Code("KTB614", "warning", "the base model can't be read in all it has: it is not compared with the"
         " one that the adapter was trained on", "download or copy the base model again"),
    Code("KTB615", "error", "the adapter was merged into the base model before (an info for another adapter)",
         "merge into the model that it was trained on; if it is meant, pass --allow-other-base"),
    Code("KTB618", "error", "the engine doesn't serve the base model's family", "serve with the embedded"
         " engine, or merge and serve the result where the family is served"),
    Code("KTB630", "error", "the adapter has LoRA that llama.cpp loads and never applies in this"
         " architecture (a warning where such a file is read)",
         "merge the adapter into the base model and convert that, or train without these modules"),
))  # fmt: skip

CONVERSION = Subject("Conversion and merging", "adapter", (
    Code("KTB701", "error", "the output directory can't be written", "choose another directory"),
    Code("KTB703", "error", "one configuration can't hold both scales without rounding",
         "write the split layout: --expert-output-dir and --nonexpert-output-dir"),
    Code("KTB704", "error", "the adapter has nothing for a requested output", "leave that output out"),
    Code("KTB705", "error", "nothing names the base model", "pass --base-model"),
    Code("KTB706", "error", "output directories contain each other or the input",
         "give every output a directory of its own"),
    Code("KTB707", "info", "--lora-alpha overrides the adapter's own", "check that it is meant"),
    Code("KTB708", "info", "PEFT would take non-expert modules for routed experts and load them wrongly",
         "nothing for engines; for PEFT, write --to peft-fused"),
    Code("KTB709", "error", "a file that is read was written to, replaced or removed meanwhile",
         "wait until nothing writes to it, then run the command again"),
    Code("KTB720", "error", "the requested format can't hold the adapter exactly",
         "choose another format"),
    Code("KTB721", "info", "a conversion did more than move bytes", "nothing to do if that is meant"),
    Code("KTB731", "error", "an adapter tensor has no weight in the base model to be merged into",
         "merge into the model that the adapter was trained on"),
    Code("KTB732", "error", "a weight to be merged into is quantized in a way that can't be written here",
         "merge into the checkpoint that it was quantized from, or serve the adapter beside it"),
    Code("KTB733", "error", "a weight to be merged into is tied to another",
         "train without it: merged, it would change the tied weight's other use as well"),
    Code("KTB734", "error", "an adapter tensor's shape doesn't fit the weight it belongs to",
         "merge into the model that the adapter was trained on"),
    Code("KTB735", "error", "two adapter tensors belong to one place in a weight",
         "remove one of the two"),
    Code("KTB736", "error", "the directory of a merged or requantized checkpoint can't be written",
         "choose another output directory"),
    Code("KTB737", "error", "the disk has too little space for a merged or requantized checkpoint",
         "free space, or choose an output directory on another disk"),
    Code("KTB738", "error", "a rank_pattern or alpha_pattern is more than module names",
         "merge it with PEFT, which has the model in memory"),
    Code("KTB739", "warning", "the adapter's directory has a chat template or tokens that the base model's"
         " hasn't: a merged model has the base's", "copy the adapter's tokenizer files into the output, if"
         " the model was trained with them"),
    Code("KTB910", "warning", "requantizing lost more of the adapter's delta than it kept",
         "serve the adapter beside the quantized base, or merge into the unquantized checkpoint and "
         "quantize that"),
    Code("KTB911", "error", "a quantized weight to be merged into and its scales don't fit each other",
         "download the checkpoint again"),
    Code("KTB912", "info", "this installation has no kernels: numpy merges, to the same bytes and slower",
         "nothing to do, or install ktbridge with its kernels on an x86-64 machine with Linux"),
))  # fmt: skip

ENGINE = Subject("Against an engine version", "adapter", (
    Code("KTB901", "error", "the engine version doesn't accept this layout", _CONVERT),
    Code("KTB902", "info", "the engine version is none of those looked at: the next known contract holds",
         "nothing to do if the adapter serves; report where it doesn't"),
    Code("KTB903", "error", "the engine version never applies a module's LoRA, or ends over it at start-up",
         "serve with sglang-kt 0.7.2, or with the embedded engine"),
    Code("KTB904", "warning", "the engine version has no method for the weights experts were trained upon",
         "serve with a newer version, or from bf16 weights and compare with ktbridge verify"),
    Code("KTB905", "error", "the engine's method for these expert weights has LoRA of one rank only",
         "train with that rank, or serve from another weight format"),
    Code("KTB906", "warning", "a name has a colon: requests MODEL:ADAPTER are cut at the first one, and"
         " the base model answers", "serve it under another --served-model-name"),
    Code("KTB907", "error", "the engine's expert LoRA has no kernel for this activation",
         "serve with the embedded engine"),
))  # fmt: skip

VLLM = Subject("Against vLLM", "adapter", (
    Code("KTB640", "warning", "vLLM refuses LoRA on each expert of this family, unless started with a flag",
         "start vLLM with --enable-mixed-moe-lora-format, or write --to peft-fused"),
    Code("KTB641", "error", "vLLM reads a tensor and never applies it, as its model has no such module",
         "ktbridge convert ADAPTER --to vllm --output D"),
    Code("KTB642", "warning", "vLLM's default --max-lora-rank is too low for the adapter",
         "start vLLM with a higher --max-lora-rank"),
    Code("KTB643", "error", "vLLM's MLA attention generates tokens without the LoRA of kv_b_proj",
         "merge the adapter, or train without kv_b_proj"),
))  # fmt: skip

SGLANG = Subject("Against upstream SGLang", "adapter", (
    Code("KTB644", "error", "a target module's size is unknown to SGLang, which ends at start-up (a warning"
         " where such an adapter is written)", "train without it, or merge the adapter"),
    Code("KTB645", "error", "the routed experts' LoRA is read by SGLang and never applied, as not both gate"
         " and down are targeted (a warning where such an adapter is written)",
         "train gate_proj, up_proj and down_proj, or merge the adapter"),
    Code("KTB646", "error", "a tensor has no place in SGLang, which ends when it loads the adapter, or with"
         " the first request for it (a warning where such an adapter is written)",
         "train without the module or with its partners, or merge the adapter"),
    Code("KTB647", "info", "nothing of this family was run in upstream SGLang: what holds for all is checked",
         "compare the served adapter with ktbridge verify"),
    Code("KTB648", "warning", "the shared expert becomes one more routed expert in SGLang on NVIDIA's GPUs,"
         " which drops its LoRA", "start SGLang with --disable-shared-experts-fusion"),
    Code("KTB649", "error", "added_tokens.json has tokens beyond the base model's vocabulary, and SGLang"
         " refuses such an adapter",
         "remove added_tokens.json if no prompt needs these tokens, or merge the adapter"),
))  # fmt: skip

HUB = Subject("Uploading to the Hub", "adapter", (
    Code("KTH001", "error", "the adapter names its base model by a path of this machine",
         "ktbridge push … --base-model org/name, the base model's name on the Hub"),
    Code("KTH002", "warning", "the evaluation for the model card reports an error, which the card repeats",
         "see its report for what to do; then `ktbridge report`, and push again"),
    Code("KTH003", "info", "the model card is without data and losses: files of training are missing",
         "push the directory that training wrote, or nothing if another tool trained it"),
))  # fmt: skip

SUBJECTS = (
    FILES,
    CONFIGURATION,
    KEYS,
    SHAPES,
    VALUES,
    SETS,
    BASE_MODEL,
    CONVERSION,
    ENGINE,
    VLLM,
    SGLANG,
    HUB,
)
