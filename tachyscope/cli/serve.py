"""`tachyscope serve` and `tachyscope play`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tachyscope.bounds import check
from tachyscope.cli.verb import PathText, Verb, option, required
from tachyscope.errors import TachyscopeError

if TYPE_CHECKING:
    from tachyscope.models.base import VideoModel
    from tachyscope.serve.limits import Limits
    from tachyscope.serve.server import Place

PACKAGES = ("starlette", "uvicorn", "websockets", "prometheus_client", "PIL", "python_multipart")


def check_installed(verb: str) -> None:
    """Raise where the server's packages are not installed."""
    if not all(find_spec(name) for name in PACKAGES):
        raise TachyscopeError(
            f"{verb} needs packages that are not installed: pip install 'tachyscope[serve]'"
        )


@dataclass(frozen=True, kw_only=True)
class _Server(Verb):
    """What both verbs take."""

    plan: str = option("live", "The plan of sessions that ask for none.")
    port: int = option(8080, "Where to listen; 0 for any that is free.")
    weights: PathText | None = option(
        None, "The checkpoint, where the model's name stands for one; 'random' to time it."
    )
    device: str = option("cpu", "cpu, cuda or cuda:N.")
    dtype: str = option("float32", "float32, float64 or bfloat16.")
    memory_gb: float | None = option(
        None,
        "Memory for sessions' caches; left out, what the GPU has free, or half of the machine's.",
    )
    session_frames: int = option(3_600, "Frames that one session may have.")

    def load(self, verb: str, name: str) -> VideoModel:
        check_installed(verb)
        if self.json is not None:
            raise TachyscopeError(f"{verb} has no results, got --json {self.json}: leave it out")
        check("port", self.port)
        check("frames", self.session_frames)
        from tachyscope.models.registry import load

        return load(name, self.weights, device=self.device, dtype=self.dtype)

    @property
    def budget(self) -> int | None:
        return None if self.memory_gb is None else int(1e9 * self.memory_gb)

    def limits(self, **more: int | float) -> Limits:
        from tachyscope.serve.limits import Limits

        return Limits(session_frames=self.session_frames, **more)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Play(_Server):
    """Play a world in the browser: a server on this machine alone, and its page opened."""

    model: str = option("atrium-world", "A name that `tachyscope models` lists.", positional=True)
    page: bool = option(True, "Open the page; the address is printed anyway.")

    def run(self, command: str) -> None:
        model = self.load("play", self.model)
        from tachyscope.serve.server import Place, run

        run(
            model, self.model, plan=self.plan, place=Place(port=self.port), budget=self.budget,
            limits=self.limits(), open_page=self.page,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Serve(_Server):
    """Serve a model over HTTP: sessions over a WebSocket, videos in OpenAI's shape, the page."""

    model: str = required("A name that `tachyscope models` lists.", positional=True)
    host: str = option("127.0.0.1", "The address to listen on; any but this needs --token-file.")
    token_file: Path | None = option(None, "A file of bearer tokens, one a line.")
    origin: tuple[str, ...] = option(
        (), "Another site whose pages may connect, as https://example.org; may be given several."
    )
    state: str | None = option(
        None,
        "Folder or fsspec URL for snapshots, from which sessions resume after a restart; left out, "
        "a folder that goes with the server.",
    )
    replicas: int = option(
        0, "Replicas of the model by Ray Serve, which needs --state and the extra ray; 0 without."
    )
    max_replicas: int = option(
        0, "Replicas at most, where Ray adds and removes some by reserved bytes; 0: as --replicas."
    )
    snapshot_chunks: int = option(32, "Chunks between two snapshots of a session.")
    sessions: int = option(16, "Sessions open at once, those that wait on disk included.")
    idle_s: float = option(300.0, "Seconds without a message after which a client is sent away.")

    def run(self, command: str) -> None:
        check_installed("serve")
        from tachyscope.serve.security import read_tokens
        from tachyscope.serve.server import Place, run

        tokens = () if self.token_file is None else read_tokens(self.token_file)
        place = Place(self.host, self.port, tokens, self.origin)
        limits = self.limits(sessions=self.sessions, idle_s=self.idle_s)
        if self.replicas:
            self._run_replicas(place, limits)
            return
        if self.max_replicas:
            raise TachyscopeError(
                f"--max-replicas goes with --replicas, got {self.max_replicas} alone: give both"
            )
        model = self.load("serve", self.model)
        run(
            model, self.model, plan=self.plan, place=place, budget=self.budget, state=self.state,
            limits=limits, snapshot_chunks=self.snapshot_chunks,
        )  # fmt: skip

    def _run_replicas(self, place: Place, limits: Limits) -> None:
        if find_spec("ray") is None:
            raise TachyscopeError(
                "--replicas needs packages that are not installed: pip install "
                "'tachyscope[serve,ray]'"
            )
        if self.state is None:
            raise TachyscopeError("--replicas share --state, got none: give a path they all reach")
        most = self.max_replicas or self.replicas
        if most < self.replicas:
            raise TachyscopeError(
                f"--max-replicas must be at least --replicas, got {most} and {self.replicas}"
            )
        from tachyscope.serve.ray import Settings, run

        settings = Settings(
            self.model, self.state, self.plan, self.weights, self.device, self.dtype, self.budget,
            self.snapshot_chunks, limits,
        )  # fmt: skip
        run(settings, place, self.replicas, most)
