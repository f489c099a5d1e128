"""Checkpoint files: read as named tensors, checked against a module, written whole or not."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tachyscope.errors import TachyscopeError
from tachyscope.files import replacing, unwritable

SAFE = (".safetensors", ".sft")
PICKLED = (".pt", ".pth", ".bin")
INDEX = ".index.json"

# trainers save several copies of a model in one file: the averaged one comes first
WRAPPERS = ("generator_ema", "generator", "model", "state_dict")
PREFIXES = ("model.diffusion_model.", "model.", "net.")
SHARDED = "_fsdp_wrapped_module."


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .sft, .pt, .pth or .bin file, or of all that an index lists.

    They stay in the file until used where the format allows. No code in a file is ever run.
    """
    if path.name.endswith(INDEX):
        return _read_shards(path)
    if path.suffix not in SAFE + PICKLED:
        kinds = ", ".join((*SAFE, *PICKLED, INDEX))
        raise TachyscopeError(f"a checkpoint is a {kinds} file, got {path}: give one of these")
    if not path.is_file():
        raise TachyscopeError(f"no checkpoint file {path}: give the path of one that exists")
    return _read_safe(path) if path.suffix in SAFE else _read_pickled(path)


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names they had before trainers and wrappers added to them."""
    bare: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.replace(SHARDED, "")
        for prefix in PREFIXES:
            if short.startswith(prefix):
                short = short.removeprefix(prefix)
                break
        if short in bare:
            raise TachyscopeError(
                f"a checkpoint names each tensor once, got {short!r} twice, with and without "
                f"a prefix: remove one of them"
            )
        bare[short] = tensor
    return bare


def fit(
    module: nn.Module, tensors: Mapping[str, Tensor], where: str, ignore: tuple[str, ...] = ()
) -> None:
    """Copy the tensors into the module, after checking that names, shapes and kinds agree.

    Tensors that the module lacks are passed over where their name begins with one of `ignore`.
    `where` names the source in errors.
    """
    wanted = module.state_dict()
    given = {
        name: tensor
        for name, tensor in tensors.items()
        if name in wanted or not name.startswith(ignore)
    }
    if missing := [name for name in wanted if name not in given]:
        raise TachyscopeError(
            f"{where} must hold the model's {len(wanted)} tensors, it lacks {_some(missing)}: "
            f"give a complete checkpoint of this model, or the configuration it was made with"
        )
    if unexpected := [name for name in given if name not in wanted]:
        raise TachyscopeError(
            f"{where} may hold only the model's {len(wanted)} tensors, it also has "
            f"{_some(unexpected)}: give a checkpoint of this model, or its own configuration"
        )
    wrong = [
        f"{name} is {_kind(given[name])} and must be {_kind(tensor)}"
        for name, tensor in wanted.items()
        if given[name].shape != tensor.shape
        or given[name].is_floating_point() != tensor.is_floating_point()
    ]
    if wrong:
        raise TachyscopeError(
            f"{where} does not fit the model: {_some(wrong)}: "
            f"give the configuration it was made with"
        )
    module.load_state_dict(given, strict=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], under: str | None = None) -> None:
    """Write a .safetensors file, or a .pt file with the tensors in its entry `under`, if given."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if path.suffix in SAFE and under is None:
        _write(path, lambda temporary: save_file(plain, temporary))
    elif path.suffix in PICKLED:
        _write(path, lambda temporary: torch.save({under: plain} if under else plain, temporary))
    else:
        raise TachyscopeError(
            f"tensors are written to {', '.join(SAFE)}, or in an entry to {', '.join(PICKLED)}, "
            f"got {path}: give one of these"
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    if not path.is_file():
        raise TachyscopeError(f"no file {path}: give a folder that has {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise TachyscopeError(
            f"{path} must be JSON, got {_line(fault)}: mend it or get it again"
        ) from None
    if not isinstance(value, dict):
        raise TachyscopeError(
            f"{path} must hold a JSON object, got {type(value).__name__}: mend it or get it again"
        )
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON, for people to read too."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    _write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _read_shards(path: Path) -> dict[str, Tensor]:
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict):
        raise TachyscopeError(f"{path} must have a 'weight_map', it has none: get it again")
    found: dict[str, Tensor] = {}
    for name in sorted({str(value) for value in listed.values()}):
        if Path(name).name != name:
            raise TachyscopeError(
                f"{path} must list files beside it, got {name!r}: put them there and name them so"
            )
        found |= read_tensors(path.with_name(name))
    return found


def _read_safe(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as fault:
        raise _damaged(path, "safetensors", fault) from None


def _read_pickled(path: Path) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            # only the zip container can be mapped; files of before 2020 are a bare pickle
            mapped = file.read(4) == b"PK\x03\x04"
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as fault:
        # torch's own words go on for a page, and advise to run the code
        if "GLOBAL" not in str(fault):
            raise _damaged(path, "a torch checkpoint", EOFError("torn pickle")) from None
        raise TachyscopeError(
            f"{path} may hold only tensors, it has pickled objects whose code was not run: "
            f"save its tensors alone, as .safetensors"
        ) from None
    except Exception as fault:
        # a torn pickle can raise almost anything: KeyError, IndexError, RuntimeError, EOFError
        raise _damaged(path, "a torch checkpoint", fault) from None
    if isinstance(value, dict):
        value = next((value[name] for name in WRAPPERS if name in value), value)
    if not isinstance(value, dict):
        raise TachyscopeError(
            f"{path} must hold a dict of tensors, or one in {', '.join(WRAPPERS)}, "
            f"got {type(value).__name__}: save the model's state_dict()"
        )
    if odd := [str(name) for name, tensor in value.items() if not isinstance(tensor, Tensor)]:
        raise TachyscopeError(
            f"{path} must hold a dict of tensors, or one in {', '.join(WRAPPERS)}, "
            f"got other values in {_some(odd)}: save the model's state_dict()"
        )
    return {str(name): tensor for name, tensor in value.items()}


def _write(path: Path, put: Callable[[Path], object]) -> None:
    with replacing(path) as part:
        try:
            put(part)
        except OSError as fault:
            raise unwritable(path, fault) from None
        except (SafetensorError, RuntimeError) as fault:
            raise TachyscopeError(
                f"{path} could not be written, {_line(fault)}: give tensors that share no memory, "
                f"and a disk with room"
            ) from None


def _damaged(path: Path, kind: str, fault: Exception) -> TachyscopeError:
    return TachyscopeError(
        f"{path} must be {kind}, it is damaged or cut short ({_line(fault)}): get it again"
    )


def _line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0].rstrip(":. ")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _some(names: Iterable[str], shown: int = 3) -> str:
    """The first few names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    return ", ".join(every[:shown]) + more
