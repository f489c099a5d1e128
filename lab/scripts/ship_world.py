"""Put a trained world model in the package: its files, their hashes, the loss curve, the sheet.

    python lab/scripts/ship_world.py out/world --logs out/before/log.jsonl

The folder is as lab/scripts/train_atrium_world.py wrote it. --logs are those of the runs that it
went on from, since the model that is shipped now, in order. What is measured of the shipped weights
must then be measured anew: lab/tests/test_page_tables.py fails until it is.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
from pathlib import Path

import plot_atrium

from tachyscope.weights import HERE
from tachyscope_lab.evaluation.world import world_models

ROOT = Path(__file__).parents[2]
FILES = ("config.json", "decoder.safetensors", "text_encoder.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--logs", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    world_models(str(args.folder), "cpu")  # raises where it is no world model of Atrium
    target = HERE / "atrium-world"
    parts = sorted(args.folder.glob("diffusion_pytorch_model*"))
    for path in target.glob("diffusion_pytorch_model*"):
        path.unlink()
    for path in [*(args.folder / name for name in FILES), *parts]:
        shutil.copyfile(path, target / path.name)
        (target / path.name).chmod(0o644)
    runpy.run_path(str(ROOT / "scripts" / "record_weights"))
    curve = ROOT / "docs" / "atrium" / "world.jsonl"
    logs = [path.read_text() for path in (curve, *args.logs, args.folder / "log.jsonl")]
    curve.write_text("".join(logs))
    plot_atrium.draw_losses(curve.parent, curve.parent)
    # that of the largest steps comes first
    plot_atrium.shrink(min(args.folder.glob("sheet-world*.png")), curve.parent / "world.jpg")
    print(f"{len(FILES) + len(parts)} files in {target}: measure its tables anew")


if __name__ == "__main__":
    main()
