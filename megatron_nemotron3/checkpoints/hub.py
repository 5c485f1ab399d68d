"""--push-to-hub: a finished folder goes to a repository of the Hugging Face Hub, through huggingface_hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.options import option


def push_option() -> Any:
    """--push-to-hub."""
    return option("Hugging Face Hub repository to upload the result to; a new one is private", "REPO")


def require_hub(repository: str) -> None:
    """Raise ValueError, before any work, if nothing can be uploaded to a repository of this name."""
    option = f"--push-to-hub {repository}"
    try:
        from huggingface_hub import HfApi, constants, get_token
        from huggingface_hub.utils import HFValidationError, validate_repo_id
    except ImportError:
        raise ValueError(
            f"{option}: package huggingface_hub is not installed: pip install 'megatron-nemotron3[remote]'"
        ) from None
    try:
        validate_repo_id(repository)
    except HFValidationError as problem:
        raise ValueError(f"{option}: give OWNER/NAME: {_line(problem)}") from None
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{option}: HF_HUB_OFFLINE is set: unset it, or upload later")
    if get_token() is None:
        raise ValueError(f"{option}: nobody is logged in here: hf auth login, or set HF_TOKEN")
    try:
        HfApi().whoami()
    except Exception as problem:  # httpx's, requests' or the package's own
        raise ValueError(f"{option}: the Hub does not accept the token: {_line(problem)}") from None


def push(folder: Path, repository: str) -> str:
    """Upload a complete folder; return the address. The folder stays, whatever the Hub answers."""
    from huggingface_hub import HfApi, constants

    api, cure = HfApi(), f"{folder} is complete: hf upload {repository} {folder}"
    try:
        full = api.create_repo(repository, private=True, exist_ok=True).repo_id
        api.upload_folder(repo_id=full, folder_path=folder, commit_message="Upload by nemotron3")
    except KeyboardInterrupt:
        print(f"not pushed   {cure}", file=sys.stderr)
        raise
    except Exception as problem:
        raise ValueError(f"--push-to-hub {repository}: {_line(problem)}; {cure}") from None
    return f"{constants.ENDPOINT}/{full}"


def _line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {' '.join(str(problem).split()):.300}"
