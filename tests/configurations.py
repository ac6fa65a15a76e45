"""Training configurations for tests."""

import yaml

GOOD = {"model_name_or_path": "base", "dataset": "rows.jsonl", "output_dir": "out"}

# The keys of LLaMA-Factory's published examples for KTransformers, by age, with values of ours.
PUBLISHED_COMMON = {
    "trust_remote_code": True, "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 16,
    "lora_target": "all", "dataset": "first, second", "template": "qwen3", "cutoff_len": 640,
    "max_samples": 90, "overwrite_cache": True, "preprocessing_num_workers": 2,
    "dataloader_num_workers": 1, "logging_steps": 5, "save_steps": 50, "plot_loss": True,
    "overwrite_output_dir": True, "save_only_model": False, "report_to": "none",
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": "2e-4",
    "num_train_epochs": 2.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.05, "bf16": True,
    "ddp_timeout": 99, "resume_from_checkpoint": None, "use_kt": True,
}  # fmt: skip
PUBLISHED_BLOCK = {
    "kt_expert_weight_format": "bf16", "kt_backend": "AMXBF16", "kt_num_threads": 4096,
    "kt_tp_enabled": True, "kt_threadpool_count": 2, "kt_max_cache_depth": 2, "kt_share_backward_bb": True,
}  # fmt: skip
PUBLISHED = {
    "deepseek_v2": {},
    "qwen3moe": {"lora_alpha": 32},
    "qwen3_5moe": {
        "kt_cpu_activation": "retain",
        "kt_config": {**PUBLISHED_BLOCK, "kt_model_max_length": 700},
    },
    "qwen3vlmoe": {
        "image_max_pixels": 9, "video_max_pixels": 9, "kt_cpu_activation": "retain",
        "kt_config": PUBLISHED_BLOCK,
    },
    "deepseek_v3_int8": {
        "lora_alpha": 32, "kt_cpu_activation": "retain", "kt_weight_path": "kt-int8",
        "kt_non_expert_weight_path": "cache",
        "kt_config": {
            **PUBLISHED_BLOCK, "kt_expert_weight_format": "int8", "kt_backend": "auto",
            "kt_weight_lifecycle": "persistent",
        },
    },
    "deepseek2, older": {"kt_optimize_rule": "rule.yaml", "cpu_infer": 4096, "chunk_size": 8192},
}  # fmt: skip


def notes_of(config):
    """{key: problem} of what was noted."""
    assert all(note.severity == "warning" and note.next_step for note in config.notes)
    return {note.where.rpartition(": ")[2]: note for note in config.notes}


def written(directory, **values):
    """A configuration file with the dataset it names."""
    (directory / "rows.jsonl").write_text('{"messages": []}\n')
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **values}))
    return path
