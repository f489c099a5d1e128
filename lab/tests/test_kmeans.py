"""SVG2's clusters: each backend equals the definition, and the kernels compile for an H200."""

import os
import subprocess
import sys

import pytest
import torch

from tachyscope_lab.rivals.kmeans import kmeans
from tachyscope_lab.rivals.kmeans import torch as kmeans_torch
from tachyscope_lab.rivals.kmeans.reference import kmeans_reference

triton = pytest.importorskip("triton")
from tachyscope_lab.rivals.kmeans import triton as kmeans_triton  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 2e-5, "atol": 2e-5}


def _moved(*tensors):
    return tuple(x.to(DEVICE, DTYPE) if x.dim() == 4 else x.to(DEVICE) for x in tensors)


def _case_kmeans(rng, backend):
    """An iteration over vectors of which some count twice and some not at all."""
    (x,) = _moved(torch.randn(1, 2, 131, 64, generator=rng))
    weight = torch.randint(0, 3, (1, 2, 131), generator=rng).float().to(DEVICE)
    centroids, spare = x[:, :, :13].float().clone(), torch.arange(13)
    centroids[:, :, 11:] = 100.0  # nearest to none
    want = kmeans_reference(*(t.cpu() for t in (x, weight, centroids)), spare, 1)
    module = {"torch": kmeans_torch, "triton": kmeans_triton}[backend]
    label = module.nearest(x, centroids)
    total, size = module.sum_clusters(x, weight, label, 13)
    held = want[1] > 0
    assert torch.equal(label.cpu(), want[0]) and torch.equal(size.cpu().double(), want[1])
    assert not held[:, :, 11:].any() and not total.cpu()[~held].any()
    return (total / size.unsqueeze(-1)).cpu()[held], want[2][held]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_an_iteration_equals_its_reference(rng, backend):
    got, want = _case_kmeans(rng, backend)
    torch.testing.assert_close(got.double().cpu(), want.double().cpu(), **TOLERANCE)


def test_clusters_move_as_their_definition_does(rng):
    x, weight = torch.randn(1, 2, 60, 8, generator=rng), torch.rand(1, 2, 60, generator=rng)
    weight[:, :, 50:] = 0.0  # empty slots move nothing
    centroids, spare = x[:, :, :9].clone(), torch.arange(9, 18)
    centroids[:, :, 8] = 50.0  # nearest to none: goes to its spare vector
    want = kmeans_reference(x, weight, centroids, spare, 4)
    got = (*kmeans(x, weight, centroids, spare, 4), centroids)
    for found, true in zip(got, want, strict=True):
        torch.testing.assert_close(found.double(), true.double(), rtol=1e-5, atol=1e-5)


# kernels are interpreted in this process, so that another one compiles them
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tachyscope_lab.rivals.kmeans import triton as kmeans


def build(kernel, types, constants, **options):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    fixed = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, fixed)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]
    return found


types = dict.fromkeys(("x_b", "x_h"), "i64") | dict.fromkeys(("x_n", "heads", "n", "count"), "i32")
types |= {"x": "*bf16", "near": "*bf16", "label": "*i64", "order": "*i64", "start": "*i64"}
types |= dict.fromkeys(("half", "weight", "total", "size"), "*fp32")
for kernel, options in ((kmeans._nearest, {"M": kmeans.ROWS, "N": kmeans.COLUMNS}), (kmeans._sum_clusters, {"N": kmeans.ADDED})):
    build(kernel, types, {"D": 128} | options, num_warps=8)
print("compiled")
"""


@pytest.mark.slow
def test_the_kernels_compile(tmp_path):
    free = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    free |= {"TRITON_CACHE_DIR": str(tmp_path)}
    path = tmp_path / "compile.py"  # a kernel's source must stand in a file
    path.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, path], env=free, capture_output=True, text=True)
    assert ran.returncode == 0 and "compiled" in ran.stdout, ran.stderr[-2000:]
