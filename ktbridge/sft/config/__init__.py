"""The training configuration: YAML with LLaMA-Factory's field names, read strictly.

Every key has a meaning, or is noted or refused by name; all errors are reported at once. Reading
one needs neither torch nor numpy::

    from ktbridge.sft.config import load_config

    config = load_config("run.yaml", ["learning_rate=2e-4", "kt_config.kt_num_threads=16"])
    config.notes  # warnings: keys that mean nothing here, and what to use instead

schema.py has the keys, fields.py says what a key is and what a resumed run may change, foreign.py has other
names of keys and the keys of other tools, rules.py contradictions between keys; load.py combines them.
"""

from ktbridge.sft.config.load import check_output_dir, check_writable, load_config, parse_config
from ktbridge.sft.config.schema import KtConfig, TrainConfig

__all__ = ["KtConfig", "TrainConfig", "check_output_dir", "check_writable", "load_config", "parse_config"]
