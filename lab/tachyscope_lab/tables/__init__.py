"""Tables of README.md and docs/*.md, written from `results/` into their marked blocks.

A page marks where a table stands:

    <!-- table: plans -->
    <!-- /table -->

and `tachyscope-lab tables` writes what is between. A name is a function of one of this package's
modules: it takes `Results` and returns Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tachyscope.core.errors import TachyscopeError
from tachyscope.io.files import write_atomically
from tachyscope_lab.results import Results
from tachyscope_lab.tables import index, papers, plans, rivals, serving, speed, tokens

ROOT = Path(__file__).parents[3]
TABLES: dict[str, Callable[[Results], str]] = {
    "readme-gain": plans.readme_gain,
    "readme-plans": plans.readme_plans,
    "readme-tokens": tokens.readme_tokens,
    "plans": plans.plans,
    "banks": plans.banks,
    "loops": plans.loops,
    "rounding": plans.rounding,
    "regimes": plans.regimes,
    "second-world": plans.second_world,
    "rivals": rivals.rivals,
    "rivals-all": rivals.rivals_all,
    "world-long": rivals.world_long,
    "drift": rivals.drift,
    "tokens-decode": tokens.tokens_decode,
    "tokens-cpu": tokens.tokens_cpu,
    "drafts": tokens.drafts,
    "frontier": tokens.frontier,
    "replay": tokens.replay,
    "wan-chunks": speed.wan_chunks,
    "wan-sizes": speed.wan_sizes,
    "wan-rollouts": speed.wan_rollouts,
    "kernels": speed.kernels,
    "serve": serving.serve,
    "papers": papers.fast_ar,
    "papers-speed": papers.fast_ar_speed,
    "papers-fastcar": papers.fastcar,
    "index": index.index,
}
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)


def write_blocks(text: str, results: Results, page: str = "the page") -> str:
    """A page with every marked block as `results/` has it."""
    opened, closed = text.count("<!-- table: "), text.count("<!-- /table -->")
    if opened != closed or opened != len(BLOCK.findall(text)):
        raise TachyscopeError(
            f"{page} has {opened} `<!-- table: NAME -->` and {closed} `<!-- /table -->`: give "
            f"every block both, each on a line of its own"
        )

    def write(block: re.Match[str]) -> str:
        name = block[2]
        if name not in TABLES:
            raise TachyscopeError(
                f"{page} marks a table {name!r}: choose one of {', '.join(TABLES)}"
            )
        return f"{block[1]}{TABLES[name](results)}\n{block[4]}"

    return BLOCK.sub(write, text)


def pages(root: Path = ROOT) -> list[Path]:
    """The pages that may mark tables."""
    found = [root / "README.md", *sorted((root / "docs").glob("*.md")), root / "results/README.md"]
    return [path for path in found if path.exists()]


def write_pages(results: Results, root: Path = ROOT, check: bool = False) -> list[Path]:
    """Write the blocks of all pages; the pages that changed, or with `check` would have."""
    changed = []
    for path in pages(root):
        old = path.read_text()
        new = write_blocks(old, results, str(path.relative_to(root)))
        if new != old:
            changed.append(path)
            if not check:
                write_atomically(path, new)
    return changed


def names_of(paths: Sequence[Path]) -> list[str]:
    """The tables that these pages mark."""
    return [name for path in paths for _, name, *_ in BLOCK.findall(path.read_text())]
