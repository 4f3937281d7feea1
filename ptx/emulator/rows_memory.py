"""Decode rows: loads, stores, atomics, address conversion, fences, prefetches and other cache hints."""

from __future__ import annotations

from . import layout as L
from . import opcodes as O
from .atomics import ATOMIC_KINDS, ATOMIC_NAMES
from .builder import WIDTHS
from .forms import row
from .model import Register, Sink, Symbol, Vector

_SCOPE = "cta|cluster|gpu|sys?"
_SPACE = ("const|global|local|param|param::entry|param::func|shared|shared::cta|shared::cluster?")
_CACHE = "ca|cg|cs|lu|cv|wb|wt?"
_EVICT = ("L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate? "
          "L2::evict_normal|L2::evict_first|L2::evict_last? L2::cache_hint? L2::64B|L2::128B|L2::256B?")
_TYPES = "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"
_VECTOR = "v2|v4|v8?"


def space_of(ins) -> int:
    name = ins.one_of(
        "const",
        "global",
        "local",
        "param",
        "param::entry",
        "param::func",
        "shared",
        "shared::cta",
        "shared::cluster",
    )
    if name is None:
        return L.SPACE_GENERIC
    if name in ("const", "global") or name.startswith("param"):
        return L.SPACE_GLOBAL
    return {"local": L.SPACE_LOCAL, "shared": L.SPACE_SHARED_CTA, "shared::cta": L.SPACE_SHARED_CTA,
            "shared::cluster": L.SPACE_SHARED_CLUSTER}[name]


def order_bits(ins, atomic: bool = False) -> int:
    """Bits 8..10 of P_Y: strong, acquire, release."""
    strong = atomic or ins.has("volatile") or ins.has("relaxed") or ins.has("mmio")
    acquire = ins.has("acquire") or ins.has("acq_rel")
    release = ins.has("release") or ins.has("acq_rel")
    return (strong or acquire or release) << 8 | acquire << 9 | release << 10


def elements(operand) -> tuple:
    return operand.items if isinstance(operand, Vector) else (operand,)


def check_vector(b, ins, items) -> None:
    vector = ins.one_of("v2", "v4", "v8")
    if len(items) != (int(vector[1:]) if vector else 1):
        raise b.error(f"{len(items)} registers for a {vector or 'scalar'} access")


@row(
    "ld",
    f"weak|relaxed|acquire|volatile|mmio? {_SCOPE} {_SPACE} {_CACHE} nc? {_EVICT} unified? {_VECTOR} "
    f"{_TYPES}",
    "d, [a], p?",
)
@row("ldu", f"global? {_VECTOR} {_TYPES}", "d, [a]")
def load(b, ins):
    kind = ins.modifiers[-1]
    items = elements(ins.operands[0])
    check_vector(b, ins, items)
    size = WIDTHS[kind] // 8
    address = ins.operands[1]
    if isinstance(address.base, Symbol):
        entry = b.decoder.parameter_offset(address.base.name)
        if entry is not None and address.base.name not in b.frame:
            load_parameter(b, ins, items, kind, size, entry, address)
            return
    a, offset, frame = b.address(address)
    rows = [b.dest(item) for item in items]
    width = max((b.width(item) for item in items if isinstance(item, Register)), default=64)
    if width < 8 * size:
        raise b.error(f"a .{kind} value does not fit a {width}-bit register")
    start = b.row_list(rows)
    space = L.SPACE_FRAME if frame else space_of(ins)
    shift = 64 - 8 * size if kind[0] == "s" and width > 8 * size else 0
    b.emit(O.LD, d=start, a=a, x=len(items) | size << 8, y=space | order_bits(ins), z=offset, s=shift,
           w=(1 << width) - 1, defs="", uses="a", def_list=(start, len(rows)))


def load_parameter(b, ins, items, kind, size, entry, address) -> None:
    """Kernel parameters are constant for a launch, so they come from the constant rows."""
    begin, variable = entry
    offset = address.offset + address.base.offset
    if offset < 0 or offset + size * len(items) > variable.bytes:
        raise b.error(
            f"bytes {offset}..{offset + size * len(items) - 1} of parameter {variable.name!r}, which has "
            f"{variable.bytes}"
        )
    if (begin + offset) % (size * len(items)):
        raise b.error("misaligned parameter address")
    for k, item in enumerate(items):
        if isinstance(item, Sink):
            continue
        width = b.width(item)
        signed_width = width if kind[0] == "s" and width > 8 * size else 0
        source = b.constant_key(("parameter", begin + offset + k * size, size, signed_width))
        b.integer(O.MOV, width, b.dest(item), source)


@row(
    "st",
    f"weak|relaxed|release|volatile|mmio? {_SCOPE} {_SPACE} {_CACHE} {_EVICT} {_VECTOR} {_TYPES}",
    "[a], b, p?",
)
def store(b, ins):
    kind = ins.modifiers[-1]
    items = elements(ins.operands[1])
    check_vector(b, ins, items)
    size = WIDTHS[kind] // 8
    if ins.one_of("const", "param::entry"):
        raise b.error("this state space cannot be written")
    a, offset, frame = b.address(ins.operands[0])
    rows = [b.value(item, kind) for item in items]
    start = b.row_list(rows)
    space = L.SPACE_FRAME if frame else space_of(ins)
    b.emit(
        O.ST,
        a=a,
        b=start,
        x=len(items) | size << 8,
        y=space | order_bits(ins),
        z=offset,
        defs="",
        uses="a",
        use_list=(start, len(rows)),
    )


_OPS = "and|or|xor|cas|exch|add|inc|dec|min|max"
_ATOM_TYPES = "b16|b32|b64|u32|u64|s32|s64|f16|f16x2|bf16|bf16x2|f32|f64"


@row(
    "atom",
    f"relaxed|acquire|release|acq_rel? {_SCOPE} {_SPACE} {_OPS} noftz? L2::cache_hint? {_VECTOR} "
    f"{_ATOM_TYPES}",
    "d, [a], b, c?, p?",
)
@row(
    "red",
    f"relaxed|release? {_SCOPE} {_SPACE} {_OPS} noftz? L2::cache_hint? {_VECTOR} {_ATOM_TYPES}",
    "[a], b, p?",
)
def atomic(b, ins):
    kind = ins.modifiers[-1]
    name = ins.one_of(*ATOMIC_NAMES)
    red = ins.name == "red"
    operands = list(ins.operands)
    if ins.has("L2::cache_hint"):
        operands.pop()
    target = None if red else operands.pop(0)
    address, value = operands[0], operands[1]
    third = operands[2] if len(operands) > 2 else None
    if (third is not None) != (name == "cas"):
        raise b.error("only .cas takes two value operands")
    check_atomic(b, ins, name, kind)
    items = elements(value)
    check_vector(b, ins, items)
    size = WIDTHS[kind] // 8
    a, offset, frame = b.address(address)
    values = b.row_list([b.value(item, kind) for item in items])
    thirds = b.row_list([b.value(third, kind)]) if third is not None else -1
    results = -1
    if target is not None and not isinstance(target, Sink):
        results = b.row_list([b.dest(item) for item in elements(target)])
    count = len(items)
    code = b.emit(
        O.ATOM,
        d=results,
        a=a,
        b=values,
        c=thirds,
        e=ATOMIC_NAMES[name] | ATOMIC_KINDS[kind] << 8,
        x=count | size << 8,
        y=(L.SPACE_FRAME if frame else space_of(ins)) | order_bits(ins, True),
        z=offset,
        defs="",
        uses="a",
        def_list=(results, count) if results >= 0 else None,
        use_list=(values, count),
    )
    if thirds >= 0 and b.decoder.lists[thirds] >= 0:
        code.uses.append(("v", thirds))


def check_atomic(b, ins, name: str, kind: str) -> None:
    """Types that PTX knows for each operation."""
    known = {
        "and": "b32 b64",
        "or": "b32 b64",
        "xor": "b32 b64",
        "exch": "b32 b64 u32 u64 s32 s64 f32 f64",
        "cas": "b16 b32 b64 u32 u64 s32 s64 f32 f64",
        "inc": "u32",
        "dec": "u32",
        "add": "u32 s32 u64 s64 f16 f16x2 bf16 bf16x2 f32 f64",
        "min": "u32 s32 u64 s64 f16 f16x2 bf16 bf16x2",
        "max": "u32 s32 u64 s64 f16 f16x2 bf16 bf16x2",
    }[name].split()
    if kind not in known:
        raise b.error(f"{ins.name}.{name} is not defined for .{kind}")
    if ins.one_of("v2", "v4", "v8") and kind not in ("f16", "f16x2", "bf16", "bf16x2", "f32"):
        raise b.error(f"vector {ins.name} is not defined for .{kind}")


_WINDOWS = {"shared": (L.SHARED_WINDOW, 0xFFFFFFFF), "shared::cta": (L.SHARED_WINDOW, 0xFFFFFFFF),
            "shared::cluster": (L.SHARED_WINDOW, 0xFFFFFFFF), "local": (L.LOCAL_WINDOW, (1 << 40) - 1)}


@row("cvta", "to? global|shared|shared::cta|shared::cluster|local|const|param|param::entry u32|u64", "d, a")
def convert_address(b, ins):
    d = b.dest(ins.operands[0])
    space = next(m for m in ins.modifiers if m not in ("to", "u32", "u64"))
    source = b.value(ins.operands[1], "b64")
    if space.startswith("param") and not ins.has("to"):
        # A parameter's address has its window already, unless it went through a 32-bit register.
        b.integer(O.OR, 64, d, source, b.constant(L.PARAMETER_WINDOW))
    elif space not in _WINDOWS:
        b.integer(O.MOV, 64, d, source)
    elif ins.has("to"):
        b.integer(O.AND, 64, d, source, b.constant(_WINDOWS[space][1]))
    else:
        b.integer(O.ADD, 64, d, source, b.constant(_WINDOWS[space][0]))


@row("mapa", "shared::cluster? u32|u64", "d, a, b")
def map_to_rank(b, ins):
    """The same offset in the shared memory of another CTA; generic and shared addresses keep their upper
    bits."""
    width = WIDTHS[ins.modifiers[-1]]
    rank, cleared = b.temporary(), b.temporary()
    b.integer(O.SHL, 32, rank, b.value(ins.operands[2], "u32"), b.constant(L.RANK_SHIFT))
    b.integer(
        O.AND, width, cleared, b.value(ins.operands[1], f"b{width}"), b.constant(~(0xFF << L.RANK_SHIFT))
    )
    b.integer(O.OR, width, b.dest(ins.operands[0]), cleared, rank)


@row("getctarank", "shared::cluster? u32|u64", "d, a")
def rank_of_address(b, ins):
    b.integer(O.BFE, 64, b.dest(ins.operands[0]), b.value(ins.operands[1], ins.modifiers[-1]),
              b.constant(L.RANK_SHIFT), b.constant(8))


@row("membar", "cta|gl|sys")
@row("fence", "sc|acq_rel|acquire|release? cta|cluster|gpu|sys")
@row("fence", "acquire|release sync_restrict::shared::cta|sync_restrict::shared::cluster cluster")
@row("fence.mbarrier_init", "release cluster")
@row("fence.proxy.tensormap::generic", "release|acquire cta|cluster|gpu|sys", "[a]?, b?")
@row("fence.proxy.alias")
@row("membar.proxy", "alias|async")
def fence(b, ins):
    b.emit(O.FENCE)


@row("fence.proxy.async", "global|shared::cta|shared::cluster?")
def fence_proxy(b, ins):
    b.emit(O.FENCE_PROXY)


@row(
    "fence.proxy.async::generic",
    "acquire|release sync_restrict::shared::cta|sync_restrict::shared::cluster cluster",
)
def fence_proxy_and_memory(b, ins):
    b.emit(O.FENCE)
    b.emit(O.FENCE_PROXY)


@row("prefetch", "global|local? L1|L2|L2::evict_last|L2::evict_normal", "[a]")
@row("prefetch", "const|param? tensormap", "[a]")
@row("prefetchu", "L1", "[a]")
@row("discard", "global? L2 128B?", "[a], b")
@row("applypriority", "global? L2::evict_normal", "[a], b")
@row("pmevent", "mask?", "a")
@row("nanosleep", "u32", "a")
@row("griddepcontrol", "launch_dependents|wait")
def no_effect(b, ins):
    """Hints and launch control without a meaning for one grid that runs alone."""
    b.emit(O.NOP)


@row("createpolicy", "fractional L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged "
     "L2::evict_first|L2::evict_unchanged? b64", "d, a?")
def create_policy(b, ins):
    # The values that ptxas folds a fraction of 1.0 to; they have no functional meaning.
    policy = {"L2::evict_first": 0x12F0000000000000, "L2::evict_last": 0x14F0000000000000,
              "L2::evict_unchanged": 0x16F0000000000000, "L2::evict_normal": 0x10F0000000000000}
    primary = next(m for m in ins.modifiers if m.startswith("L2::"))
    b.integer(O.MOV, 64, b.dest(ins.operands[0]), b.constant(policy[primary]))


@row("createpolicy.range", "global? L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged "
     "L2::evict_first|L2::evict_unchanged? b64", None)
@row("createpolicy.cvt", "L2 b64", None)
def create_range_policy(b, ins):
    b.integer(O.MOV, 64, b.dest(ins.operands[0]), b.constant(0x12F0000000000000))
