"""Published files on Hugging Face: their download, and the commands for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tachyscope.core.errors import TachyscopeError, first_line
from tachyscope.models.checkpoint import INDEX
from tachyscope.models.wan import text, vae

TOKENIZER = "google/umt5-xxl/*"
# Pinned commits, from public records of downloads. Other repositories are downloaded at their
# newest commit.
REVISIONS = {
    "Overworld/Waypoint-1.5-1B": "391f92827075edcf4a8b3c8a2ddae010698f8636",
    "Overworld-Models/taehv1_5": "a0253886b13b9c4c3bd224bd479be03f5988a3df",
    "Skywork/Matrix-Game-2.0": "f1729d99a80e0f07993a77d7dad4a3190e23c2c8",
    "acvlab/ABot-World-0-5B-LF": "d26a3003701e70d38cd17e2af2faf63bd4ff7632",
    "robbyant/lingbot-world-v2-1.3b-causal-fast": "7e36a5f919f86cb4255cc9bfc30adb44963fbde1",
    "robbyant/lingbot-world-v2-14b-causal-fast": "5c33dd40b213598c418fd25bff30fdbd23fd38a7",
    "gdhe17/Self-Forcing": "2f8b779212da279d212c22a509b66ad6552f350e",
    "Wan-AI/Wan2.1-T2V-1.3B": "37ec512624d61f7aa208f7ea8140a131f93afc9a",
    "Wan-AI/Wan2.1-T2V-14B": "a064a6c71f5be440641209c07bf2a5ce7a2ff5e4",
}


class Fetched(NamedTuple):
    """Paths of downloaded files."""

    checkpoint: Path
    parts: Path  # the folder of the text encoder and the VAE
    lora: Path | None
    revisions: dict[str, str]  # the downloaded commit of each repository


@dataclass(frozen=True)
class HubFiles:
    """A published model's files: its repository and checkpoint, and the repository of its parts."""

    repo: str
    file: str
    lora: str = ""
    also: tuple[str, ...] = ()  # files beside the checkpoint
    wan: str = "Wan-AI/Wan2.1-T2V-1.3B"
    # files of that repository: text encoder, VAE and tokenizer
    parts: tuple[str, ...] = (text.PUBLISHED, vae.PUBLISHED, TOKENIZER)

    @property
    def shards(self) -> str:
        """The pattern of the files that an index lists."""
        return f"{self.file.rpartition('/')[0]}/*.safetensors".lstrip("/")

    def commands(self, folder: str) -> str:
        """The shell commands that download the files into a folder."""
        files = " ".join(filter(None, (self.file, self.lora, *self.also)))
        if self.file.endswith(INDEX):
            files = f"--include '{self.shards}' --include {self.file}"
        parts = " ".join(f"--include '{part}'" for part in self.parts)
        return (
            f"hf download {self.repo} {files}{_pinned(self.repo)} --local-dir {folder} && "
            f"hf download {self.wan} {parts}{_pinned(self.wan)} --local-dir {folder}"
        )

    def fetch(self, name: str) -> Fetched:
        """Download the files into Hugging Face's cache, unless they are there."""
        try:
            from huggingface_hub import hf_hub_download, snapshot_download
        except ImportError:
            raise TachyscopeError(
                "weights='download' needs huggingface-hub: pip install -e '.[hf]'"
            ) from None
        endpoint = os.environ.get("HF_ENDPOINT")  # read now: huggingface-hub reads it once
        try:
            pins: Any = [REVISIONS.get(repo) for repo in (self.repo, self.wan)]
            get = partial(hf_hub_download, self.repo, revision=pins[0], endpoint=endpoint)
            checkpoint, lora = Path(get(self.file)), Path(get(self.lora)) if self.lora else None
            for beside in self.also:
                get(beside)
            if self.file.endswith(INDEX):
                snapshot_download(
                    self.repo, revision=pins[0], allow_patterns=[self.shards], endpoint=endpoint
                )
            parts = Path(
                snapshot_download(
                    self.wan, revision=pins[1], allow_patterns=list(self.parts), endpoint=endpoint
                )
            )
        # huggingface-hub raises its own errors, those of HTTP and of files
        except Exception as fault:
            why = first_line(fault).rstrip(".")
            raise TachyscopeError(
                f"{name} could not be downloaded: {why}: check the connection, or run "
                f"{self.commands(name)}"
            ) from fault
        # the cache keeps a commit's files in a folder of its name
        taken = checkpoint.parents[self.file.count("/")]
        return Fetched(checkpoint, parts, lora, {self.repo: taken.name, self.wan: parts.name})


def _pinned(repo: str) -> str:
    """The option of `hf download` for a repository's commit."""
    return f" --revision {REVISIONS[repo]}" if repo in REVISIONS else ""
