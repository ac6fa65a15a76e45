"""Note of `ktbridge serve` on the model names in requests, for every engine."""

from __future__ import annotations

from collections.abc import Mapping

from ktbridge.served_names import described_halves, names_adapter


def half_note(models: Mapping[str, str]) -> str:
    """A warning if the bare served name is half of an adapter, else "".

    ``models``: name -> description of the arm, in the format of both engines.
    """
    halves = {name: described_halves(answers) for name, answers in models.items()}
    whole = [name for name in models if names_adapter(name) and halves[name][1]]
    half = [name for name in models if not names_adapter(name) and halves[name][0]]
    if not whole or not half:
        return ""
    return (
        f"{half[0]} alone is half of the adapter: base + expert LoRA, without the non-expert LoRA. "
        f"To get all of it, requests must name {' or '.join(whole)}."
    )
