"""A MoE model on disk: its config, its family's location of experts, its tensors (lazily).

Needs nothing beyond the standard library::

    from ktbridge.model import open_checkpoint, read_model_config, resolve_model

    path = resolve_model("models/tiny")  # a directory, or an id in the local Hub cache
    config = read_model_config(path)  # sizes, MoE layers, family
    router = open_checkpoint(path).tensor("model.layers.0.mlp.gate.weight")  # a memory-mapped view
"""

from ktbridge.model.checkpoint import Checkpoint, find_model, open_checkpoint, resolve_model
from ktbridge.model.config import ModelConfig, check_served, read_model_config
from ktbridge.model.families import FAMILIES, Family, family_of
from ktbridge.model.identity import Fingerprint, fingerprint
from ktbridge.model.tensor import Tensor
from ktbridge.model.tensorfile import Entry, TensorFile, TensorFileError, TensorRef, open_tensor_file

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "Entry",
    "Family",
    "Fingerprint",
    "ModelConfig",
    "Tensor",
    "TensorFile",
    "TensorFileError",
    "TensorRef",
    "check_served",
    "family_of",
    "find_model",
    "fingerprint",
    "open_checkpoint",
    "open_tensor_file",
    "read_model_config",
    "resolve_model",
]
