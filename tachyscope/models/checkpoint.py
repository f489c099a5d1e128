"""Checkpoint files: read named tensors, check them against a module, write them atomically."""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tachyscope.core.errors import TachyscopeError, first_line, is_out_of_memory, shown
from tachyscope.core.limits import JSON_BYTES
from tachyscope.core.types import kind_of
from tachyscope.io.files import replacing, unwritable
from tachyscope.io.machine import memory_of

M = TypeVar("M", bound=nn.Module)

SAFE = (".safetensors", ".sft")
PICKLED = (".pt", ".pth", ".bin")
INDEX = ".index.json"

# trainers save several copies of a model in a file: the averaged one comes first
WRAPPERS = ("generator_ema", "generator", "model", "state_dict", "generator_lora")
PREFIXES = ("model.diffusion_model.", "model.", "net.")
# what FSDP, torch.compile and activation checkpointing put into a module's name
WRAPPED = re.compile(r"(?<![^.])(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
# torch's errors for a pickle that calls code, and for one of Python's protocols since 3.8, which it
# does not read
REFUSED = ("GLOBAL", "operand 149")


def read_tensors(path: Path, entry: str = "") -> dict[str, Tensor]:
    """The tensors of a .safetensors, .sft, .pt, .pth or .bin file, or of an index's shards.

    They are mapped from the file if its format allows. No code in a file is run. If a trainer's
    file has several copies of the weights, `entry` is read.
    """
    if path.name.endswith(INDEX):
        return _read_shards(path)
    if path.suffix not in SAFE + PICKLED:
        kinds = ", ".join((*SAFE, *PICKLED, INDEX))
        raise TachyscopeError(f"a checkpoint is a {kinds} file, got {path}: give one of these")
    if not path.is_file():
        raise TachyscopeError(f"no checkpoint file {path}: give the path of one that exists")
    return _read_safe(path) if path.suffix in SAFE else _read_pickled(path, entry)


def check_path(option: str, path: Any) -> None:
    """Raise if a file cannot have this path; whoever reads the file says if it is missing."""
    if path is None:
        return
    try:
        Path(path).exists()
    except (TypeError, OSError) as fault:
        why = fault.strerror if isinstance(fault, OSError) else "not a path"
        raise TachyscopeError(
            f"`{option}` must be the path of a file or folder that can be read, got {shown(path)} "
            f"({str(why).lower()}): give another"
        ) from None


def find_weights(folder: Path, names: Sequence[str]) -> Path:
    """The first of these files that is in a folder."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise TachyscopeError(
        f"{folder} must hold one of {', '.join(names)}, it has none: "
        f"copy it from the published checkpoint"
    )


def strip_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names without prefixes of trainers and wrappers."""
    bare: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = unwrapped(name)
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


def unwrapped(name: str) -> str:
    """The name of a tensor or layer without the parts that wrappers insert."""
    return WRAPPED.sub("", name)


def fit(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    where: str,
    ignore: tuple[str, ...] = (),
    assign: bool = False,
) -> None:
    """Copy tensors into a module; raises unless they are `matched` and finite.

    With `assign` they become its parameters, neither copied nor checked for NaN.
    """
    given = matched(module, tensors, where, ignore)
    module.load_state_dict(given, strict=True, assign=assign)
    if not assign:
        check_finite(module, where)


def matched(
    module: nn.Module | Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    where: str,
    ignore: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """The tensors of a module; raises unless names, shapes and kinds of dtype agree.

    Other tensors are allowed if their name begins with one of `ignore`. `where` names the file in
    errors. The module may be on the meta device.
    """
    wanted = module.state_dict() if isinstance(module, nn.Module) else module
    given = {
        name: tensor
        for name, tensor in tensors.items()
        if name in wanted or not name.startswith(ignore)
    }
    if missing := [name for name in wanted if name not in given]:
        raise TachyscopeError(
            f"{where} must hold the model's {len(wanted)} tensors, it lacks {some(missing)}: "
            f"give a complete checkpoint of this model, or the configuration it was made with"
        )
    if unexpected := [name for name in given if name not in wanted]:
        raise TachyscopeError(
            f"{where} may hold only the model's {len(wanted)} tensors, it also has "
            f"{some(unexpected)}: give a checkpoint of this model, or its own configuration"
        )
    wrong = [
        f"{name} is {kind_of(given[name])} and must be {kind_of(tensor)}"
        for name, tensor in wanted.items()
        if given[name].shape != tensor.shape
        or given[name].is_floating_point() != tensor.is_floating_point()
    ]
    if wrong:
        raise TachyscopeError(
            f"{where} does not fit the model: {some(wrong)}: "
            f"give the configuration it was made with"
        )
    return given


def allocate(model: M, device: torch.device | str, where: str) -> M:
    """Move a model from the meta device to another, its weights uninitialised."""
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    limit = memory_of(torch.device(device))
    try:
        # the system may overcommit
        if limit is not None and size > limit:
            raise MemoryError
        return model.to_empty(device=device)
    except (RuntimeError, MemoryError) as fault:
        if not is_out_of_memory(fault):
            raise
        wide = next(model.parameters()).dtype.itemsize > 2
        raise TachyscopeError(
            f"{where}: its weights take {size / 1e9:.1f} GB, more than the memory of {device} has "
            f"left: free some, or {'load it in bfloat16' if wide else 'take a smaller model'}"
        ) from None


def check_finite(module: nn.Module, where: str) -> None:
    """Raise if a weight is NaN or infinite; waits for the device once."""
    held = module.state_dict().items()
    weights = {name: x for name, x in held if x.is_floating_point() and x.numel()}
    if not weights:
        return
    # torch has no minimum of float8
    wide = (x.float() if x.itemsize == 1 else x for x in weights.values())
    edges = torch.stack([torch.stack(x.aminmax()).double() for x in wide])
    finite = edges.isfinite().all(1).tolist()
    if odd := [name for name, right in zip(weights, finite, strict=True) if not right]:
        raise TachyscopeError(
            f"{where} must hold finite numbers, it has NaN or infinity in {some(odd)}: get it "
            f"again, or load it in a wider dtype"
        )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], under: str | None = None) -> None:
    """Write a .safetensors file, or a .pt file, in which the tensors may be an entry `under`."""
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
    return read_mapping(path, "JSON", json.loads)


def read_mapping(
    path: Path,
    form: str,
    parse: Callable[[str], Any],
    faults: tuple[type[Exception], ...] = (ValueError,),
) -> dict[str, Any]:
    """The object in a text file; `faults` are what `parse` raises if the text is not of `form`."""
    if not path.is_file():
        raise TachyscopeError(f"no file {path}: give a folder that has {path.name}")
    if path.stat().st_size > JSON_BYTES:
        raise TachyscopeError(
            f"{path} must be {form} of at most {JSON_BYTES >> 20} MiB, got "
            f"{path.stat().st_size >> 20} MiB: get it again"
        )
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise TachyscopeError(
            f"{path} must be {form} that Python can read, it is nested too deep: get it again"
        ) from None
    except OSError as fault:
        raise _unreadable(path, fault) from None
    except faults as fault:
        raise TachyscopeError(
            f"{path} must be {form}, got {_line(fault)}: mend it or get it again"
        ) from None
    if not isinstance(value, dict):
        raise TachyscopeError(
            f"{path} must hold a {form} object, got {type(value).__name__}: mend it or get it again"
        )
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    _write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _read_shards(path: Path) -> dict[str, Tensor]:
    listed = read_json(path).get("weight_map")
    if not isinstance(listed, dict):
        raise TachyscopeError(f"{path} must have a 'weight_map', it has none: get it again")
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for name in sorted({str(value) for value in listed.values()}):
        if Path(name).name != name or not name.isprintable() or not name.endswith(SAFE + PICKLED):
            raise TachyscopeError(
                f"{path} must list {', '.join(SAFE + PICKLED)} files beside it, got "
                f"{shown(name)}: put them there and name them so"
            )
        for key, tensor in read_tensors(path.with_name(name)).items():
            if key in tensors:
                raise TachyscopeError(
                    f"{path} must list files that hold each tensor once, {key} is in "
                    f"{places[key]} and {name}: get them again"
                )
            tensors[key], places[key] = tensor, name
    return tensors


def _read_safe(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as fault:
        raise _damaged(path, "safetensors", fault) from None


def _read_pickled(path: Path, entry: str) -> dict[str, Tensor]:
    try:
        with path.open("rb") as file:
            # only the zip container can be mapped; files of before 2020 are a bare pickle
            mapped = file.read(4) == b"PK\x03\x04"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickles that torch did not write
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as fault:
        # torch's own words go on for a page, and advise to run the code
        if not any(word in str(fault) for word in REFUSED):
            raise _damaged(path, "a torch checkpoint", EOFError("torn pickle")) from None
        raise TachyscopeError(
            f"{path} may hold only tensors, it has pickled objects whose code was not run: "
            f"save its tensors alone, as .safetensors"
        ) from None
    except LookupError:
        raise _damaged(path, "a torch checkpoint", EOFError("torn pickle")) from None
    except Exception as fault:
        # a damaged pickle can raise almost anything: RuntimeError, EOFError, ValueError
        raise _damaged(path, "a torch checkpoint", fault) from None
    if isinstance(value, dict):
        value = next((value[name] for name in (entry, *WRAPPERS) if name in value), value)
    if not isinstance(value, dict):
        raise TachyscopeError(
            f"{path} must hold a dict of tensors, or one in {', '.join(WRAPPERS)}, "
            f"got {type(value).__name__}: save the model's state_dict()"
        )
    if odd := [str(name) for name, tensor in value.items() if not _is_plain(tensor)]:
        raise TachyscopeError(
            f"{path} must hold a dict of tensors, or one in {', '.join(WRAPPERS)}, "
            f"got other values in {some(odd)}: save the model's state_dict()"
        )
    return {str(name): tensor for name, tensor in value.items()}


def _is_plain(value: object) -> bool:
    """Whether a value is a dense tensor with data: not sparse, nested, quantised or meta."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_nested or value.is_meta)
    )


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
    if is_out_of_memory(fault):
        return TachyscopeError(f"{path} is more than the memory that is left can hold: free some")
    if isinstance(fault, PermissionError):
        return _unreadable(path, fault)
    return TachyscopeError(
        f"{path} must be {kind}, it is damaged or cut short ({_line(fault)}): get it again"
    )


def _unreadable(path: Path, fault: OSError) -> TachyscopeError:
    return TachyscopeError(f"{path} cannot be read ({str(fault.strerror).lower()}): make it so")


def _line(fault: Exception) -> str:
    return first_line(fault).split(". ")[0].rstrip(":. ")


def some(names: Iterable[str], shown: int = 3) -> str:
    """The first names, and the number of the others."""
    every = list(names)
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    # a file may name its tensors as it likes, and an error is one line
    return ", ".join(x if x.isprintable() else repr(x) for x in every[:shown]) + more
