"""`tachyscope serve` and `tachyscope play`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tachyscope.cli.options import (
    DEVICE,
    MODEL,
    PLAN,
    WEIGHTS,
    check_download,
    check_plan,
    dtype_of,
    fit_first,
    load_model,
    promise_memory,
    read_weights,
)
from tachyscope.cli.verb import PathText, Verb, option, required
from tachyscope.core.errors import TachyscopeError, shown
from tachyscope.core.limits import check, number, whole

if TYPE_CHECKING:
    from tachyscope.models.base import VideoModel
    from tachyscope.serve.limits import Limits
    from tachyscope.serve.server import Endpoint


@dataclass(frozen=True, kw_only=True)
class _Server(Verb):
    """Options of both verbs."""

    plan: str = option(PLAN, "The plan of sessions that name none.")
    port: int = option(8080, "Where to listen; 0 for any that is free.")
    weights: tuple[PathText, ...] = option((), WEIGHTS)
    device: str = option("cpu", DEVICE)
    memory_gb: float | None = option(
        None,
        "Memory for sessions' caches; left out, what the GPU has free, or half of the machine's.",
    )
    set: tuple[str, ...] = option(
        (),
        "A setting: sessions=16, session_frames=3600, idle_s=300, snapshot_chunks=32 and others of "
        "the server's limits; may be given several times.",
    )

    def load(self, name: str) -> VideoModel:
        check("port", self.port)
        check_plan(self.plan, name)
        model = load_model(name, self.weights, self.device)
        frames = self.settings()[0].session_frames
        one = " with one session at its longest"
        _, first_line = promise_memory(model, name, [self.plan], one, frames=frames)
        if first_line:
            print(first_line, flush=True)
        return model

    @property
    def budget(self) -> int | None:
        return None if self.memory_gb is None else int(1e9 * self.memory_gb)

    def settings(self) -> tuple[Limits, int]:
        """The limits and the chunks between two snapshots, as --set changes them."""
        from tachyscope.serve.engine import SNAPSHOT_CHUNKS
        from tachyscope.serve.limits import Limits

        known = {field.name: field.default for field in fields(Limits)}
        known["snapshot_chunks"] = SNAPSHOT_CHUNKS
        given: dict[str, Any] = {}
        for word in self.set:
            name, _, value = word.partition("=")
            if name not in known:
                raise TachyscopeError(f"no --set {shown(word)}; there are: {', '.join(known)}")
            read = number if isinstance(known[name], float) else whole
            given[name] = read(value, f"--set {name}")
        if "session_frames" in given:
            check("frames", given["session_frames"], "--set session_frames")
        chunks = check("frames", given.pop("snapshot_chunks", SNAPSHOT_CHUNKS), "snapshot_chunks")
        return Limits(**given), chunks


@dataclass(frozen=True, kw_only=True)
class Play(_Server):
    """Walk through a world in the browser: starts a local server and opens its page."""

    model: str = option("atrium-world", MODEL, positional=True)
    first: PathText | None = option(
        None, "An image that sessions begin with, in models that begin with one."
    )
    page: bool = option(True, "Open the page; the address is printed anyway.")

    def run(self, command: str) -> None:
        limits, chunks = self.settings()
        model = self.load(self.model)
        if self.first is not None:
            from tachyscope.io.video import read_frames

            model.opening = fit_first(read_frames(self.first), model.size)
        from tachyscope.serve.server import Endpoint, run

        run(
            model, self.model, plan=self.plan, endpoint=Endpoint(port=self.port),
            budget=self.budget, limits=limits, snapshot_chunks=chunks, open_page=self.page,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Serve(_Server):
    """Serve a model over HTTP: sessions over a WebSocket, videos in OpenAI's shape, the page."""

    model: str = required(MODEL, positional=True)
    host: str = option("127.0.0.1", "The address to listen on; any but this needs --token-file.")
    token_file: Path | None = option(None, "A file of bearer tokens, one a line.")
    origin: tuple[str, ...] = option(
        (), "Another site whose pages may connect, as https://example.org; may be given several."
    )
    state: str | None = option(
        None,
        "Folder or fsspec URL for snapshots, from which sessions resume after a restart; left out, "
        "a folder that is removed when the server ends.",
    )
    replicas: str | None = option(
        None,
        "Replicas of the model by Ray Serve, which needs --state and the extra ray; 2:4 lets Ray "
        "add and remove some by reserved bytes.",
    )

    def run(self, command: str) -> None:
        from tachyscope.serve.security import read_tokens
        from tachyscope.serve.server import Endpoint, run

        tokens = () if self.token_file is None else read_tokens(self.token_file)
        endpoint = Endpoint(self.host, self.port, tokens, self.origin)
        limits, chunks = self.settings()
        if self.replicas is not None:
            self._run_replicas(self.replicas, endpoint, limits, chunks)
            return
        model = self.load(self.model)
        run(
            model, self.model, plan=self.plan, endpoint=endpoint, budget=self.budget,
            state=self.state, limits=limits, snapshot_chunks=chunks,
        )  # fmt: skip

    def _run_replicas(self, replicas: str, endpoint: Endpoint, limits: Limits, chunks: int) -> None:
        low, _, high = replicas.partition(":")
        least = whole(low, "`replicas`")
        most = whole(high, "`replicas`") if high else least
        if not 1 <= least <= most:
            raise TachyscopeError(
                f"--replicas is N, or LEAST:MOST from 1 on, got {shown(replicas)}: try 2:4"
            )
        if find_spec("ray") is None:
            raise TachyscopeError(
                "--replicas needs packages that are not installed: pip install -e '.[ray]'"
            )
        if self.state is None:
            raise TachyscopeError("--replicas share --state, got none: give a path they all reach")
        from tachyscope.serve.ray.ingress import run
        from tachyscope.serve.ray.sessions import Settings

        check_download(self.model, self.weights, self.device)
        path, beside = read_weights(self.weights)
        if beside:
            raise TachyscopeError(
                f"--replicas load a checkpoint alone, got {', '.join(beside)} too: merge it first"
            )
        settings = Settings(
            self.model, self.state, self.plan, path, self.device, dtype_of(self.device),
            self.budget, chunks, limits,
        )  # fmt: skip
        run(settings, endpoint, least, most)
