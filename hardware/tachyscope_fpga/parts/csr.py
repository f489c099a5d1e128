"""Control and status registers: one table makes the hardware, the register map and the C header."""

from __future__ import annotations

from dataclasses import dataclass

from amaranth.hdl import Cat, Module, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from tachyscope_fpga.errors import TachyscopeError
from tachyscope_fpga.parts.fixed import check_choice, check_range

BITS = 32
ACCESS = ("ro", "rw", "wo")
REQUEST = data.StructLayout({"address": BITS, "write": 1, "data": BITS})


@dataclass(frozen=True)
class Register:
    """`count` registers of 32 bits in a row.

    ro: the hardware's. rw: written by the host and kept. wo: each bit written as 1 is a strobe of
    one cycle; it reads as 0.
    """

    name: str
    access: str
    about: str
    count: int = 1
    value: int = 0  # rw: at reset

    def __post_init__(self) -> None:
        check_choice(f"register {self.name}'s access", self.access, ACCESS)
        check_range(f"register {self.name}'s count", self.count, 1, 1024)
        check_range(f"register {self.name}'s value", self.value, 0, 2**BITS - 1)


@dataclass(frozen=True)
class CsrBank:
    """Registers at rising addresses from 0, four bytes each."""

    registers: tuple[Register, ...]

    def __post_init__(self) -> None:
        names = [register.name for register in self.registers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names:
            raise TachyscopeError(f"registers need names of their own, got {twice or 'none'}")

    def address(self, name: str, number: int = 0) -> int:
        """The byte address of a register."""
        at = 0
        for register in self.registers:
            if register.name == name:
                check_range(f"register {name}'s number", number, 0, register.count - 1)
                return at + 4 * number
            at += 4 * register.count
        names = ", ".join(register.name for register in self.registers)
        raise TachyscopeError(f"there is no register {name!r}: there are {names}")

    @property
    def size(self) -> int:
        """Bytes of addresses."""
        return 4 * sum(register.count for register in self.registers)

    def register_map(self) -> str:
        """A Markdown table."""
        lines = ["| address | register | access | reset | |", "|---|---|---|---|---|"]
        for register in self.registers:
            first = self.address(register.name)
            many = register.count > 1
            span = f"{first:#06x} + 4 n" if many else f"{first:#06x}"
            name = f"{register.name}[{register.count}]" if many else register.name
            lines.append(
                f"| {span} | {name} | {register.access} | {register.value:#x} | {register.about} |"
            )
        return "\n".join(lines) + "\n"

    def c_header(self, prefix: str) -> str:
        """Addresses as C constants."""
        lines = [f"#ifndef {prefix}_H", f"#define {prefix}_H", ""]
        for register in self.registers:
            first = f"{self.address(register.name):#06x}u"
            what = f"/* {register.access}: {register.about} */"
            if register.count > 1:
                name = f"{prefix}_{register.name}(n)"
                lines.append(f"#define {name} ({first} + 4u * (n)) {what}")
                lines.append(f"#define {prefix}_{register.name}_COUNT {register.count}u")
            else:
                lines.append(f"#define {prefix}_{register.name} {first} {what}")
        lines += ["", f"#define {prefix}_SIZE {self.size:#06x}u", "", "#endif"]
        return "\n".join(lines) + "\n"

    def create(self) -> CsrBankUnit:
        return CsrBankUnit(self)


class CsrBankUnit(wiring.Component):
    """One access a cycle; an answer follows one cycle after its request, for writes too.

    Members
    -------
    request : In(stream of {address, write, data}), response : Out(stream of 32)
        Byte addresses; the lowest two bits are not looked at. What is not there reads as 0.
    reg_<name> : of every register, In for ro, Out for rw and wo
        `count` numbers of 32 bits.
    """

    def __init__(self, params: CsrBank) -> None:
        self.params = params
        members: dict[str, wiring.Member] = {
            "request": In(stream.Signature(REQUEST)),
            "response": Out(stream.Signature(BITS)),
        }
        for register in params.registers:
            shape = data.ArrayLayout(BITS, register.count)
            way = In if register.access == "ro" else Out
            members[f"reg_{register.name.lower()}"] = way(shape)
        super().__init__(members)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        word = self.request.p.address[2:]
        taken = self.request.valid & self.request.ready
        wrote = taken & self.request.p.write
        value = Signal(BITS)
        m.d.comb += self.request.ready.eq(~self.response.valid | self.response.ready)
        with m.If(taken):
            m.d.sync += [self.response.valid.eq(1), self.response.payload.eq(value)]
        with m.Elif(self.response.ready):
            m.d.sync += self.response.valid.eq(0)
        for register in self.params.registers:
            values = getattr(self, f"reg_{register.name.lower()}")
            for number in range(register.count):
                here = word == self.params.address(register.name, number) // 4
                if register.access == "wo":
                    given = Cat(bit & here & wrote for bit in self.request.p.data)
                    m.d.comb += values[number].eq(given)
                    continue
                with m.If(here):
                    m.d.comb += value.eq(values[number])
                if register.access == "rw":
                    kept = Signal(BITS, init=register.value)
                    m.d.comb += values[number].eq(kept)
                    with m.If(here & wrote):
                        m.d.sync += kept.eq(self.request.p.data)
        return m
