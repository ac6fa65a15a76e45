"""LLaMA-Factory's inference YAML as an optional argument: its values are defaults of a command's options."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ktbridge.cli._ui import print_notes
from ktbridge.errors import UsageError
from ktbridge.predict.inference import load_inference

if TYPE_CHECKING:
    from ktbridge.predict.inference import Inference

ADAPTER = "adapter"
"""The name that the adapter of a file is served by."""
_META = "ktbridge.inference"
_ENVIRONMENT = {"host": "API_HOST", "port": "API_PORT", "api_key": "API_KEY"}
"""Variables that LLaMA-Factory's API reads, by our option."""
Defaults = Callable[["Inference"], dict[str, object]]


def inference_argument(
    defaults: Defaults, chat: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the argument CONFIG to a command; ``defaults`` maps a file to defaults of its options."""

    def read(context: click.Context, _: click.Parameter, path: str | None) -> None:
        if path is None or context.resilient_parsing:
            return

        found = context.meta[_META] = load_inference(path, chat)
        print_notes(found.notes)
        given = {name: value for name, value in defaults(found).items() if value is not None}
        context.default_map = given

    return click.argument(
        "config", required=False, is_eager=True, expose_value=False, callback=read, metavar="[CONFIG]"
    )


def inference_of(context: click.Context) -> Inference | None:
    """Return what the command's file asks for, if one was given."""
    found: Inference | None = context.meta.get(_META)
    return found


def from_file(context: click.Context, option: str) -> bool:
    """Return whether an option has its value from the file alone."""
    return context.get_parameter_source(option) is ParameterSource.DEFAULT_MAP


def for_chat(found: Inference) -> dict[str, object]:
    """Defaults of `ktbridge chat`."""
    return {
        "base_model": found.model_name_or_path,
        "adapter": found.adapter_name_or_path,
        "from_format": found.adapter_format,
        "system": found.default_system,
        "temperature": found.temperature,
        "max_tokens": found.max_new_tokens,
        "threads": found.cpu_infer or None,
        "engine": found.engine,
    }


def for_serve(found: Inference) -> dict[str, object]:
    """Defaults of `ktbridge serve`, with LLaMA-Factory's environment variables."""
    environment = {name: os.environ.get(key) or None for name, key in _ENVIRONMENT.items()}
    adapter = found.adapter_name_or_path
    if (port := environment["port"]) and not port.isdecimal():
        raise UsageError(f"API_PORT in the environment is {port!r}.", "Set it to a port's number.")
    return {
        "model": found.model_name_or_path,
        "adapters": [f"{ADAPTER}={adapter}"] if adapter else None,
        "from_format": found.adapter_format,
        "engine": found.engine,
        "trust_remote_code": found.trust_remote_code or None,
        "threads": found.cpu_infer or None,
        **environment,
    }
