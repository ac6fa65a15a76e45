"""huggingface_hub, imported when it is needed, and what it and its HTTP library raise as one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktbridge.errors import KtbridgeError, did_you_mean_path
from ktbridge.install import install_hint

if TYPE_CHECKING:
    from ktbridge.model.hub import Repository

_TOKEN = "set HF_TOKEN, or log in with `hf auth login`"


def library() -> Any:
    """huggingface_hub; KtbridgeError with the command that installs it where it isn't."""
    try:
        import huggingface_hub
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ModuleNotFoundError as error:
        raise KtbridgeError(
            f"models and datasets of the Hub need the package {error.name}, which isn't installed.",
            f"{install_hint('hub')}, or name a directory.",
        ) from error
    return huggingface_hub


@contextmanager
def raise_explained(wanted: Repository, upload: bool = False) -> Iterator[None]:
    """Raise what huggingface_hub's calls raise as a KtbridgeError of one sentence."""
    hub = library()
    verbosity = hub.utils.logging.get_verbosity()
    hub.utils.logging.set_verbosity_error()
    try:
        yield
    except KtbridgeError:
        raise
    except Exception as error:
        if (found := explain_hub_error(error, wanted, upload)) is None:
            raise
        near = "" if upload else did_you_mean_path(str(wanted))
        if near:  # a path with a slip, and no repository
            found = type(found)(found.sentence, f"{near} If not: {found.next_step}")
        raise found from error
    finally:
        hub.utils.logging.set_verbosity(verbosity)


def explain_hub_error(error: BaseException, wanted: Repository, upload: bool = False) -> KtbridgeError | None:
    """The error to show for one that a call about ``wanted`` raised; None for a programming error."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' if wanted.kind == 'dataset' else ''}{wanted.id}"
    causes = [*_chain(error)]
    found = {base.__name__ for cause in causes for base in type(cause).__mro__}
    if "GatedRepoError" in found:
        return KtbridgeError(
            f"{wanted.id} is gated: its owners let only accounts download it that asked for it.",
            f"Ask for access at {page}, then {_TOKEN}.",
        )
    if "RevisionNotFoundError" in found:
        return KtbridgeError(
            f"{wanted.id} on the Hub has no branch, tag or commit {wanted.revision!r}.",
            f"Choose one of {page}/tree/main.",
        )
    if "RepositoryNotFoundError" in found:
        return KtbridgeError(
            f"there is no {wanted.kind} {wanted.id!r}: {_no_path(wanted)}, and no such repository at "
            f"{constants.ENDPOINT} that may be read with {_whose()}.",
            f"Correct the name or the path; for a private one {_TOKEN}.",
        )
    failed = f"{wanted} was not uploaded" if upload else _not_here(wanted)
    if "OfflineModeIsEnabled" in found or constants.HF_HUB_OFFLINE:
        return KtbridgeError(
            f"{failed}, and HF_HUB_OFFLINE forbids {'it' if upload else 'to download it'}.",
            "Unset HF_HUB_OFFLINE" + ("." if upload else ", or give the directory of one that is here."),
        )
    if "TransportError" in found:  # no connection, or one that broke off
        return KtbridgeError(
            f"{failed}, and {constants.ENDPOINT} can't be reached ({_reason(causes)}).",
            "Check the network, HF_ENDPOINT and the proxy; what has come is kept, and the same command goes "
            "on from there.",
        )
    for cause in causes:
        response = getattr(cause, "response", None)
        if isinstance(cause, errors.HfHubHTTPError) and response is not None:
            message = str(getattr(cause, "server_message", None) or response.reason_phrase)
            step = f"{_TOKEN[0].upper()}{_TOKEN[1:]}." if response.status_code in (401, 403) else ""
            return KtbridgeError(
                f"{constants.ENDPOINT} answered {response.status_code} for {wanted}: {_line(message)}.",
                step or "Try again later; what has come is kept.",
            )
    if isinstance(error, OSError | RuntimeError):
        what = f"{wanted} could not be {'up' if upload else 'down'}loaded"
        return KtbridgeError(
            f"{what}: {_line(getattr(error, 'strerror', None) or str(error))}.",
            "Run the same command again; what has come is kept.",
        )
    if "HTTPError" in found or isinstance(error, ValueError | errors.SafetensorsParsingError):
        return KtbridgeError(f"{wanted} can't be read from the Hub: {_line(str(error))}.")
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _no_path(wanted: Repository) -> str:
    return f"no directory {Path(str(wanted)).absolute()}"


def _not_here(wanted: Repository) -> str:
    from huggingface_hub import constants

    return (
        f"the {wanted.kind} {str(wanted)!r} isn't here: {_no_path(wanted)}, and not all of it in the Hub "
        f"cache {constants.HF_HUB_CACHE}"
    )


def _whose() -> str:
    from huggingface_hub import get_token

    if os.environ.get("HF_TOKEN"):
        return "HF_TOKEN"
    return "the token of `hf auth login`" if get_token() else "no token"


def _reason(causes: list[BaseException]) -> str:
    last = next((cause for cause in reversed(causes) if str(cause)), causes[-1])
    return _line(getattr(last, "strerror", None) or str(last))


def _line(text: str) -> str:
    """The first line with text."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return (lines[0] if lines else "no reason given").rstrip(".")[:300]
