"""Tables of unsupported keys: what each means elsewhere, and what to use here.

Sources: LLaMA-Factory's argument classes, transformers' ``TrainingArguments``, and KTransformers'
configuration for fine-tuning, as of 2026.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ktbridge.sft.config.foreign import Foreign, Row


def _noted(keys: str, why: str, instead: str = "Leave it out.", same: Iterable[Any] = ()) -> Row:
    return Row(tuple(keys.split()), why, instead, tuple(same))


def _refused(keys: str, why: str, instead: str, same: Iterable[Any] = ()) -> Row:
    return Row(tuple(keys.split()), why, instead, tuple(same), refused=True)


OFF = (False, 0, "", "no", "none")
_OTHER_TRAINER = "Train with LLaMA-Factory or PEFT where you need it."

_IN_BLOCK = (
    _noted(
        "kt_share_backward_bb",
        "there is no second copy of the weights to share: backward reads the same mapped bytes as forward",
        "Leave it out; kt_cpu_activation: recompute is what saves memory.",
        same=(False,),
    ),
    _noted(
        "kt_share_cache_pool kt_max_cache_depth",
        "there is no cache pool: a call keeps what its own backward needs, however many are open",
        "Leave it out; kt_cpu_activation: recompute keeps less.",
        same=(False,),
    ),
    _noted(
        "kt_model_max_length model_max_length",
        "the kernels' buffers grow with the batch",
        "cutoff_len bounds a conversation.",
    ),
    _noted(
        "kt_tp_enabled kt_numa_nodes",
        "one pool of threads works on all NUMA nodes",
        "Leave it out; numactl or taskset chooses the CPUs.",
        same=(False,),
    ),
    _noted(
        "kt_weight_lifecycle",
        "experts are mapped from the checkpoint for the whole run",
        same=("persistent",),
    ),
    _noted(
        "kt_force_fused_expert_lora",
        "the expert LoRA is always saved fused",
        "`ktbridge convert` writes other layouts.",
        same=(True,),
    ),
    _noted(
        "kt_skip_expert_loading",
        "the model is always loaded without its experts, which are mapped",
        same=(True,),
    ),
    _noted(
        "kt_non_expert_weight_path",
        "attention and the other non-experts are read from model_name_or_path",
        "Leave it out; scripts/dequantize_checkpoint.py makes BF16 of a quantised checkpoint.",
    ),
    _noted(
        "kt_lora_expert_num kt_lora_expert_intermediate_size kt_lora_expert_gate",
        "it belongs to kt_use_lora_experts, another method",
    ),
    _noted(
        "kt_checkpoint_files kt_sharded_metadata kt_wrap_kwargs",
        "it is KTransformers' own record of a run",
    ),
    _refused(
        "kt_use_lora_experts",
        "extra small experts are another method than LoRA on the routed experts, and no engine serves them",
        "Leave it out: the routed experts get LoRA.",
        same=OFF,
    ),
    _refused(
        "kt_train_mode kt_full_weight_grad",
        "the base's experts are mapped read-only, so only LoRA is trained",
        "kt_train_mode: lora. Full fine-tuning is KTransformers' own.",
        same=("lora", False),
    ),
    _refused(
        "kt_lora_dropout",
        "the expert LoRA has no dropout",
        "lora_dropout is for the non-experts alone.",
        same=OFF,
    ),
    _refused(
        "kt_skip_expert_lora_adaptation",
        "the experts always get LoRA: they are what this is for",
        "Train with PEFT where only attention shall learn.",
        same=OFF,
    ),
    _refused("kt_wrap_fn", "models are wrapped by ktbridge.sft.wrap_experts", "Leave it out."),
    _refused("enabled", "without CPU experts ktbridge adds nothing", "Set it to true.", (True,)),
)
IN_BLOCK = Foreign(_IN_BLOCK)
"""Keys of KTransformers' ``kt_config`` block."""

_OUTSIDE = (
    # what KTransformers' earlier integration had
    _noted("chunk_size", "the kernels divide tokens among threads themselves"),
    _noted(
        "mode kt_mode kt_maxlen kt_use_cuda_graph kt_force_think",
        "it is for generating with KTransformers",
        "`ktbridge serve` serves the adapter.",
        same=("normal",),
    ),
    # model
    _noted(
        "trust_remote_code",
        "models are transformers' own classes, and no code of a checkpoint is run",
        same=OFF,
    ),
    _noted(
        "use_fast_tokenizer low_cpu_mem_usage use_kv_cache use_cache use_v1_kernels use_reentrant_gc",
        "how a model is loaded and run is settled",
        same=(True, False),
    ),
    _noted(
        "enable_liger_kernel use_liger_kernel liger_kernel_config use_unsloth use_unsloth_gc torch_compile*",
        "another implementation of the same arithmetic",
        same=OFF,
    ),
    _noted(
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing"
        " activation_checkpointing_kwargs",
        "another key decides",
        "Use disable_gradient_checkpointing for the GPU and kt_cpu_activation for the experts.",
    ),
    _noted(
        "upcast_layernorm upcast_lmhead_output tf32",
        "precision follows the model's own code",
        "bf16: false computes the non-experts in float32.",
        same=OFF,
    ),
    _noted(
        "cache_dir hf_hub_token ms_hub_token om_hub_token offload_folder",
        "nothing is downloaded or offloaded",
        "Give model_name_or_path as a directory, or download the model first; HF_HOME names the cache.",
    ),
    _noted(
        "image_* video_* audio_* crop_to_patches use_audio_in_video media_dir use_fast_image_processor",
        "models are trained on text",
    ),
    _refused(
        "freeze_vision_tower freeze_multi_modal_projector",
        "models are trained on text, and only inside the language model",
        _OTHER_TRAINER,
        same=(True,),
    ),
    _refused(
        "freeze_language_model", "the language model is what is trained", "Leave it out.", OFF
    ),
    _refused(
        "model_revision",
        "the checkpoint is read as it is on disk",
        "Give that revision's directory as model_name_or_path.",
        same=("main",),
    ),
    _refused(
        "quantization_bit fp8",
        "the base is trained as its checkpoint stores it",
        "scripts/quantize_experts.py makes an INT8 checkpoint, half the memory of BF16.",
        same=OFF,
    ),
    _noted(
        "quantization_method quantization_type double_quantization quantization_device_map fp8_*",
        "the base is trained as its checkpoint stores it",
    ),
    _refused(
        "adapter_folder",
        "the adapter is one directory",
        "Give that folder itself as adapter_name_or_path.",
    ),
    _refused(
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config split_special_tokens",
        "the vocabulary stays the base's",
        "Add the tokens to the base checkpoint first.",
        same=OFF,
    ),
    _refused(
        "rope_scaling shift_attn mixture_of_depths train_from_scratch",
        "the base is trained as its config.json describes it",
        "Change the base checkpoint first.",
        same=OFF,
    ),
    _refused(
        "moe_aux_loss_coef",
        "no balancing loss of the router is added",
        "Leave it out, and the router out of lora_target if it shall stay the base's.",
        same=OFF,
    ),
    # method
    _refused(
        "use_dora pissa_init loraplus_lr_ratio additional_target use_llama_pro create_new_adapter",
        "this variant of LoRA has no counterpart in the experts or in the engines",
        "Leave it out: plain LoRA is trained.",
        same=OFF,
    ),
    _refused(
        "use_rslora",
        "experts and engines scale LoRA by alpha / rank",
        "Set lora_alpha to your alpha times the square root of the rank: the same scale.",
        same=OFF,
    ),
    _noted(
        "loraplus_lr_embedding pissa_iter pissa_convert init_special_tokens",
        "its method isn't used",
        same=OFF,
    ),
    _refused(
        "use_galore use_apollo use_badam use_adam_mini use_muon optim_args optim_target_modules use_mca",
        "this optimizer isn't offered",
        "Use optim: adamw_torch_fused, adafactor or sgd.",
        same=OFF,
    ),
    _noted("galore_* apollo_* badam_*", "its optimizer isn't offered"),
    _refused(
        "use_dft_loss use_asft_loss use_eaft_loss label_smoothing_factor pref_bco_weight ld_alpha",
        "this loss isn't offered",
        "Leave it out.",
        same=OFF,
    ),
    _refused(
        "ref_model ref_model_adapters ref_model_quantization_bit",
        "dpo compares with the base without its adapter",
        "Leave it out: nothing is loaded twice.",
        same=OFF,
    ),
    _noted(
        "simpo_gamma kto_* ppo_* reward_model* freeze_trainable* freeze_extra_modules oft_* module_dropout",
        "it belongs to a method that isn't offered",
    ),
    # data
    _refused(
        "val_size eval_split_ratio",
        "held-out rows would be missing from the training",
        "Keep them in a file of their own; `ktbridge eval` measures the adapter.",
        same=OFF,
    ),
    _noted(
        "eval_* metric_for_best_model greater_is_better do_eval do_predict per_device_eval_batch_size"
        " predict_with_generate compute_accuracy prediction_loss_only bf16_full_eval fp16_full_eval"
        " batch_eval_metrics include_for_metrics",
        "nothing is evaluated while training",
        "`ktbridge eval` measures the adapter.",
        same=OFF,
    ),
    _refused(
        "load_best_model_at_end early_stopping_steps",
        "the adapter of the last step is kept, because nothing is evaluated while training",
        "Set max_steps; `ktbridge eval` compares adapters.",
        same=OFF,
    ),
    _refused(
        "train_on_prompt mask_history",
        "the loss is on every answer of the assistant and on nothing else",
        "Leave it out.",
        same=OFF,
    ),
    _refused(
        "mix_strategy interleave_probs",
        "datasets follow one another and are shuffled together",
        "Mix the rows into one file.",
        same=("concat",),
    ),
    _refused("disable_shuffling", "rows are always shuffled, by seed", "Leave it out.", same=OFF),
    _refused(
        "default_system",
        "a system prompt is part of the rows",
        "Put it into the rows as a system message.",
        same=OFF,
    ),
    _noted(
        "overwrite_cache tokenized_path preprocessing_num_workers preprocessing_batch_size streaming"
        " buffer_size data_shared_file_system",
        "rows are read and tokenized anew in each run, and no cache is kept",
        same=OFF,
    ),
    _noted(
        "tool_format enable_thinking reasoning_effort preserve_thinking efficient_eos",
        "the tokenizer's own chat template decides how a conversation is written",
        "Change chat_template.jinja of the base if it must differ.",
    ),
    _noted(
        "group_by_length train_sampling_strategy length_column_name sortish_sampler data_seed"
        " dataloader_drop_last",
        "the order is a shuffle by seed, and the last rows are trained on too",
        "Change seed for another order.",
        same=(*OFF, "random"),
    ),
    _noted(
        "dataloader_* ignore_pad_token_for_loss remove_unused_columns label_names",
        "how batches are made is settled",
        "dataloader_num_workers is read.",
        same=(True,),
    ),
    # output
    _noted(
        "save_strategy save_safetensors save_on_each_node enable_jit_checkpoint",
        "save_steps decides (0: no checkpoints), and files are safetensors",
        same=("steps", True),
    ),
    _noted(
        "logging_* log_* disable_tqdm debug print_param_status include_* skip_memory_metrics project",
        "the log has each logging_steps' loss, learning rate and tokens",
        "Leave it out; logging_steps and report_to are read.",
        same=("steps", True, False),
    ),
    _noted(
        "push_to_hub hub_*",
        "nothing is uploaded",
        "Upload output_dir by hand: hf upload NAME DIRECTORY.",
        same=OFF,
    ),
    _noted(
        "use_swanlab swanlab_* trackio_*",
        "the run is told to tensorboard or wandb",
        "Use report_to.",
        same=OFF,
    ),
    _noted("export_*", "training leaves an adapter", "`ktbridge merge` adds it to the base."),
    # training
    _refused("fp16", "the kernels compute in bfloat16", "Use bf16: true.", same=OFF),
    _refused(
        "lr_scheduler_kwargs auto_find_batch_size",
        "it isn't offered",
        "Leave it out; per_device_train_batch_size and lr_scheduler_type are read.",
        same=(*OFF, {}),
    ),
    _refused(
        "deepspeed",
        "several processes train with FSDP2, whose first keeps the experts on its host",
        "Leave it out and start with `accelerate launch`.",
        same=OFF,
    ),
    _noted(
        "fsdp fsdp_config accelerator_config parallelism_config local_rank ddp_* ray_* resources_per_worker"
        " placement_strategy",
        "accelerate's own configuration decides how processes share the work",
        "Use `accelerate launch --config_file FILE -m ktbridge train CONFIG`.",
        same=OFF,
    ),
    _noted(
        "full_determinism average_tokens_across_devices ignore_data_skip torch_empty_cache_steps no_cuda"
        " restore_callback_states_from_checkpoint",
        "how steps are run and resumed is settled",
        "Leave it out; use_cpu: true stays on the CPU.",
        same=(True, False),
    ),
    _noted(
        "vllm_* sglang_* infer_* do_sample temperature top_p top_k num_beams max_length max_new_tokens"
        " repetition_penalty length_penalty skip_special_tokens generation_*",
        "nothing is generated while training",
        "`ktbridge serve` serves the adapter.",
    ),
)
OUTSIDE = Foreign(_OUTSIDE)
"""Keys outside the block."""
