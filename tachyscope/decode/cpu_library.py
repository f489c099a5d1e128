"""Builds cpu_step.cpp once a machine, loads it, and reads from its text what it is called with."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from tachyscope.core.errors import TachyscopeError
from tachyscope.core.types import dtype_name
from tachyscope.io.programs import user_folder

SOURCE = Path(__file__).with_name("cpu_step.cpp")
COMPILERS = ("c++", "g++", "clang++")
# sums may be taken in any order; infinities and NaN stay what they are
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math", "-shared", "-fPIC", "-pthread",
)  # fmt: skip


def read_structs(text: str) -> dict[str, Any]:
    """The ctypes of the structs whose size a C++ text checks, by name, in its order."""
    kinds: dict[str, Any] = {"i64": c_int64, "double": c_double}
    for name in re.findall(r"^SAME_SIZE\((\w+)\)", text, re.M):
        (body,) = re.findall(rf"^struct {name} {{(.*?)^}};", text, re.M | re.S)
        fields = []
        for statement in re.sub(r"//.*|\bconst\b", "", body).split(";")[:-1]:
            kind, declared = statement.split(maxsplit=1)
            for one in declared.split(","):
                field, _, count = one.strip(" *").partition("[")
                of = c_void_p if "*" in one else kinds[kind]
                fields.append((field, of * int(count[:-1]) if count else of))
        # without slots a name that is no field would be set and lost
        kinds[name] = type(name, (Structure,), {"_fields_": fields, "__slots__": ()})
    return {name: kind for name, kind in kinds.items() if name not in ("i64", "double")}


def read_enum(text: str, name: str) -> dict[str, int]:
    """The numbers of a C++ text's enum, by its members' names."""
    (body,) = re.findall(rf"^enum {name} : i64 {{(.*?)}};", text, re.M | re.S)
    members = (member.split("=") for member in body.split(","))
    return {member.strip(): int(value) for member, value in members}


TEXT = SOURCE.read_text(encoding="utf-8")
STRUCTS = read_structs(TEXT)
KIND, CODE, RULE = (read_enum(TEXT, name) for name in ("Kind", "Code", "Rule"))
MAX_ROWS = read_enum(TEXT, "Limit")["MAX_ROWS"]  # of a step's batch


def can_compile(dtype: torch.dtype) -> bool:
    """Whether a step can be compiled here for activations of a dtype."""
    return dtype == torch.float32 and find_compiler() is not None


def compile_step(dtype: torch.dtype) -> None:
    """Build the program of a step; raises where that cannot be done."""
    if dtype != torch.float32:
        raise TachyscopeError(
            f"a token's step is compiled for float32 on a CPU, got {dtype_name(dtype)}: load the "
            f"model in float32, and its weights may be bfloat16 or int8 inside"
        )
    library()


def find_compiler() -> str | None:
    """The command of a C++ compiler: $CXX, or one on the path."""
    return os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), None)


@functools.cache
def library() -> Any:
    """The built program; it is built where no process of this machine has done so."""
    folder, compiler = user_folder(), find_compiler()
    if compiler is None or folder is None:
        lacks = "a C++ compiler" if compiler is None else "a cache folder that can be written"
        raise TachyscopeError(
            f"a token's step is compiled by a C++ compiler into ~/.cache/tachyscope, and there is "
            f"no {lacks.removeprefix('a ')}: install g++, or leave `compile` out"
        )
    known = "\n".join([TEXT, compiler, *_flags(), _processor()])
    path = folder / "cpu" / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.so"
    if not path.is_file():
        _build(compiler, path)
    loaded = ctypes.CDLL(str(path))
    loaded.tachyscope_new.argtypes = [POINTER(STRUCTS["Op"]), c_int64]
    loaded.tachyscope_new.restype = c_void_p
    loaded.tachyscope_run.argtypes = [c_void_p, c_void_p, c_int64]
    loaded.tachyscope_free.argtypes = [c_void_p]
    loaded.tachyscope_run.restype = loaded.tachyscope_free.restype = None
    return loaded


def _flags() -> list[str]:
    """What the compiler is given: its options, and the sizes that structs must have."""
    sizes = (f"-DSIZE_OF_{name}={ctypes.sizeof(one)}" for name, one in STRUCTS.items())
    return [*FLAGS, *sizes]


def _build(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        command = [*compiler.split(), *_flags(), "-o", str(out), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                out.replace(path)
                return
            reason = (done.stderr.strip() or "nothing").splitlines()[0][:200]
        except OSError as fault:
            reason = str(fault)
    raise TachyscopeError(
        f"{compiler} could not compile a token's step ({reason}): install g++, or leave out "
        f"`compile`"
    )


def _processor() -> str:
    """What a program made for this machine's processor depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine() + platform.processor()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features", "model")))
    return "\n".join(sorted(set(lines)))
