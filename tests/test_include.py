"""Every wrapper of ptx/include, assembled alone for every target it claims and refused one below; and the asm policy.

The heading above a wrapper is read: `PTX ISA x.y, sm_NN` claims every target from sm_NN up, `PTX ISA x.y, sm_NNa sm_MMa ...`
exactly those, and no target at all means any. The call is made up from the signature; `// example:` overrides it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from msa_cudacore import pool
from msa_cudacore.launch.compile import CompileError, compile_cubin
from msa_cudacore.ptx.nvrtc import supported_archs
from msa_cudacore.ptx.source import INCLUDE_DIR, load_text

KERNELS = Path(pool.__file__).parent / "kernels"

WRAPPER = re.compile(
    r"(?P<heading>(?:^//[^\n]*\n)+)(?P<template>^template <[^\n]*>\n)?"
    r"^__device__ __forceinline__ (?P<result>[\w:]+) (?P<name>\w+)\((?P<parameters>[^{]*?)\) \{(?P<body>.*?\n?)\}\n",
    re.M | re.S,
)
CLAIM = re.compile(r"PTX ISA (\d+\.\d+)(?:, ((?:sm_\w+ ?)+))?")

# Instructions that read, write or order memory, or that every lane must reach at its place in the program.
ORDERED = ("mbarrier", "fence", "barrier", "bar", "cp", "ld", "ldmatrix", "st", "tcgen05", "griddepcontrol", "setmaxnreg",
           "prefetch", "red", "atom")

PRELUDE = """
template <class T> __device__ void consume(void* sink, T value) { *reinterpret_cast<T*>(sink) = value; }
"""


@dataclass(frozen=True)
class Wrapper:
    """One instruction's function as its header has it."""

    header: str
    name: str
    heading: str
    template: str
    result: str
    parameters: tuple[str, ...]
    body: str

    def __str__(self) -> str:
        return f"{self.header.removesuffix('.cuh')}-{self.name}-{len(self.heading)}"

    @property
    def opcode(self) -> str:
        """The first mnemonic of the heading."""
        return self.heading.removeprefix("// ").split()[0].rstrip(";")

    @property
    def claimed(self) -> tuple[str, ...]:
        """The targets that the heading claims, of those that this NVRTC knows."""
        match = CLAIM.search(self.heading)
        assert match, f"{self.header}: {self.name}: no `PTX ISA x.y` above the wrapper"
        known = supported_archs()
        named = (match.group(2) or f"sm_{known[0]}").split()
        if len(named) > 1 or not named[0][-1].isdigit():
            return tuple(arch for arch in named if int(re.sub(r"\D", "", arch)) in known)
        return tuple(f"sm_{number}" for number in known if number >= int(named[0].removeprefix("sm_")))

    @property
    def refused(self) -> tuple[str, ...]:
        """The targets just below: the next older part, or the same part without its letter."""
        known = supported_archs()
        first = self.claimed[0]
        if not first[-1].isdigit():
            return tuple(arch[:-1] for arch in self.claimed)
        older = [number for number in known if number < int(first.removeprefix("sm_"))]
        return (f"sm_{older[-1]}",) if older else ()

    def kernel(self, name: str = "example") -> str:
        """A kernel that executes the wrapper once and keeps its results."""
        example = re.search(r"// example: (.*)", self.heading)
        lines = [example.group(1)] if example else self._call()
        body = "\n  ".join(lines)
        return (
            f'extern "C" __global__ void {name}(SharedAddress address, u32 word, u64 wide, float real, void* pointer,\n'
            f"    const __grid_constant__ TestMap map, u32* sink) {{\n  {body}\n}}\n"
        )

    def _call(self) -> list[str]:
        declared, arguments, kept = [], [], []
        for index, parameter in enumerate(self.parameters):
            local = f"local{index}"
            array = re.fullmatch(r"(const )?(\w+) \(&\w+\)\[(\d+)\]", parameter)
            reference = re.fullmatch(r"(float|u32)& \w+", parameter)
            if array:
                value = "word + i" if array.group(2) == "u32" else "real * i"
                declared.append(
                    f"{array.group(2)} {local}[{array.group(3)}]; for (u32 i = 0; i < {array.group(3)}; ++i) {local}[i] = {value};"
                )
                kept.append(f"for (u32 i = 0; i < {array.group(3)}; ++i) consume(sink + 4 * i, {local}[i]);")
                arguments.append(local)
            elif reference:
                declared.append(f"{reference.group(1)} {local};")
                kept.append(f"consume(sink + {4 * index}, {local});")
                arguments.append(local)
            else:
                arguments.append(VALUES[parameter.rsplit(" ", 1)[0]])
        template = f"<{'1' if 'bool' not in self.template else 'true'}>" if self.template else ""
        call = f"{self.name}{template}({', '.join(arguments)})"
        return [*declared, f"{call};" if self.result == "void" else f"consume(sink + 1024, {call});", *kept]


VALUES = {
    "u32": "word", "SharedAddress": "address", "TensorAddress": "word", "u16": "static_cast<u16>(word)", "u64": "wide",
    "i32": "static_cast<i32>(word)", "i64": "static_cast<i64>(wide)", "float": "real", "bool": "word != 0",
    "const void*": "pointer", "void*": "pointer", "const TensorMap&": "map", "const uint4&": "make_uint4(word, word, word, word)",
    "uint4": "make_uint4(word, word, word, word)", "uint2": "make_uint2(word, word)", "const u32*": "sink", "u32*": "sink",
}


def wrappers_of(header: str, text: str) -> list[Wrapper]:
    """Functions that emit an instruction: an asm statement with text. One without text only pins registers."""
    found = []
    for match in WRAPPER.finditer(text):
        if re.search(r'\basm\b(?: volatile)?\(\s*"[^"]', match["body"]):
            parameters = tuple(p.strip() for p in re.split(r",\s*", match["parameters"].strip()) if p.strip())
            found.append(
                Wrapper(header, match["name"], match["heading"], match["template"] or "", match["result"], parameters, match["body"])
            )
    return found


@functools.lru_cache(maxsize=None)
def wrappers() -> tuple[Wrapper, ...]:
    found: list[Wrapper] = []
    for path in sorted(INCLUDE_DIR.glob("*.cuh")):
        found += wrappers_of(path.name, path.read_text(encoding="utf-8"))
    return tuple(found)


def module(kernels: list[str], *headers: str) -> str:
    """A translation unit; TensorMap stands for 64-byte words where its header is not included."""
    includes = "".join(f'#include "{header}"\n' for header in dict.fromkeys(headers))
    test_map = "using TestMap = TensorMap;" if "cp_async_bulk_tensor.cuh" in headers else "struct TestMap { u64 words[16]; };"
    return load_text(f"{includes}using namespace ptx;\n{test_map}\n{PRELUDE}\n{''.join(kernels)}")


def test_headers_are_found_and_named_after_their_instruction():
    assert len(wrappers()) >= 40
    instruction = re.compile(r'\basm\b(?: volatile)?\(\s*"[^"]')
    asm_blocks = sum(len(instruction.findall(path.read_text())) for path in INCLUDE_DIR.glob("*.cuh"))
    counted = sum(len(instruction.findall(wrapper.body)) for wrapper in wrappers())
    assert counted == asm_blocks, "an asm statement lies outside a wrapper that this test understands"
    for wrapper in wrappers():
        family = re.split(r"[.\s]", wrapper.opcode)[0]
        if family != "mov":
            assert wrapper.name.split("_")[0] == family, f"{wrapper.header}: {wrapper.name} emits {wrapper.opcode}"
        assert family in wrapper.body, f"{wrapper.header}: {wrapper.name}: its heading names {wrapper.opcode}"


@pytest.mark.parametrize("arch", sorted({arch for wrapper in wrappers() for arch in wrapper.claimed}))
def test_every_claimed_target_accepts_the_wrapper(arch):
    claiming = [wrapper for wrapper in wrappers() if arch in wrapper.claimed]
    kernels = [wrapper.kernel(f"example{index}") for index, wrapper in enumerate(claiming)]
    resources = compile_cubin(module(kernels, *(w.header for w in claiming)), arch, use_cache=False).resources()
    assert len(resources) == len(claiming)


@pytest.mark.parametrize("wrapper", [w for w in wrappers() if w.refused], ids=str)
def test_the_target_below_refuses_the_wrapper(wrapper):
    text = module([wrapper.kernel()], wrapper.header)
    for arch in wrapper.refused:
        with pytest.raises(CompileError) as error:
            compile_cubin(text, arch, use_cache=False)
        assert "ptxas" in error.value.log, f"refused for another reason than its target:\n{error.value.log}"


@pytest.mark.parametrize("wrapper", wrappers(), ids=str)
def test_ordered_instructions_are_volatile_and_clobber_memory(wrapper):
    family = re.split(r"[.\s]", wrapper.opcode)[0]
    statements = re.findall(r"\basm\b(?: volatile)?\(.*?\);", wrapper.body, re.S)
    instructions = [s for s in statements if family in s]
    assert instructions
    for statement in instructions:
        if family in ORDERED:
            assert statement.startswith("asm volatile"), f"{wrapper.name}: not volatile"
            assert statement.rstrip(");").rstrip().endswith('"memory"'), f"{wrapper.name}: no memory clobber"


def test_kernels_contain_no_asm():
    files = [path for path in KERNELS.iterdir() if path.suffix in (".cu", ".cuh")]
    assert len(files) >= 6
    for path in files:
        assert not re.search(r"\basm\b", path.read_text()), f"{path.name}: asm belongs into ptx/include"


def test_a_wrong_claim_is_noticed():
    """The checks above can fail: a wrapper that claims too much, and one that claims too little."""
    text = "// redux.sync.add.s32 d, a, m;  PTX ISA 7.0, {arch}.\n" + (
        "__device__ __forceinline__ u32 redux_sync_add(u32 a) {{\n"
        '  u32 d;\n  asm("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(a));\n  return d;\n}}\n'
    )
    for arch, verdict in (("sm_75", "claims too much"), ("sm_90", "claims too little"), ("sm_80", "right")):
        (wrapper,) = wrappers_of("x.cuh", text.format(arch=arch))
        source = module([text.format(arch=arch), wrapper.kernel()], "types.cuh")

        def accepted(target: str) -> bool:
            try:
                compile_cubin(source, target, use_cache=False)
            except CompileError:
                return False
            return True

        fits = all(map(accepted, wrapper.claimed)) and not any(map(accepted, wrapper.refused))
        assert fits == (verdict == "right")
