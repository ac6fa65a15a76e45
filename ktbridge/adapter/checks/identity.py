"""Check whether a base model is the one that an adapter was trained on.

Compares the fingerprint that training stored in the manifest, independent of the model's path, else
the name. The same model in another format (dequantised, or saved by another version) has different
tensors: serving from it may be intended, so that is a warning, except for a merge, which is
permanent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ktbridge.adapter.adapter import Adapter, last_part
from ktbridge.adapter.manifest import trained_on
from ktbridge.codes import problem
from ktbridge.errors import KtbridgeError, Problem, Severity
from ktbridge.model import Checkpoint, Fingerprint, fingerprint
from ktbridge.model.identity import Weights, config_differences

_NAMED = 6  # keys of config.json that a problem lists


class Base:
    """A base model to compare with; its fingerprint is computed once, if an adapter needs it."""

    def __init__(self, path: Path, name: str, checkpoint: Checkpoint | None = None) -> None:
        self.path = path
        self.name = name
        self._source = path if checkpoint is None else checkpoint

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Raises KtbridgeError when the weights exist but can't be read."""
        return fingerprint(self._source)


def check_identity(
    adapter: Adapter, base: Base, *, merging: bool = False, allowed: bool = False
) -> Iterator[Problem]:
    """Findings if ``base`` is not the model trained on; ``allowed``: another model is permitted."""
    where, recorded = str(adapter.path), trained_on(adapter.manifest)
    weights: Weights = "unknown"
    if recorded is not None:
        try:
            ours = base.fingerprint
        except KtbridgeError as error:
            yield problem("KTB614", base.name, error.sentence)
            ours = recorded
        else:
            weights = recorded.weights(ours)
        keys = list(config_differences(recorded.config, ours.config))
        listed = ", ".join(keys[:_NAMED])
        if len(keys) > _NAMED:
            listed += f" and {len(keys) - _NAMED} more"
        severity: Severity = "warning" if allowed else "error"
        meant = f"{adapter.base_model or 'the model'}, which it was trained on"
        if weights == "other values":
            found = f"{base.name} has the same names and shapes, and other values"
            yield problem("KTB612", where, found, meant, severity=severity)
        elif weights == "other tensors":
            found = f"{base.name} has tensors of other names, dtypes or shapes"
            found += f", and another {listed} in config.json" if keys else ""
            expected = f"{meant}; it may be that, in another format"
            level: Severity = severity if merging else "warning"
            yield problem("KTB612", where, found, expected, severity=level)
        elif keys:
            found = f"differs in {listed}"
            yield problem("KTB613", f"{base.path / 'config.json'}", found, f"as for {where}")
    named, real = adapter.base_model, base.path.resolve()
    same = (last_part(base.name), last_part(str(real)))
    if weights == "unknown" and named and last_part(named) not in same:
        yield problem("KTB601", where, f"names the base model {named!r}", base.name)
