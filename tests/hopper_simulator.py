"""Run a Gluon kernel of a Hopper GPU on a CPU: its own source, with what the hardware does after it.

The warp groups of a program are threads of which one runs at a time; a seed decides which. Copies
land, and products are computed, as late as the kernel's own waits allow, and what a copy will
overwrite is NaN until it has landed. So a wait that is missing gives NaN, and one that can never
end is an error. Registers, layouts and proxies are not simulated: the compiler checks the first two.
"""

from __future__ import annotations

import inspect
import random
import threading
import types
from collections import deque
from types import SimpleNamespace

import torch
import triton
from triton.runtime.jit import JITFunction

FP8 = torch.float8_e4m3fn


class Tile(torch.Tensor):
    """A tensor of registers, with what Gluon's have beyond torch's."""

    type = SimpleNamespace(layout=None)

    def split(self):
        return self[..., 0], self[..., 1]


def tile(x):
    return torch.as_tensor(x).as_subclass(Tile)


class Pointer:
    def __init__(self, flat, at=0):
        self.flat, self.at = flat, at
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, offset):
        return Pointer(self.flat, self.at + offset)

    __radd__ = __add__


class Shared:
    def __init__(self, data):
        self.data = data

    def index(self, i):
        return Shared(self.data[int(i)])

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return tile(self.data.clone())


class Barrier:
    def __init__(self, count=0):
        self.parts = [Barrier() for _ in range(count)]
        self.phase = self.missing = self.bytes = 0
        self.count = None

    def index(self, i):
        return self.parts[int(i)]

    def settle(self):
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase + 1, self.count


class Program:
    """The threads of one program of a launch."""

    def __init__(self, seed):
        self.choice, self.copies = random.Random(seed), []
        self.turn = threading.Condition()
        self.ready = {}  # thread: whether it can go on
        self.running, self.fault = None, None
        self.products = threading.local()

    def run(self, parts):
        threads = [threading.Thread(target=self._one, args=part, daemon=True) for part in parts]
        self.ready = dict.fromkeys(threads, lambda: True)
        for thread in threads:
            thread.start()
        with self.turn:
            self._pass_on()
        for thread in threads:
            thread.join(60)
        if self.fault is not None:
            raise self.fault
        assert not self.copies and not any(thread.is_alive() for thread in threads)

    def _one(self, part, args):
        me, self.products.queue = threading.current_thread(), deque()
        try:
            with self.turn:
                self.turn.wait_for(lambda: self.running is me)
            part(*args)
            assert not self.products.queue, "a product is never waited for"
        except BaseException as fault:
            self.fault = self.fault or fault
        with self.turn:
            del self.ready[me]
            self._pass_on()

    def wait(self, until):
        """Let another go on; come back when `until` holds."""
        me = threading.current_thread()
        with self.turn:
            self.ready[me] = until
            self._pass_on()
            self.turn.wait_for(lambda: self.running is me)
        if self.fault is not None:
            raise RuntimeError("another part failed")

    def _pass_on(self):
        while True:
            able = [thread for thread, ready in self.ready.items() if self.fault or ready()]
            if self.copies and (not able or self.choice.random() < 0.3):
                self.copies.pop(self.choice.randrange(len(self.copies)))()
                continue
            if not able and self.ready:
                self.fault = RuntimeError("every part waits for another")
                continue
            self.running = self.choice.choice(able) if able else None
            self.turn.notify_all()
            return


class Mbarrier:
    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self, program):
        self.program = program

    def init(self, bar, count):
        bar.count = bar.missing = count

    def wait(self, bar, phase, pred=True):
        if pred:
            self.program.wait(lambda: bar.phase % 2 != int(phase))

    def expect(self, bar, size):
        assert bar.missing > 0, "more have arrived than a phase has"
        bar.bytes += int(size)
        self.arrive(bar, 1)

    def arrive(self, bar, count):
        assert bar.missing >= count, "more have arrived than a phase has"
        bar.missing -= count
        bar.settle()
        self.program.wait(lambda: True)


def _gluon(program, number):
    def load(pointer, mask=None, other=0.0):
        at = torch.as_tensor(pointer.at)
        keep = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        keep = keep.expand_as(at)
        assert int(torch.where(keep, at, 0).min()) >= 0
        held = pointer.flat[torch.where(keep, at, 0)]
        return tile(torch.where(keep, held, torch.as_tensor(other, dtype=held.dtype)))

    def store(pointer, value, mask=None):
        keep = torch.ones_like(value, dtype=torch.bool) if mask is None else mask
        keep = keep.expand_as(value)
        pointer.flat[pointer.at.expand_as(value)[keep]] = value[keep].as_subclass(torch.Tensor)

    def inline(text, constraints, args, dtype, pure, pack):
        if "cvt.rn.satfinite" in text:
            codes = [x.clamp(-448, 448).to(FP8).view(torch.uint8).int() for x in args]
            return sum(code << 8 * i for i, code in enumerate(codes))
        assert text == "mov.b32 $0, $1;" and pack == 4
        fours = args[0].unflatten(-1, (-1, 4))
        assert (fours == fours[..., :1]).all()
        parts = [(fours[..., 0] >> 8 * i & 255).to(torch.uint8) for i in range(4)]
        return torch.stack(parts, -1).flatten(-2).contiguous().view(FP8)

    def allocate(dtype, shape, layout):
        if dtype == torch.int64:
            return Barrier(shape[0])
        return Shared(torch.full(shape, torch.nan, dtype=torch.float32).to(dtype))

    def nothing(*args, **more):
        return None

    layout = SimpleNamespace(get_default_for=nothing)
    return SimpleNamespace(
        program_id=lambda axis: torch.tensor(number), load=load, store=store,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), where=torch.where,
        exp2=torch.exp2, log2=torch.log2, ceil=torch.ceil, static_range=range,
        join=lambda a, b: torch.stack((a, b), -1), convert_layout=lambda x, layout: x,
        zeros=lambda shape, dtype, layout: tile(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, value, dtype, layout: tile(torch.full(shape, value, dtype=dtype)),
        arange=lambda low, high, layout: tile(torch.arange(low, high)),
        inline_asm_elementwise=inline, allocate_shared_memory=allocate,
        warp_specialize=lambda parts, warps, registers: program.run(parts),
        NVMMASharedLayout=layout, SliceLayout=nothing, DotOperandLayout=nothing,
        NVMMADistributedLayout=nothing, constexpr=triton.language.constexpr,
        float32=torch.float32, bfloat16=torch.bfloat16, float8e4nv=FP8, int64=torch.int64,
        int32=torch.int32,
    )  # fmt: skip


def _hardware(program, number):
    """What stands in for the names that a kernel's module imports."""

    def load_async(source, at, ready, to):
        at = [int(x) for x in at]
        box = source.block_shape
        to.data.copy_(torch.full(to.data.shape, torch.nan).to(to.data.dtype))

        def land():
            size = [min(n, max(0, m - i)) for n, m, i in zip(box, source.shape, at, strict=True)]
            held = torch.zeros(box, dtype=source.base.dtype)
            part = source.base[tuple(map(slice, at, map(sum, zip(at, size, strict=True))))]
            held[tuple(map(slice, size))] = part
            to.data.copy_(held.reshape(to.data.shape))
            ready.bytes -= held.numel() * held.element_size()
            ready.settle()

        assert all(i >= 0 for i in at)
        program.copies.append(land)

    def multiply(a, b, acc, use_acc=True, is_async=False):
        waiting = SimpleNamespace(value=None)

        def compute():
            left = (a.data if isinstance(a, Shared) else a).float()
            waiting.value = tile(left @ b.data.float() + (acc if use_acc else 0))

        assert is_async
        program.products.queue.append(compute)
        return waiting

    def multiplied(pending, deps):
        while len(program.products.queue) > pending:
            program.products.queue.popleft()()
        found = [x.value if isinstance(x, SimpleNamespace) else x for x in deps]
        return found[0] if len(found) == 1 else found

    return {
        "gl": _gluon(program, number), "mbarrier": Mbarrier(program), "load_async": load_async,
        "warpgroup_mma": multiply, "warpgroup_mma_wait": multiplied,
        "fence_async_shared": lambda: None,
    }  # fmt: skip


def _translated(kernel, hardware, done, without=""):
    """A kernel's function with the hardware's names and plain numbers, and so what it calls."""
    fn = kernel.fn
    if fn not in done:
        names, code = {}, fn.__code__
        text = inspect.getsource(fn)
        if without and without in text:
            lines = text[text.index("\ndef ") :].replace(without, "pass")
            (code,) = (x for x in compile(lines, "", "exec").co_consts if hasattr(x, "co_code"))
        done[fn] = types.FunctionType(code, names, fn.__name__, fn.__defaults__)
        for name, value in fn.__globals__.items():
            if isinstance(value, triton.language.constexpr):
                value = value.value
            elif isinstance(value, JITFunction):
                value = _translated(value, hardware, done, without)
            elif name.startswith("_mma"):
                value = lambda n: None  # noqa: E731
            names[name] = value
        names |= hardware
    return done[fn]


class Simulated:
    """A kernel that is launched as Triton's are: simulated[grid](*args).

    A statement of its source may be left out, to see that it is needed.
    """

    def __init__(self, kernel, seed=0, without=""):
        self.kernel, self.seed, self.without = kernel, seed, without

    def __getitem__(self, grid):
        def launch(*args, **options):
            with torch.no_grad():
                for number in range(grid[0]):
                    program = Program((self.seed, number).__hash__())
                    hardware = _hardware(program, number)
                    body = _translated(self.kernel, hardware, {}, self.without)
                    body(*map(_argument, args, self.kernel.params))

        return launch


def _argument(x, parameter):
    if parameter.is_constexpr:
        return x
    if isinstance(x, torch.Tensor):
        size = x.untyped_storage().nbytes() // x.element_size()
        return Pointer(x.as_strided((size,), (1,), 0), x.storage_offset())
    if isinstance(x, int):
        return torch.tensor(x)
    if isinstance(x, float):
        return x
    base = x.base.as_strided(x.shape, x.strides)
    return SimpleNamespace(base=base, shape=x.shape, block_shape=x.block_shape, dtype=base.dtype)
