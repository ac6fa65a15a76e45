"""Findings about training: the configuration, the run, the data, predictions, and a model's experts."""

from __future__ import annotations

from ktbridge.codes.table import Code, Subject

_ITS_BASE = "Use the base model that the adapter was trained on."

CONFIGURATION = Subject("Configuration of a run", "sft", (
    Code("KTC001", "error", "a key of the configuration is unknown",
         "Correct its spelling, or leave it out."),
    Code("KTC002", "error", "a value is not one that its key takes", "Give a value that it takes."),
    Code("KTC003", "error", "a key that every run needs is missing", "Set it."),
    Code("KTC004", "warning", "a key means nothing here, as written or as other tools read it",
         "Leave it out."),
    Code("KTC005", "error", "keys contradict each other, or the settings of accelerate launch",
         "Leave one of the two out."),
    Code("KTC006", "error", "a file or directory that the configuration names isn't there",
         "Correct the path."),
))  # fmt: skip

RUN = Subject("Starting and continuing a run", "sft", (
    Code("KTC010", "error", "the checkpoint belongs to a run with another setting",
         "Restore the setting, train on from its weights (adapter_name_or_path), or start anew with "
         "resume_from_checkpoint=false."),
    Code("KTC011", "warning", "a setting is another one from this checkpoint on",
         "Restore it if the run should end in the same bits as one that was never stopped."),
    Code("KTC012", "warning", "a setting doesn't act in this stage as it does in others",
         "Leave it out, or check that it is meant."),
    Code("KTC013", "info", "lora_target: all leaves out modules on which SGLang-KT applies no LoRA",
         "Nothing, or name them beside all if the adapter is served elsewhere."),
    Code("KTC014", "error", "one of several checks before the start failed",
         "Follow the finding's own next step."),
    Code("KTC019", "error", "a file of a checkpoint is missing or damaged (a warning where an earlier"
         " checkpoint is taken)", "Copy the checkpoint again, or go on from an earlier one."),
    Code("KTC021", "info", "the run goes on from a checkpoint of its own",
         "resume_from_checkpoint=false starts anew and keeps the checkpoints under another name."),
    Code("KTC022", "warning", "the run starts anew beside checkpoints of an earlier one",
         "Delete the directory that they were moved to when you don't need them."),
    Code("KTC023", "warning", "the GPU ran out of memory in a pass: the step was made again with fewer"
         " tokens in a pass", "Set tokens_per_pass to the number that it gives."),
    Code("KTC024", "info", "kt_experts chose where the routed experts are computed",
         "Nothing; kt_experts and kt_gpu_memory choose otherwise."),
    Code("KTC026", "info", "another library computes norms or convolutions on the GPU",
         "Nothing; enable_liger_kernel: false takes transformers' own norms."),
    Code("KTC027", "info", "what isn't a routed expert is computed in float32: this CPU has no BF16"
         " instructions",
         "Nothing; bf16: true takes less memory and several times the time there."),
    Code("KTC028", "warning", "bfloat16 is asked for on a CPU without BF16 instructions, where it is slow",
         "Set bf16: auto, or false, which takes more memory and a fraction of the time there."),
    Code("KTC029", "info", "the run goes on in its checkpoint's dtype, not in the one that a new run"
         " would have",
         "Nothing; resume_from_checkpoint=false starts anew in the other."),
    Code("KTC030", "warning", "held-out rows were predicted better by an earlier step, or by the base, than"
         " by the adapter that is published", "Set load_best_model_at_end: true, or train for fewer steps."),
    Code("KTC031", "warning", "the checkpoint of the best step isn't there or is damaged: another"
         " step's adapter is published",
         "Start anew with resume_from_checkpoint=false if that step matters."),
    Code("KTC032", "warning", "held-out rows are evaluated at the last step alone: there is no best step to"
         " choose", "Lower eval_steps, or leave it out for ten evaluations in the run."),
    Code("KTC036", "warning", "template names one of LLaMA-Factory that writes conversations differently from"
         " the tokenizer's chat template, which is used",
         "Nothing: servers use the tokenizer's. Change chat_template.jinja of the base if it must differ."),
    Code("KTC037", "info", "template is a name that isn't held against the tokenizer's chat template",
         "Nothing: the chat template is used in any case."),
    Code("KTC050", "info", "the run trains on experts quantized to INT8 or INT4, as it asks for",
         "Nothing, or kt_expert_weight_format: bf16 to train on the experts as they are stored."),
    Code("KTC051", "warning", "the experts can't be had in the storage that is asked for",
         "Leave the key out: the experts are read as they are stored."),
    Code("KTC052", "error", "there is no room, or no right, to write the quantized experts",
         "Set KTBRIDGE_CACHE to a directory on another disk, or leave out what asks for them."),
    Code("KTC060", "error", "a tokenizer is tiktoken's file alone, and not Kimi's",
         "Copy tokenizer.json of the model, or of a conversion of its tokenizer, into the directory."),
    Code("KTC061", "error", "tiktoken's file of a tokenizer is damaged",
         "Download tiktoken.model and tokenizer_config.json again."),
    Code("KTC080", "error", "stage kto compares the rows of a batch, and a setting leaves it no such batches",
         "Set per_device_train_batch_size to 2 or more, and leave tokens_per_pass out."),
    Code("KTC081", "error", "interleave_probs and the datasets don't fit together",
         "Give one share for each dataset, which add up to 1."),
    Code("KTC082", "error", "a setting needs all rows at once, and streaming reads them one by one",
         "Leave it out, or leave out streaming."),
    Code("KTC090", "error", "the processes of one run would train differently: other settings, rows, weights,"
         " versions, or another checkpoint", "Give all processes the same; where names what differs."),
    Code("KTC091", "warning", "a process can't see the disk that the first one writes to",
         "Put output_dir on a disk that all hosts share if a run shall go on from its checkpoints."),
    Code("KTC092", "warning", "linear attention can't use its GPU kernels and is slow (an error where the"
         " kernels' gradients would be wrong)", "Install the packages that it names."),
))  # fmt: skip

DATA = Subject("Training data", "sft", (
    Code("KTD001", "error", "a row can't be trained on", "Correct the row, or take it out."),
    Code("KTD002", "error", "a dataset can't be found or read as its entry describes it (a warning where"
         " only a column that rows can do without is missing)",
         "Correct the entry in dataset_info.json, or give the file's path."),
    Code("KTD003", "warning", "rows have fields that aren't trained on, or the id of an earlier row",
         "Name such fields in the columns of dataset_info.json; remove rows that are there twice."),
    Code("KTD004", "warning", "the chat template ends answers in no stop token: the model does not learn to"
         " stop",
         "Move the end-of-turn token before {% endgeneration %} in chat_template.jinja."),
    Code("KTD005", "info", "the chat template writes earlier answers differently later in a conversation (a"
         " warning where split_turns is false)",
         "Nothing, or split_turns: false for one sequence per conversation, which is faster."),
    Code("KTD006", "info", "the chat template puts text in front of answers, and the model learns to write"
         " it", "Nothing: it is what a server's template expects of such answers."),
    Code("KTD007", "warning", "a server's prompt ends in text that answers don't go on from: they are"
         " trained without it",
         "Put thoughts (<think>…</think>) into these answers, or serve with thinking off."),
    Code("KTD008", "warning", "more than a tenth of the rows can't be used",
         "Read the file of refused rows in output_dir, or the lines that --dry-run lists."),
    Code("KTD010", "warning", "a held-out row is trained on, too",
         "Take one of the two out: what was trained on doesn't show overfitting."),
    Code("KTD011", "error", "val_size leaves no row to train on", "Lower val_size, or name eval_dataset."),
    Code("KTD020", "info", "enable_thinking: false takes the thoughts out of rows",
         "Nothing, or leave enable_thinking out to train them."),
    Code("KTD021", "info", "enable_thinking is set, and the chat template has no such switch",
         "Leave it out; a model that always opens thoughts needs rows with thoughts."),
    Code("KTD040", "error", "a dataset of a mixture has no row that can be used",
         "Mend its rows, or leave it out of dataset (and its share out of interleave_probs)."),
    Code("KTD041", "info", "the rows in tokenized_path are others or not wanted, so they are made anew",
         "Nothing is to be done. Another tokenized_path keeps both."),
    Code("KTD042", "warning", "a file of the rows in tokenized_path is damaged, so they are made anew",
         "Nothing is to be done; if it happens again, look at the disk."),
    Code("KTD043", "info", "rows are taken from tokenized_path, or are kept there for the next start",
         "Delete the directory when no run needs it."),
    Code("KTD044", "error", "a dataset can't be streamed",
         "Write one row a line (JSONL), or Parquet or CSV; max_samples bounds what is read."),
    Code("KTD060", "warning", "the judged answers are all good, or all bad",
         "Add rows of the other kind: without them nothing is told from what is wanted."),
    Code("KTD061", "warning", "a file of a stream has changed since the run began",
         "Rows may be missing from what was trained on, or twice in it: train again on files that stay."),
    Code("KTD062", "info", "assistant messages in a row are trained as one turn: thoughts, words, calls",
         "Nothing, or put a user's message or a tool's result between those that are turns of their own."),
))  # fmt: skip

PREDICTIONS = Subject("Predictions", "predict", (
    Code("KTP001", "error", "a row could not be answered; the results are those of the others",
         "Run the same command again, which asks for these rows alone."),
    Code("KTP002", "error", "unfinished predictions belong to another model, dataset or setting",
         "Restore the setting, or delete the file of unfinished predictions to start anew."),
))  # fmt: skip

EXPERTS = Subject("Routed experts and their LoRA", "experts", (
    Code("KTL001", "error", "expert LoRA and routed experts are in different layers", _ITS_BASE),
    Code("KTL002", "error", "a tensor of the adapter has another shape than its place in the model",
         _ITS_BASE),
    Code("KTL003", "error", "the kernels can't compute this model's experts, as they are or as they were"
         " loaded", "Use a model of a family in docs/models.md."),
    Code("KTL004", "error", "PEFT has put LoRA of its own on the fused experts",
         "Call wrap_experts before get_peft_model, or name target_modules other than "
         '"all-linear", gate_proj, up_proj and down_proj.'),
    Code("KTL005", "error", "the adapter has LoRA on a projection that the model has none for",
         "Wrap the experts with this projection in lora_targets."),
    Code("KTL006", "error", "the adapter to go on from has another rank, alpha or modules than are"
         " configured", "Set what the adapter has."),
    Code("KTL007", "error", "the adapter has LoRA on a module that the model doesn't have", _ITS_BASE),
    Code("KTL020", "warning", "the CPU has AMX and the kernels may not use it, so they are some three to five"
         " times slower", "Use Linux 5.16 or newer, and a container runtime that allows arch_prctl."),
    Code("KTL021", "error", "a mapped file can't be read any more while it is in use",
         "Restore the file as it was, or copy the checkpoint to a disk that keeps it, and run again."),
    Code("KTL022", "warning", "the page cache doesn't keep the experts: they are read from disk each time",
         "Free memory, or raise the container's limit: docs/plan.md says what the run needs."),
))  # fmt: skip

SUBJECTS = (CONFIGURATION, RUN, DATA, PREDICTIONS, EXPERTS)
