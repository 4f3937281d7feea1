"""Loading PTX and launching its kernels: the public face of the emulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import catalogue  # noqa: F401  registers the instruction forms
from . import layout as L
from .decode import Decoded, decode
from .diagnostics import Checks
from .machine import Machine
from .memory import Memory
from .model import TYPE_BYTES, Program, Symbol, Variable
from .reader import read
from .report import Report
from .tensor_map import TensorMap

SCHEDULES = ("random", "eager", "late")
#: Shared memory that one CTA may use on compute capability 9.0 and 10.x (the reserved KB apart).
SHARED_LIMIT = 227 * 1024


class Bytes(bytes):
    """A kernel argument passed by value as raw bytes (a struct): `Bytes(array.tobytes())`."""


class Module:
    """PTX text, parsed and decoded. `entries` names its kernels; module variables keep their values between
    launches."""

    def __init__(self, text: str) -> None:
        self.program: Program = read(text)
        self.decoded: dict[str, Decoded] = {
            name: decode(self.program, function) for name, function in self.program.functions.items()
            if function.entry and function.defined
        }
        self.globals: dict[str, np.ndarray] = {}
        for variable in self.program.variables.values():
            if variable.space in ("global", "const") and not variable.external:
                self.globals[variable.name] = np.zeros(max(variable.bytes, 1), np.uint8)
        self.filled = False

    @property
    def entries(self) -> list[str]:
        return list(self.decoded)

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence = (),
        *,
        cluster: Sequence[int] | None = None,
        shared_bytes: int = 0,
        schedule: str = "random",
        seed: int = 0,
        checks: Checks | bool = True,
        trace: bool = False,
        concurrent_clusters: int = 1,
        instruction_limit: int = 1 << 30,
        memory: Memory | None = None,
    ) -> Report:
        """Run a kernel over its whole grid.

        Parameters
        ----------
        name
            Entry point.
        grid, block, cluster
            1 to 3 extents each, x first; grid counts CTAs (as in CUDA C), a multiple of the cluster. A cluster
            that the PTX itself requires (.reqnctapercluster) is the default.
        args
            One for each parameter: a NumPy array (a pointer to its first element; the kernel works in
            place), a NumPy scalar or Python int/float (the parameter's bytes), `None` (null pointer),
            `Bytes` (by value), `TensorMap`.
        shared_bytes
            Dynamic shared memory.
        schedule
            "random" (interleaving and completion times drawn from `seed`), "eager" (asynchronous work
            completes at once) or "late" (only when no warp can run).
        checks
            A `Checks`, or True for all and False for none.
        trace
            Keep the time line (Report.timeline, Report.save_trace, Report.plot).
        concurrent_clusters
            How many clusters are resident at once. Kernels that wait for other CTAs need enough of them.
        instruction_limit
            Warp instructions after which the launch is reported as a livelock.
        memory
            A `Memory`, to know the addresses of arrays before the launch (`Memory.address`).

        Returns
        -------
        Report
            Counters, and the trace if asked for.

        Raises
        ------
        ValueError, TypeError
            An argument is unfit; the message names it and what is accepted.
        Fault
            The kernel did something wrong.
        """
        if name not in self.decoded:
            raise ValueError(
                f"name={name!r}: the module has {', '.join(map(repr, self.decoded)) or 'no entry'}"
            )
        decoded = self.decoded[name]
        directives = decoded.entry.directives
        grid, block = _extents("grid", grid), _extents("block", block)
        required = directives.get("reqnctapercluster")
        explicit = cluster is not None or required is not None
        shape = _extents("cluster", cluster if cluster is not None else required or (1,))
        self._check_shape(name, directives, grid, block, shape, required)
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: accepted are {', '.join(map(repr, SCHEDULES))}")
        if checks is True:
            checks = Checks()
        elif checks is False:
            checks = Checks.off()
        elif not isinstance(checks, Checks):
            raise TypeError(f"checks={checks!r}: a Checks or a bool is accepted")
        shared_bytes = _number("shared_bytes", shared_bytes, 0, SHARED_LIMIT)
        static = decoded.shared_static - L.SHARED_RESERVED
        if decoded.shared_dynamic - L.SHARED_RESERVED + shared_bytes > SHARED_LIMIT:
            raise ValueError(f"shared_bytes={shared_bytes}: with {static} static bytes that is more than the "
                             f"{SHARED_LIMIT} bytes a CTA can have")
        clusters = grid[0] * grid[1] * grid[2] // (shape[0] * shape[1] * shape[2])
        concurrent = min(_number("concurrent_clusters", concurrent_clusters, 1, 1 << 16), clusters)
        own_memory = memory is None
        memory = Memory() if own_memory else memory
        variables = self._map_variables(memory)
        parameters = self._bind(decoded, args, memory)
        report = Report(self, decoded, grid, block, shape, explicit)
        machine = Machine(
            decoded,
            memory,
            grid,
            block,
            shape,
            shared_bytes,
            schedule,
            int(seed),
            checks,
            concurrent,
            instruction_limit,
            trace,
            parameters,
            variables,
            report,
        )
        try:
            machine.run()
        finally:
            report.collect(machine)
            machine.close()
            if own_memory:
                memory.close()
        return report

    def _check_shape(self, name, directives, grid, block, cluster, required) -> None:
        threads = block[0] * block[1] * block[2]
        if threads > 1024:
            raise ValueError(f"block={block}: {threads} threads, at most 1024")
        for g, c, axis in zip(grid, cluster, "xyz"):
            if g % c:
                raise ValueError(f"grid={grid}: {axis} is not a multiple of the cluster's {c}")
        if cluster[0] * cluster[1] * cluster[2] > 16:
            raise ValueError(f"cluster={cluster}: at most 16 CTAs")
        if required and tuple(required) + (1,) * (3 - len(required)) != cluster:
            raise ValueError(f"cluster={cluster}: {name} was compiled for {tuple(required)}")
        exact = directives.get("reqntid")
        if exact and tuple(exact) + (1,) * (3 - len(exact)) != block:
            raise ValueError(f"block={block}: {name} was compiled for exactly {tuple(exact)} threads")
        most = directives.get("maxntid")
        if most and threads > int(np.prod(most)):
            raise ValueError(f"block={block}: {name} was compiled for at most {int(np.prod(most))} threads")

    def _map_variables(self, memory: Memory) -> dict[str, int]:
        """Addresses of module variables; their initial values are filled in on the first launch."""
        addresses = {}
        for name, buffer in self.globals.items():
            variable = self.program.variables[name]
            if variable.space == "const":
                at = -(-memory.next_const // 256) * 256
                memory.next_const = at + len(buffer) + 256
                addresses[name] = memory.place(buffer.ctypes.data, len(buffer), f"const {name}", True, at)
            else:
                addresses[name] = memory.place(buffer.ctypes.data, len(buffer), f"variable {name}")
            memory.kept.append(buffer)
        for name, buffer in self.globals.items():
            variable = self.program.variables[name]
            if variable.initial is not None and (not self.filled or variable.space == "const"
                                                 or _has_symbols(variable.initial)):
                buffer[:] = np.frombuffer(self._initial(variable, addresses), np.uint8)[: len(buffer)]
        self.filled = True
        return addresses

    def _initial(self, variable: Variable, addresses: dict) -> bytes:
        size = TYPE_BYTES[variable.type]

        def encode(value) -> bytes:
            if isinstance(value, float):
                return np.array(value, {4: np.float32, 8: np.float64}[size]).tobytes()
            if isinstance(value, Symbol):
                value = self._address(value, addresses, variable)
            elif isinstance(value, tuple) and value[0] == "generic":
                return encode(value[1])
            elif isinstance(value, tuple) and value[0] == "mask":
                inner = self._address(value[2], addresses, variable)
                shift = (value[1] & -value[1]).bit_length() - 1
                value = (inner & value[1]) >> shift
            elif hasattr(value, "value"):
                value = value.value
            return (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

        def flatten(value, shape) -> bytes:
            if not shape:
                return encode(value)
            inner = size * int(np.prod(shape[1:], dtype=np.int64)) if shape[1:] else size
            if not isinstance(value, list):
                value = [value]
            data = b"".join(flatten(item, shape[1:]).ljust(inner, b"\0") for item in value)
            return data.ljust(shape[0] * inner, b"\0")

        return flatten(variable.initial, variable.shape).ljust(variable.bytes, b"\0")

    def _address(self, symbol: Symbol, addresses: dict, variable: Variable) -> int:
        if symbol.name in addresses:
            return addresses[symbol.name] + symbol.offset
        if symbol.name in self.program.functions:
            return L.CODE_WINDOW + 16 * list(self.program.functions).index(symbol.name)
        raise ValueError(
            f"initialiser of {variable.name} (PTX line {variable.line}) names {symbol.name!r}, which has no "
            "address"
        )

    def _bind(self, decoded: Decoded, args: Sequence, memory: Memory) -> bytes:
        """The parameter buffer, mapped as read-only memory in its own window."""
        if len(args) != len(decoded.parameters):
            names = ", ".join(v.name for _, v in decoded.parameters)
            raise ValueError(f"args: {len(args)} given, the kernel takes {len(decoded.parameters)} ({names})")
        data = bytearray(max(decoded.parameter_bytes, 1))
        for number, ((offset, variable), argument) in enumerate(zip(decoded.parameters, args)):
            value = _encode_argument(number, variable, argument, memory)
            data[offset : offset + len(value)] = value
        buffer = np.frombuffer(bytes(data), np.uint8).copy()
        memory.kept.append(buffer)
        memory.remove(L.PARAMETER_WINDOW)
        memory.place(buffer.ctypes.data, len(buffer), "kernel parameters", True, L.PARAMETER_WINDOW)
        return bytes(data)


def _has_symbols(initial) -> bool:
    if isinstance(initial, (list, tuple)):
        return any(_has_symbols(item) for item in initial)
    return isinstance(initial, Symbol)


def _extents(what: str, value) -> tuple[int, int, int]:
    values = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(values) <= 3 or any(not isinstance(v, (int, np.integer)) or v < 1 for v in values):
        raise ValueError(f"{what}={value!r}: 1 to 3 positive integers are accepted")
    return tuple(int(v) for v in values) + (1,) * (3 - len(values))


def _number(what: str, value, low: int, high: int) -> int:
    if not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{what}={value!r}: an integer from {low} to {high} is accepted")
    return int(value)


def _encode_argument(number: int, variable: Variable, argument, memory: Memory) -> bytes:
    size, place = variable.bytes, f"args[{number}] ({variable.name}, {variable.bytes} bytes)"
    if isinstance(argument, TensorMap):
        base = memory.map(argument.array, f"args[{number}]")
        data = argument.encode(base)
        if size == len(data):
            return data
        if size == 8:
            address, buffer = memory.new(len(data), f"tensor map args[{number}]")
            buffer[:] = np.frombuffer(data, np.uint8)
            return address.to_bytes(8, "little")
        raise TypeError(f"{place}: a TensorMap fits a 128-byte parameter or a pointer to one")
    if isinstance(argument, (bytes, bytearray)):
        if len(argument) != size:
            raise ValueError(f"{place}: {len(argument)} bytes given")
        return bytes(argument)
    if argument is None:
        if size != 8:
            raise TypeError(f"{place}: None is a null pointer, which needs 8 bytes")
        return bytes(8)
    if hasattr(argument, "__dlpack__") and not isinstance(argument, np.ndarray):
        argument = np.from_dlpack(argument)
    if (
        isinstance(argument, np.ndarray)
        and argument.ndim > 0
        or isinstance(argument, np.ndarray)
        and size == 8
    ):
        if size != 8:
            raise TypeError(f"{place}: an array is a pointer, which needs 8 bytes")
        return memory.map(argument, f"args[{number}]").to_bytes(8, "little")
    if isinstance(argument, (np.generic, np.ndarray)):
        if argument.nbytes != size:
            raise TypeError(f"{place}: {argument.dtype} has {argument.nbytes} bytes")
        return argument.tobytes()
    if isinstance(argument, bool):
        argument = int(argument)
    if isinstance(argument, int) and size in (1, 2, 4, 8) and variable.type[0] in "busf":
        if not -(1 << (8 * size - 1)) <= argument < 1 << 8 * size:
            raise ValueError(f"{place}: {argument} does not fit")
        if variable.type in ("f32", "f64"):
            return np.array(argument, variable.type.replace("f", "float")).tobytes()
        return (argument & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    if isinstance(argument, float) and variable.type in ("f32", "f64"):
        return np.array(argument, variable.type.replace("f", "float")).tobytes()
    raise TypeError(
        f"{place}: {type(argument).__name__} is not accepted; pass a NumPy array or scalar, int, float, "
        "None, Bytes or TensorMap"
    )


def load(ptx_text: str) -> Module:
    """Parse and decode PTX text. Anything unknown raises PtxSyntaxError (a ValueError) with the line and its
    text."""
    return Module(ptx_text)


def compile(source: str, arch: str = "sm_100a", **options) -> Module:
    """Compile CUDA C++ through NVRTC (see msa_cudacore.ptx.nvrtc.compile_ptx for the options) and load the
    result."""
    from ..nvrtc import compile_ptx

    options.setdefault("lineinfo", True)
    return load(compile_ptx(source, arch, **options))
