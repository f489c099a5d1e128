"""What one large GPU has yet to measure, part after part, over runs of a bounded time.

    python lab/scripts/run_h200.py list                           # parts and their seconds
    python lab/scripts/run_h200.py carry [--authors CLONE]        # fill .carry/
    python3 lab/scripts/run_h200.py run --out out/h200 --seconds 570 --tar h200.tar.gz
    python lab/scripts/run_h200.py run --out DIR --small          # tiny forms, on a CPU

For a machine without network that has Python 3.12, torch, Triton, transformers, numpy, pillow and
pytest: copy the working tree to it with the ignored folder .carry/, which `carry` fills with

    packages.tar.xz  what the parts import beside torch: see PACKAGES. PyAV is left out (35 MB); a
                     stand-in that can be imported serves where it is missing.
    old.tar.xz       the package of an older commit, to be timed beside this one
    authors.tar.xz   the authors' Self-Forcing code, from a clone of theirs

Each part writes OUT/PART.json (or a folder OUT/PART), which `tachyscope-lab record` takes, row by
row, so that a part that is stopped keeps what it had. A part begins only if the seconds that it may
take are left, and a fault in one leaves the others. OUT/PART.end says how it ended; a part that has
one is run again only where --only names it. So the next run with the same OUT goes on with what is
left. --tar is written after every part, in pieces of 15 MiB where it is larger.
"""

from __future__ import annotations

import argparse
import io
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRY = ROOT / ".carry"
PIECE = 15 << 20  # bytes of one file of --tar
OLD = "08b3aaf"  # before the third edition
# what pyproject.toml names is brought in its version; what that needs, where the machine has none
PACKAGES = {
    "cyclopts": "every command",
    "rich": "every command",
    "starlette": "the server",
    "uvicorn": "the server",
    "websockets": "the server",
    "prometheus_client": "the server",
    "python-multipart": "the server",
    "diffusers": "Wan's VAE, the authors' code",
    "hypothesis": "tests",
}
NEEDED = (
    "attrs", "docstring_parser", "rich-rst", "markdown-it-py", "mdurl", "pygments", "anyio",
    "sniffio", "idna", "h11", "click", "sortedcontainers", "importlib_metadata", "zipp", "requests",
    "urllib3", "certifi", "charset_normalizer", "ftfy", "wcwidth", "einops", "easydict",
)  # fmt: skip
STAND_IN = '''"""Stands in for PyAV, which is not here: it can be imported, and not used."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    class Missing(Exception):
        def __init__(self, *args, **kwargs):
            raise ModuleNotFoundError("PyAV is not on this machine")

    return Missing
'''
AV = ("av/__init__", "av/container", "av/video/__init__", "av/video/frame", "av/video/reformatter",
      "av/video/stream")  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What is measured together; its commands run at the same time."""

    name: str
    seconds: int  # that it may take; it is stopped then, and not begun where fewer are left
    about: str
    # {out}: OUT/NAME; {folder}: OUT; {kept}: a folder that --tar leaves out; {old}, {authors}: what
    # was carried
    commands: tuple[str, ...]
    small: tuple[str, ...] = field(default=(), kw_only=True)  # the same on a CPU in a minute
    needs: str = field(default="", kw_only=True)  # of what was carried: old or authors


LAB = "-m tachyscope_lab"
TURNS = "lab/scripts/bench_turns.py --out {out}.json"
STUDY = "lab/scripts/study_past.py --out {out} --groups named --precisions native,fp8"
RIVALS = f"{LAB} bench rivals --out {{out}}/long --rows pose --paces 1"
ROLLOUT = f"{LAB} bench wan --json {{out}}.json --rollout"
CAMERA, FP8, TINY = "--model wan_1.3b_camera", "--dtype fp8", "--decode --decoder random-tiny"
TIMED = "--lengths 60 --rounds 4"
SMALL = "--model toy-chunks --device cpu --dtype float32 --size 16x16"
SMALL_TIMED = f"wan {SMALL} --rows fast --lengths 6 --rounds 2"
# plans of the older commit; its `fast` and others did not weigh the past
BANK = "cache=bank:resident=21f,host=int8 text=pads attention=ann:read"
BEFORE = f"{BANK}=0.4;headline;stock;{BANK}=1;cache=dedup:budget=21f,newest=3 " \
    "attention=ann:read=0.3 text=pads"  # fmt: skip
SEVEN = "tokens --rows dense --weights bf16 --batch 1 --rounds 2 --no-peer --seconds 60"


def turns(**runs: str) -> str:
    """What bench_turns.py is told: a run a name."""
    return " ".join(["", *(f"--run {shlex.quote(f'{name}={x}')}" for name, x in runs.items())])


def in_precisions(rows: str) -> str:
    """Chunks in bfloat16 and in float8, by turns."""
    words = f"wan {CAMERA} {TIMED} --rows '{rows}'"
    coded = {name: f"{words} --dtype {name}" for name in ("fp8", "fp8_linears", "fp8_attention")}
    return TURNS + turns(bf16=words, **coded)


# in the order of what a second of the GPU buys
PARTS = (
    Part(
        "tests", 240, "scripts/gpu: kernels equal their definitions, in under four minutes",
        ("scripts/gpu",),
    ),
    Part(
        "kernels", 200, "float8 attention and linears: definitions, TF/s beside bfloat16",
        ("lab/scripts/bench_fp8.py --out {out}.json",),
    ),
    Part(
        "chunks", 330, "a chunk by plan in bfloat16 and float8, by turns; peaks as predicted",
        (in_precisions("stock;pose;fast;balanced;live"),),
        small=(TURNS + turns(one=SMALL_TIMED, two=SMALL_TIMED),),
    ),
    Part(
        "regimes", 420, "16 rooms, six regimes, bfloat16 and float8; `pose` over 1,000 frames",
        (
            f"{STUDY} --device cuda --jobs 9 --minutes 6.5",
            f"{RIVALS} --runs 3 --jobs 2 --seconds 300 --device cuda",
        ),
        small=(
            f"{STUDY} --regimes short --rooms 1",
            f"{RIVALS} --runs 1 --jobs 1 --worlds 1 --frames 24 --long-frames 24",
        ),
    ),
    Part(
        "authors", 130, "the authors' loop, with accelerate, and ours beside it, with pixels",
        ("lab/scripts/bench_authors.py {authors} --out {out}.json",),
        small=("lab/scripts/bench_authors.py {authors} --out {out}.json --device cpu --small "
               "--chunks 10",),
        needs="authors",
    ),
    Part(
        "pixels", 240, "4,800 frames of fast in float8, without and with pixels: flat, p99, peak",
        (f"{ROLLOUT} 4800 {TINY} --rows fast {FP8}",),
        small=(f"{ROLLOUT} 48 --decode --rows fast {SMALL}",),
    ),
    Part(
        "tune_drafts", 130, "7B: which tiles of draft passes by int8 and int4 are fastest",
        ("lab/scripts/tune_decode.py --out {out} --only rates,piece,drafts --jobs 14 "
         "--seconds 75",),
    ),
    Part(
        "drafts", 160, "7B: passes over drafts by bf16, int8, int4; dense's share of a copy",
        ("lab/scripts/tune_decode.py --settings {folder}/tune_drafts -- tokens "
         "--rows dense,draft32 --rounds 2 --no-peer --batch 1 --seconds 140 "
         "--drafts results/drafts.json --out {out}",),
        small=(f"{LAB} bench tokens --device cpu --shape atrium-tokens --rows dense --rounds 1 "
               "--weights float32 --out {out}",),
    ),
    Part(
        "served", 180, "1, 2, 4 and 8 sessions at 480x832 by the server: key to pixel, waits",
        ("lab/scripts/bench_served.py --out {out}.json",),
        small=("lab/scripts/bench_served.py --out {out}.json --model toy-chunks --device cpu "
               "--sessions 1,2 --seconds 2 --warm 2",),
    ),
    Part(
        "trees", 200, "this commit beside the older one, by turns: chunks and peaks",
        (f"{TURNS} --tree old={{old}}" + turns(
            old=f"wan {TIMED} --rows '{BEFORE}'", new=f"wan {TIMED} --rows '{BEFORE}'"),),
        small=(f"{TURNS} --tree old={{old}}" + turns(old=SMALL_TIMED, new=SMALL_TIMED),),
        needs="old",
    ),
    Part(
        "flat", 150, "4,800 frames of `pose`: flat, late blocks, peak as predicted",
        (f"{ROLLOUT} 4800 {CAMERA} --rows pose",),
        small=(f"{ROLLOUT} 24 --rows fast {SMALL}",),
    ),
    Part(
        "trees_tokens", 100, "7B, dense: this commit beside the older one, by turns",
        (f"{TURNS} --tree old={{old}}" + turns(old=SEVEN, new=SEVEN),), needs="old",
    ),
    Part(
        "vae", 130, "pixels by Wan's own VAE beside the next chunk",
        (f"{ROLLOUT} 480 --decode --rows fast {FP8}",),
    ),
    Part(
        "stock_fp8", 90, "stock in float8, with pixels",
        (f"{ROLLOUT} 480 {TINY} --rows stock {FP8}",),
    ),
    Part(
        "memory_12", 90, "1.3B held to 12 GB by the allocator",
        (f"{ROLLOUT} 480 --rows fast --memory-gb 12",),
    ),
    Part(
        "memory_24", 120, "5B in float8 held to 24 GB by the allocator",
        (f"{ROLLOUT} 96 --model wan_5b --size 704x1280 --rows fast {FP8} --memory-gb 24",),
    ),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    carry = verbs.add_parser("carry")
    carry.add_argument("--old", default=OLD, help="a commit; an empty text for none")
    carry.add_argument("--authors", type=Path, help="a clone of their repository")
    run = verbs.add_parser("run")
    run.add_argument("--out", type=Path, required=True, help="a folder that runs share")
    run.add_argument("--seconds", type=float, default=1e9, help="of this run")
    run.add_argument("--only", default="", help="names of parts, separated by commas, in order")
    run.add_argument("--tar", type=Path, help="one file of all that is in OUT")
    run.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    if args.verb == "list":
        for part in PARTS:
            print(f"{part.name:13}{part.seconds:5} s  {part.about}")
        print(f"{'':13}{sum(part.seconds for part in PARTS):5} s")
        return 0
    if args.verb == "carry":
        return fill_carry(CARRY, args.old, args.authors)
    names = [name for name in args.only.split(",") if name] or [part.name for part in PARTS]
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            parser.error(f"no part {name!r}; there are: {', '.join(known)}")
    parts = [known[name] for name in names]
    named = bool(args.only)
    return run_parts(parts, args.out.resolve(), args.seconds, args.tar, args.small, named)


def run_parts(
    parts: Sequence[Part], out: Path, seconds: float, tar: Path | None, small: bool, named: bool
) -> int:
    """Run the parts that are left and fit; 1 where one failed."""
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    carried = unpack(CARRY, out / "carried")
    paths = [ROOT, ROOT / "lab", *filter(None, [carried.get("packages")])]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1",
        # a fresh machine compiles each program once, whichever part needs it
        "TORCHINDUCTOR_CACHE_DIR": str(out / "carried/inductor"),
        "TRITON_CACHE_DIR": str(out / "carried/triton"),
    }  # fmt: skip
    failed = False
    for part in parts:
        left = seconds - (time.monotonic() - begun)
        if not named and (out / f"{part.name}.end").exists():
            continue
        if small and not part.small:
            print(f"{part.name}: needs a GPU", flush=True)
            continue
        if part.needs and part.needs not in carried:
            print(f"{part.name}: .carry/{part.needs}.tar.xz is not there", flush=True)
            continue
        if left < part.seconds:
            print(f"{part.name}: may take {part.seconds} s, {left:.0f} are left", flush=True)
            continue
        places = {"out": out / part.name, "folder": out, "kept": out / "carried"} | carried
        failed |= not run_part(part, places, environment, small)
        if tar is not None:
            pack(out, tar)
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return int(failed)


def run_part(part: Part, places: dict[str, Path], environment: dict[str, str], small: bool) -> bool:
    """Run a part's commands at the same time, each with a log; whether none failed."""
    begun, out = time.monotonic(), places["out"]
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    for number, words in enumerate(part.small if small else part.commands):
        log = out.with_name(f"{part.name}{f'_{number}' if number else ''}.log")
        line = shlex.split(words.format(**places))
        if not line[0].startswith("scripts/"):
            line = [sys.executable, *line]
        with log.open("wb") as file:
            running.append((log, subprocess.Popen(
                line, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )))  # fmt: skip
    how = "ended"
    for _, process in running:
        try:
            if process.wait(max(0.1, begun + part.seconds - time.monotonic())):
                how = "FAILED"
        except subprocess.TimeoutExpired:
            how = "stopped" if how == "ended" else how
        finally:
            end(process)
    out.with_name(f"{part.name}.end").write_text(how + "\n")
    print(f"{part.name}: {how} after {time.monotonic() - begun:.0f} s", flush=True)
    for log, _ in running:
        print("    " + "\n    ".join(log.read_text(errors="replace").splitlines()[-4:]), flush=True)
    return how != "FAILED"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all that it began: first so that it can write, then at once."""
    for number, seconds in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
    process.wait()


def pack(out: Path, file: Path) -> None:
    """One archive of what was measured, put in its place when it is whole; a large one in pieces,
    which `cat` joins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.name != "carried":
                archive.add(path, path.name)
    content = made.getvalue()
    pieces = [content[at : at + PIECE] for at in range(0, len(content), PIECE)]
    names = [file.name]
    if len(pieces) > 1:
        names = [f"{file.name}.{number}" for number in range(len(pieces))]
    for name, piece in zip(names, pieces, strict=True):
        part = file.with_name(f"{name}.part")
        part.write_bytes(piece)
        part.replace(file.with_name(name))
    for old in {file, *file.parent.glob(f"{file.name}.*")} - {file.with_name(x) for x in names}:
        old.unlink(missing_ok=True)


def unpack(carry: Path, place: Path) -> dict[str, Path]:
    """What was carried, unpacked once: folders by name. Packages that the machine has stay its own
    where pyproject.toml does not name them."""
    folders = {}
    place.mkdir(parents=True, exist_ok=True)
    for archive in sorted(carry.glob("*.tar.xz")):
        name = archive.name.removesuffix(".tar.xz")
        folder = folders[name] = place / name
        if folder.exists():
            continue
        with tarfile.open(archive) as held:
            held.extractall(place / f"{name}.part", filter="data")
        (place / f"{name}.part").replace(folder)
    packages = folders.get("packages", place / "packages")
    named = {name.replace("-", "_") for name in PACKAGES}
    for path in sorted(packages.glob("*")):
        if path.name in named or path.suffix or path.name == "av":
            continue
        if find_spec(path.name) is not None:
            shutil.rmtree(path, ignore_errors=True)
    if find_spec("av") is None:
        for module in AV:
            stub = (packages / module).with_suffix(".py")
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.write_text(STAND_IN)
        folders["packages"] = packages
    return folders


def fill_carry(folder: Path, old: str, authors: Path | None) -> int:
    """Fill the ignored folder, and say how large it and the tree are."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        names = [*PACKAGES, *NEEDED]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
             "--target", place, "--python-version", "3.12", "--only-binary=:all:",
             "--constraint", str(ROOT / "constraints.txt"), *names],
            check=True,
        )  # fmt: skip
        files = [path for path in Path(place).rglob("*") if path.is_file()]
        write_archive(folder / "packages.tar.xz", read_files(Path(place), files))
    if old:
        write_archive(folder / "old.tar.xz", tree_of(
            ROOT, old, "tachyscope", ":!tachyscope/weights/atrium-*", ":!tachyscope/weights/*.npz",
        ))  # fmt: skip
    if authors is not None:
        write_archive(folder / "authors.tar.xz", tree_of(
            authors, "HEAD", ":(glob)wan/**/*.py", ":(glob)utils/*.py", ":(glob)pipeline/*.py",
            "LICENSE",
        ))  # fmt: skip
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    tree = sum((ROOT / x).lstat().st_size for x in set(listed.split("\0")) if (ROOT / x).is_file())
    carried = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name, size in ({"the working tree": tree} | carried).items():
        print(f"{size / 2**20:7.2f} MiB  {name}")
    print(f"{(tree + sum(carried.values())) / 2**20:7.2f} MiB")
    return 0


def read_files(folder: Path, files: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for path in sorted(files):
        yield str(path.relative_to(folder)), path.read_bytes()


def tree_of(repository: Path, commit: str, *paths: str) -> Iterator[tuple[str, bytes]]:
    """Files of a commit."""
    words = ["git", "-C", str(repository), "archive", "--format=tar", commit, "--", *paths]
    made = subprocess.run(words, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(made)) as held:
        for one in held:
            file = held.extractfile(one) if one.isfile() else None
            if file is not None:
                yield one.name, file.read()


def write_archive(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    with lzma.open(path, "wb", preset=9) as file, tarfile.open(fileobj=file, mode="w") as made:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            made.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
