"""Seeded inputs through the command line, each in a forked child with limits; what went wrong.

`python tests/fuzz.py --count 200 --seed 7` prints one line a finding and a summary as JSON.
A case is a function of its number and the seed alone, so `--only N` runs one again and shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toys

# a command that is right and short (inspect of a trained model, one clip) takes up to 30 s on a slow core
SECONDS, BYTES = 90, 2 * 2**30
WALL = 4 * SECONDS  # a loaded machine is slow, but nothing may wait for ever
LONGEST = 1_100  # letters of a line
# codes of a command that ended by itself: done, or a fault of what was given
ENDED = (0, 2)


@dataclass
class Case:
    """A command line, or a call, and how its folder is laid out before."""

    words: list[str] = field(default_factory=list)
    prepare: Callable[[Path], None] = lambda folder: None
    call: Callable[[], object] | None = None
    about: str = ""

    def __str__(self) -> str:
        told = " ".join(repr(word[:80]) for word in self.words)
        return f"{self.about} {told}".strip()


@dataclass
class Outcome:
    """What a child did."""

    code: int  # of the process; -N for signal N
    out: str
    err: str
    left: list[str]  # files that were not there before
    cpu: float
    wall: float
    grown: int  # bytes


def judge(outcome: Outcome, seconds: float = SECONDS, most: int = BYTES) -> list[str]:
    """What is wrong with how a case ended; nothing if it ended as a command should."""
    found = []
    lines = [x for x in outcome.err.splitlines() if not x.startswith("tachyscope: note: ")]
    if "Traceback (most recent" in outcome.err + outcome.out:
        found.append("a traceback")
    if outcome.cpu > seconds or outcome.code == -signal.SIGXCPU:
        found.append(f"took {outcome.cpu:.0f} s of CPU")
    elif outcome.code == -signal.SIGKILL:
        found.append(f"did not end within {outcome.wall:.0f} s")
    elif outcome.code not in ENDED:
        found.append(f"ended with {outcome.code}")
    if outcome.grown > most:
        found.append(f"took {outcome.grown / 1e9:.1f} GB")
    # what is asked for here is small or beyond its bounds: no memory should be tried for it
    if (
        "the memory is not enough" in outcome.err
        or "more than the memory that is left" in outcome.err
    ):
        found.append("ran out of its memory")
    if outcome.code == 2:
        if len(lines) != 1 or not lines[0].startswith("tachyscope: "):
            found.append(f"told its fault in {len(lines)} lines")
        elif len(lines[0]) > LONGEST or max(map(len, lines[0].split())) > 220:
            found.append(f"told its fault in {len(lines[0])} letters")
        elif re.search(r"`\w+`", lines[0]):
            found.append("did not name an option as it is typed")
        if outcome.left:
            found.append(f"left {outcome.left[:3]} after a fault")
    if any(name.endswith(".part") for name in outcome.left):
        found.append("left a part of a file")
    return found


# ---------------------------------------------------------------- running


def run(case: Case, seconds: float = SECONDS, most: int = BYTES) -> Outcome:
    """A case in a child of its own."""
    with _folder(case) as folder:
        pid, begun = _start(case, folder, seconds, most), time.monotonic()
        while True:
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                return _outcome(folder, status, used, begun)
            if time.monotonic() - begun > max(WALL, 6 * seconds):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def run_all(cases: Iterator[tuple[int, Case]], jobs: int) -> Iterator[tuple[int, Case, Outcome]]:
    """Cases, so many at a time."""
    running: dict[int, tuple[int, Case, Any, float]] = {}
    waiting = True
    while waiting or running:
        while waiting and len(running) < jobs:
            try:
                number, case = next(cases)
            except StopIteration:
                waiting = False
                break
            folder = _folder(case)
            place = folder.__enter__()
            running[_start(case, place, SECONDS, BYTES)] = (
                number,
                case,
                (folder, place),
                time.monotonic(),
            )
        for pid, (number, case, (folder, place), begun) in list(running.items()):
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                yield number, case, _outcome(place, status, used, begun)
                folder.__exit__(None, None, None)
                del running[pid]
            elif time.monotonic() - begun > WALL:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


@contextmanager
def _folder(case: Case) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        (folder / "here").mkdir()
        case.prepare(folder / "here")
        (folder / "before").write_text("\n".join(_files(folder / "here")))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    return sorted(
        os.fsencode(os.path.relpath(os.path.join(top, name), folder)).decode(
            errors="backslashreplace"
        )
        for top, _, names in os.walk(folder)
        for name in names
    )


def _start(case: Case, folder: Path, seconds: float, most: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
        os.chdir(folder / "here")
        (folder / "base").write_text(str(_resident()))
        spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit = int(spent + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        resource.setrlimit(resource.RLIMIT_AS, (_addresses() + most,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from tachyscope.cli import main
        from tachyscope.io.process import run_command

        code = main(case.words) if case.call is None else run_command(case.call)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _outcome(folder: Path, status: int, used: Any, begun: float) -> Outcome:
    before = (folder / "before").read_text().splitlines()
    base = int((folder / "base").read_text()) if (folder / "base").exists() else 0
    out, err = ((folder / name).read_text(errors="replace") for name in ("out", "err"))
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        out=out,
        err=err,
        left=[name for name in _files(folder / "here") if name not in before],
        cpu=used.ru_utime + used.ru_stime,
        wall=time.monotonic() - begun,
        grown=max(0, 1024 * used.ru_maxrss - base),
    )


def _resident() -> int:
    return _status("VmRSS")


def _addresses() -> int:
    return _status("VmSize")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0


# ---------------------------------------------------------------- making cases

WHOLES = ["0", "-1", "1.5", "0x10", "1e3", "1_000", "", "nan", "inf", "-0", "٣", "9" * 30, "1000001",
          "1000000000", "99999999999999999999", "two", " 3", "--", "9" * 5000]  # fmt: skip
TEXTS = ["", " ", "x" * 5_000, "é…", "caf\udce9", "\x1b[31m", "a\nb", "%s%n", "'\"", "=", ",", ":", "-", "{}", "𝕏" * 100,
         "a\0b", "x " * 5_000, "../..", "/", "~nouser/x", "null", "y" * 100_000]  # fmt: skip
PATHS = ["", ".", "..", "/dev/null/x", "a\0b", "x" * 300, "~nouser/x", "file", "file/x", "loop", "caf\udce9", "/proc/x",
         "/dev/full", "link", "folder", "y" * 5_000, "/", "new/deep/one"]  # fmt: skip
SIZES = [
    "32x48",
    "0x0",
    "-16x16",
    "63x96",
    "big",
    "99999x99999",
    "16384x16384",
    "32x",
    "x",
    "32x48x3",
    "1e3x16",
    "",
]
PLANS = ["dense", "fast", "balanced", "lossless", "stock", "fastcar", "fast-ar", "magic", "", "FAST", "dense dense",
         "fast fast=1"]  # fmt: skip
NAMES = ["toy-chunks", "toy-tokens", "atrium-world", "atrium-tokens", "wan_causal", "vila_u", "self-forcing", "magic", "",
         "toy-chunks\0", "TOY-CHUNKS"]  # fmt: skip


def lay_out(folder: Path) -> None:
    """What odd paths lead to."""
    (folder / "file").write_text("mine")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "link").symlink_to("file")


def make(number: int, seed: int, shared: Shared) -> Case:
    """The case of that number."""
    rng = random.Random(f"{seed}:{number}")
    kinds = {
        of_options: 32,
        of_plans: 22,
        of_configs: 16,
        of_tensors: 14,
        of_paths: 8,
        of_states: 8,
    }
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    case = kind(rng, shared)
    case.about = case.about or kind.__name__
    return case


@dataclass
class Shared:
    """What children need and share: folders of small models, a session's state."""

    wan: Path
    vila: Path
    sessions: dict[str, Any]


def of_options(rng: random.Random, shared: Shared) -> Case:
    """A verb with some of its options, good and bad."""
    verb = rng.choice(["generate"] * 5 + ["compare", "inspect", "bench", "fit", "list", "doctor",
                       "conjure"])  # fmt: skip
    model = rng.choice(["toy-chunks"] * 5 + ["toy-tokens"] * 3 + NAMES)
    video = {
        "--prompt": ["a red room", "@file", "1: a blue room", "2:", "x: y", ": ", "9" * 12 + ": x",
                     "3: @file", *TEXTS],
        "--actions": ["w q", "w*2", "w*999999", "jump", "w*999999 " * 500, *TEXTS],
        "--world": ["1", "1:2", "1:2001", "1:", ":", "1294967295", "1294967296", *WHOLES],
        "--frames": ["1", "2", "3", *WHOLES],
        "--size": SIZES,
        "--weights": ["random", "file", "lora=file", "lora_alpha=1", "lora_alpha=nan", "decoder=file",
                      "decoder_check=x", "decoder_bands=0", "=", *PATHS],
        "--device": ["cpu", "cuda", "cuda:99", "meta", "gpu", ""],
    }  # fmt: skip
    seed = {"--seed": ["1", str(2**63), *WHOLES]}
    plan = {"--plan": ["cache=window:budget=6f", "attention=ann:read=0.5", "magic", "text=none",
                       "replay=every_k", *TEXTS]}  # fmt: skip
    first = {"--first": ["file", "http://127.0.0.1:9/x.png", "pipe:0", *PATHS]}
    of_verb: dict[str, dict[str, list[Any]]] = {
        "generate": video | seed | plan | first,
        "compare": video | seed | {"--plans": ["dense", "fast;magic", ";", *TEXTS]},
        "inspect": video | plan | first,
        "bench": {
            "--plans": ["dense", "fast;magic", ";", ";" * 5000, "dense;" * 500, *TEXTS],
            "--frames": ["1", "2", *WHOLES],
            "--at": ["3", "0", "9,x", "999999999", ",".join(["3"] * 500), *WHOLES],
        },
        "fit": {
            "--plan": PLANS,
            "--frames": ["1", "48", "1000000", *WHOLES],
            "--size": SIZES,
            "--vram": ["24GB", "0.001", *WHOLES],
            "--ram": ["32GB", "9MiB", *WHOLES],
            "--prompt": TEXTS,
            "--weights": PATHS,
            "--device": ["cpu", "tpu"],
        },
        "list": {"--json": PATHS},
        "doctor": {"--json": ["", "file/x"]},
        "conjure": {},
    }
    words = verb.split()
    if verb in ("generate", "compare", "inspect", "fit"):
        words.append(model)
    if verb == "list":
        words += rng.choice([[], ["cache"], ["merge"], ["moons"], [""]])
    known = of_verb[verb]
    given = rng.sample(list(known), min(len(known), rng.randint(0, 3)))
    # these begin minutes of work unless something is wrong
    must = {"doctor": "--json"}.get(verb)
    if must and must not in given:
        given.append(must)
    for option in given:
        value = rng.choice(known[option])
        words += [option] if value is None else [option, value]
    if verb in ("generate", "compare", "inspect"):
        words += ["--out", "out"]
        if "--frames" not in given:
            words += ["--frames", "2"]
    if verb == "bench":
        words += ["--rounds", rng.choice(["1", "1", "0", "x"])]
        if "--frames" not in given:
            words += ["--frames", "2"]
    if rng.random() < 0.1:
        words.insert(
            rng.randint(0, len(words)),
            rng.choice([*TEXTS, "--nope", "--", "--frames", "extra", "-h"]),
        )
    return Case(words, lay_out)


def of_plans(rng: random.Random, shared: Shared) -> Case:
    """A plan of some parts, each a policy with some settings."""
    from tachyscope.core.policy import QUESTIONS, policies, settings

    numbers = ["0", "1", "2", "0.5", "-1", "1e30", "nan", "inf", "none", "", "99999999999999999999", "999999999", "0.001",
               "4096", "x", "1" * 5000]  # fmt: skip
    words = rng.choices(PLANS, k=rng.choice([0, 1, 1, 1, 2]))
    for part in rng.sample(list(QUESTIONS), rng.randint(0, 3)):
        known = policies(part)
        name = rng.choice([*known, *known, "magic", "none"])
        keys = list(settings(known[name])) if name in known else []
        pairs = []
        for key in rng.sample(keys, min(len(keys), rng.randint(0, 3))):
            good = [
                "true",
                "newest",
                "shared",
                "int8",
                "lsh",
                "6f",
                "8f",
                "0f",
                "999999999f",
                "-1f",
            ]
            pairs.append(f"{key}={rng.choice([*numbers, *good])}")
        if rng.random() < 0.1:
            pairs.append(rng.choice(["magic=1", "=", ",", "sink", "budget=6f=6f", "x" * 3000]))
        words.append(f"{part}={name}" + (":" + ",".join(pairs) if pairs else ""))
    if rng.random() < 0.1:
        words.append(rng.choice([*TEXTS, "cache=", "=dense", "magic=dense", "cache:window"]))
    model = rng.choice(["toy-chunks", "toy-chunks", "toy-tokens"])
    frames = rng.choice(["1", "2", "9"]) if model == "toy-chunks" else rng.choice(["1", "2"])
    verb = rng.choice(["generate"] * 6 + ["fit"])
    run = ["--out", "out"] if verb == "generate" else []
    return Case([*verb.split(), model, "--plan", " ".join(words), "--frames", frames, *run])


def mutated(rng: random.Random, value: Any) -> Any:
    """A JSON value with one thing in it changed."""
    odd = [None, True, False, 0, -1, 1, 2, 3.5, 10**9, 10**18, 10**30, 1e30, float("inf"), float("nan"), "", "x", "x" * 10_000,
           [], [0], [10**9] * 3, {}, {"a": {}}, 10**4000]  # fmt: skip
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        change = rng.random()
        if change < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if change < 0.15:
            return value | {
                rng.choice(["", "x", "dim", "__class__", "tachyscope"]): rng.choice(odd)
            }
        return value | {key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.5:
        i = rng.randrange(len(value))
        return [*value[:i], mutated(rng, value[i]), *value[i + 1 :]]
    return rng.choice(odd)


def of_configs(rng: random.Random, shared: Shared) -> Case:
    """A small model whose config.json is not what it should be."""
    kind = rng.choice(["wan_causal", "wan_causal", "vila_u"])
    source = shared.wan if kind == "wan_causal" else shared.vila
    parts = [""] if kind == "wan_causal" else ["", "llm", "vision_tower", "mm_projector"]
    file = Path(rng.choice(parts)) / "config.json"
    whole = json.loads((source / file).read_text())
    text: str | bytes
    how = rng.random()
    if how < 0.75:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            whole = mutated(rng, whole)
        text = json.dumps(whole)
    elif how < 0.85:
        good = json.dumps(whole)
        at = rng.randrange(len(good))
        text = (
            good[:at]
            + rng.choice(["", "[", "}", "\x00", "é", '"', "9" * 5000, "1e999"])
            + good[at + 1 :]
        )
    else:
        text = rng.choice(
            [
                "",
                "null",
                "[]",
                "3",
                "[" * 100_000,
                '{"a":' * 50_000,
                "{",
                b"\xff\xfe",
                "1" * 10_000,
                "NaN",
            ]
        )

    def prepare(folder: Path) -> None:
        shutil.copytree(source, folder / "model")
        data = text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
        (folder / "model" / file).write_bytes(data)

    return Case(["generate", kind, "--weights", "model", "--frames", "1", "--out", "out"], prepare)


def of_tensors(rng: random.Random, shared: Shared) -> Case:
    """A checkpoint, an index, a LoRA or an embedded prompt that is not what it should be."""
    import torch
    from safetensors.torch import load_file, save_file

    how = rng.choice(["bytes", "bytes", "tensors", "tensors", "index", "prompt", "lora", "pickle"])
    kind = (
        rng.choice(["wan_causal", "wan_causal", "vila_u"])
        if how in ("bytes", "tensors")
        else "wan_causal"
    )
    source = shared.wan if kind == "wan_causal" else shared.vila
    files = sorted(str(path.relative_to(source)) for path in source.rglob("*.safetensors"))
    file, pick = rng.choice(files), rng.random()
    state = random.Random(rng.random())
    words = ["generate", kind, "--weights", "model", "--frames", "1", "--out", "out"]

    def odd_tensor() -> torch.Tensor:
        shape = state.choice(
            [(), (0,), (1,), (3, 24), (1, 3, 24), (64, 24), (4, 4), (2, 3, 4, 5), (10_000,)]
        )
        made = torch.ones(shape)
        if made.numel():
            made.view(-1)[0] = state.choice([0.0, 1.0, float("nan"), float("inf"), 1e30])
        return made.to(state.choice([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool,
                                     torch.complex64, torch.uint8, torch.float64]))  # fmt: skip

    def change_bytes(folder: Path) -> None:
        path = folder / "model" / file
        data = bytearray(path.read_bytes())
        if pick < 0.3:
            data = data[: state.randrange(len(data))]
        elif pick < 0.6:
            for _ in range(state.choice([1, 8, 64])):
                data[state.randrange(min(len(data), 4000))] = state.randrange(256)
        elif pick < 0.8:
            data[:8] = struct.pack("<Q", state.choice([0, 1, 2**32, 2**63, 2**64 - 1, len(data)]))
        else:
            data = bytearray(
                state.choice([b"", b"\0" * 100, b"PK\x03\x04", b"\x80\x04.", bytes(data) * 2])
            )
        path.write_bytes(bytes(data))

    def change_tensors(folder: Path) -> None:
        path = folder / "model" / file
        tensors = load_file(path)
        name = state.choice(sorted(tensors))
        if pick < 0.2:
            del tensors[name]
        elif pick < 0.4:
            tensors[
                state.choice(["x", "", "blocks.9.x", "model." + name, name + name, "x" * 5000])
            ] = odd_tensor()
        else:
            tensors[name] = odd_tensor()
        save_file(tensors, path)

    def change_index(folder: Path) -> None:
        path = folder / "model" / "diffusion_pytorch_model.safetensors.index.json"
        inside = state.choice([path.name, "", ".", "/etc/passwd", "../model", "none.safetensors", 3, None, [], {},
                               "diffusion_pytorch_model.safetensors", "x" * 5000, "a\0b.pt"])  # fmt: skip
        whole = state.choice(
            [{"weight_map": {"w": inside}}, {"weight_map": inside}, {"w": inside}, [], inside]
        )
        path.write_text(json.dumps(whole))

    def change_pickle(folder: Path) -> None:
        value = state.choice([{}, [], 3, "x", {"model": 3}, {"generator": {"w": odd_tensor()}}, {3: odd_tensor()},
                              {"w": odd_tensor().to_sparse()}, {"model": {}}, {"w": [odd_tensor()]}, odd_tensor()])  # fmt: skip
        if pick < 0.5:
            torch.save(value, folder / "x.pt")
        else:
            (folder / "x.pt").write_bytes(
                pickle.dumps(Runs() if pick < 0.75 else 3) + b"x" * state.randrange(3)
            )

    def extra_file(folder: Path) -> None:
        name = state.choice(
            ["context", "blocks.0.ffn.0.lora_A.weight", "blocks.0.ffn.0.alpha", "x"]
        )
        if pick < 0.3:
            torch.save(
                {name: odd_tensor().to_sparse() if pick < 0.1 else odd_tensor()}, folder / "x.pt"
            )
        else:
            save_file({name: odd_tensor()}, folder / "x.pt")
            shutil.move(folder / "x.pt", folder / "x.safetensors")

    changes = {
        "bytes": change_bytes,
        "tensors": change_tensors,
        "index": change_index,
        "pickle": change_pickle,
    }
    change = changes.get(how, extra_file)
    given = "x.pt" if pick < 0.3 else "x.safetensors"
    if how == "prompt":
        words += ["--prompt", f"@{given}"]
    if how == "lora":
        words += ["--weights", f"lora={given}"]
    if how == "pickle":
        words[3] = "x.pt"

    def prepare(folder: Path) -> None:
        shutil.copytree(source, folder / "model")
        change(folder)

    return Case(words, prepare, about=f"of_tensors {how}")


class Runs:
    """Pickled, it is a call, which would leave a file."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def of_paths(rng: random.Random, shared: Shared) -> Case:
    """Places to write to that cannot be, or must not be, written."""
    option = rng.choice(["--out", "--json"])
    words = (
        ["list"]
        if option == "--json" and rng.random() < 0.8
        else ["generate", "toy-chunks", "--frames", "1"]
    )
    words += [
        option,
        rng.choice(
            [*PATHS, "-", "/dev/null", "/dev/stdout", "/dev/stderr", "fifo/x", "read-only/x"]
        ),
    ]
    if words[0] == "generate" and option == "--json":
        words[-2:] = ["--out", "out"]

    def prepare(folder: Path) -> None:
        lay_out(folder)
        os.mkfifo(folder / "fifo")
        (folder / "read-only").mkdir(mode=0o500)

    return Case(words, prepare)


def of_states(rng: random.Random, shared: Shared) -> Case:
    """A session's state that was changed, then taken up, then gone on with."""
    import torch

    name = rng.choice(sorted(shared.sessions))
    model, session, state = shared.sessions[name]
    state = dict(state)
    key, pick = rng.choice(sorted(state)), rng.random()
    if pick < 0.2:
        del state[key]
    elif pick < 0.4:
        x = state[key]
        odd = [
            x.flatten()[:1],
            x[:0] if x.dim() else x,
            x.to(torch.float64),
            x[None],
            torch.zeros(3),
            x.to("meta"),
        ]
        state[key] = rng.choice(odd)
    elif pick < 0.6 and state[key].is_floating_point():
        state[key] = torch.full_like(
            state[key], rng.choice([float("nan"), float("inf"), 0.0, 1e30])
        )
    elif pick < 0.8:
        text = bytearray(bytes(state["meta"].tolist()))
        text[rng.randrange(len(text))] = rng.randrange(256)
        state["meta"] = torch.frombuffer(text, dtype=torch.uint8).clone()
    else:
        meta = json.loads(bytes(state["meta"].tolist()))
        text = json.dumps(mutated(rng, meta), skipkeys=True).encode()
        state["meta"] = torch.frombuffer(bytearray(text), dtype=torch.uint8).clone()

    def call() -> None:
        import tachyscope

        session.restore(state)
        for _ in tachyscope.rollout(model, frames=1, stream=tachyscope.Stream(model, session)):
            pass

    return Case(call=call, about=f"of_states {name} {key} {pick:.2f}")


@contextmanager
def shared_parts() -> Iterator[Shared]:
    """Small models on disk, and a session's state of each kind, made once for all children."""
    import torch

    torch.set_num_threads(1)
    # what verbs import, so that children need not
    import tachyscope
    import tachyscope.cli.app
    import tachyscope.io.tables
    import tachyscope.io.video
    import tachyscope.measure.compare
    import tachyscope.measure.inspection
    import tachyscope.measure.progress
    import tachyscope.memory.predict
    from tachyscope.models.toys import toy_chunks, toy_tokens
    from tachyscope.models.vila_u.model import save_vila
    from tachyscope.models.wan.loading import save_wan

    with tempfile.TemporaryDirectory(prefix="fuzz-shared-") as folder:
        wan, vila = Path(folder) / "wan", Path(folder) / "vila"
        models = {"toy-chunks": toy_chunks(), "toy-tokens": toy_tokens()}
        save_wan(models["toy-chunks"], wan)
        save_vila(models["toy-tokens"], vila)
        sessions = {}
        for name, model in models.items():
            session = toys.open_session(model, "fast", prompt="a", seed=1)
            list(tachyscope.rollout(model, frames=2, stream=tachyscope.Stream(model, session)))
            sessions[name] = (model, session, session.state())
        yield Shared(wan, vila, sessions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", type=int, help="one case, shown whole")
    args = parser.parse_args()
    begun = time.monotonic()
    with shared_parts() as shared:
        if args.only is not None:
            case = make(args.only, args.seed, shared)
            print(case)
            found = run(case)
            print(found, judge(found), sep="\n")
            return 0
        cases = ((number, make(number, args.seed, shared)) for number in range(args.count))
        wrong, codes, slowest = [], dict[int, int](), (0.0, 0)
        for number, case, outcome in run_all(cases, args.jobs):
            codes[outcome.code] = codes.get(outcome.code, 0) + 1
            slowest = max(slowest, (outcome.cpu, number))
            if problems := judge(outcome):
                wrong.append({"case": number, "what": str(case), "problems": problems})
                last = outcome.err.strip().splitlines()[-1:] or [""]
                print(f"{number}: {case}: {', '.join(problems)}: {last[0][:300]}", flush=True)
    ended = {"count": args.count, "seed": args.seed, "codes": codes, "slowest": slowest,
             "seconds": round(time.monotonic() - begun, 1), "findings": wrong}  # fmt: skip
    print(json.dumps(ended))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
