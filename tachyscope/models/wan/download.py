"""Published files on Hugging Face: fetched where the user asks for it, else the command to run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tachyscope.errors import TachyscopeError, first_line
from tachyscope.models.wan import text, vae

# of Wan's own repository: text encoder, tokenizer and VAE
PARTS = (text.PUBLISHED, vae.PUBLISHED, "google/umt5-xxl/*")


class Fetched(NamedTuple):
    """Where downloaded files lie."""

    checkpoint: Path
    parts: Path  # the folder of the text encoder and the VAE
    lora: Path | None


@dataclass(frozen=True)
class HubFiles:
    """A published model's files: its repository, the checkpoint in it, and Wan's repository."""

    repo: str
    file: str
    lora: str = ""
    wan: str = "Wan-AI/Wan2.1-T2V-1.3B"

    def commands(self, folder: str) -> str:
        """The shell commands that download the files into a folder."""
        files = f"{self.file} {self.lora}".rstrip()
        parts = " ".join(f"--include '{part}'" for part in PARTS)
        return (
            f"hf download {self.repo} {files} --local-dir {folder} && "
            f"hf download {self.wan} {parts} --local-dir {folder}"
        )

    def fetch(self, name: str) -> Fetched:
        """Download what is not in Hugging Face's cache yet; licences are on the models' cards."""
        try:
            from huggingface_hub import hf_hub_download, snapshot_download
        except ImportError:
            raise TachyscopeError(
                "weights='download' needs huggingface-hub: pip install tachyscope[hf]"
            ) from None
        endpoint = os.environ.get("HF_ENDPOINT")  # read now: huggingface-hub reads it once
        try:
            get = partial(hf_hub_download, self.repo, endpoint=endpoint)
            checkpoint, lora = Path(get(self.file)), Path(get(self.lora)) if self.lora else None
            parts = snapshot_download(self.wan, allow_patterns=list(PARTS), endpoint=endpoint)
        # huggingface-hub raises its own errors, those of HTTP and of files
        except Exception as fault:
            raise TachyscopeError(
                f"{name} could not be downloaded: {first_line(fault)}: check the connection, or "
                f"run {self.commands(name)}"
            ) from fault
        return Fetched(checkpoint, Path(parts), lora)
