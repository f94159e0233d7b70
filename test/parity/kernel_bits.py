"""Runs the machine code of kernels beside their calls by ATen, bit for bit.

The kernels are written as text, compiled by `fsdp-opt --fsdp-compile-kernels`, and called here
without the runtime. ATen's side is this process: ATEN_CPU_CAPABILITY says whose kernels it takes.
Prints one line for each kernel with another bit, and the number of kernels; fails if there is one.
A NaN is equal to any other, whatever its payload.

Kernels for a GPU are compiled where the compiler is, and run where the GPU is:

    python test/parity/kernel_bits.py --target sm_90 --save kernels.pickle
    python test/parity/kernel_bits.py --target sm_90 --load kernels.pickle
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import pickle
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

MLIR = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.bool: "i1"}
BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40, 3e38, -3e38, 1e-38)


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    strides: tuple[int, ...] | None = None  # None: row-major

    @property
    def text(self) -> str:
        return (
            f"tensor<{'x'.join(map(str, self.shape))}{'x' if self.shape else ''}{MLIR[self.dtype]}>"
        )

    def make(self, device: torch.device | str = "cpu") -> torch.Tensor:
        if self.strides is None:
            return torch.empty(self.shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def fill(self, generator: torch.Generator) -> torch.Tensor:
        """Numbers of all magnitudes, some of them special."""
        tensor = self.make()
        if self.dtype == torch.bool:
            return tensor.copy_(torch.rand(self.shape, generator=generator) < 0.5)
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        values *= torch.exp(torch.randn(self.shape, generator=generator, dtype=torch.float64) * 4)
        pick = torch.randint(40 * len(SPECIAL), self.shape, generator=generator)
        for index, special in enumerate(SPECIAL):
            values[pick == index] = special
        return tensor.copy_(values)


@dataclass(frozen=True)
class Call:
    """An operator on "%0", "%1", … (operands, then results of calls) and constants."""

    callee: str
    args: tuple[Any, ...]
    dtype: torch.dtype | None = None  # of the result; None: of the first operand

    def run(self, values: list[torch.Tensor]) -> torch.Tensor:
        packet, _, overload = self.callee.removeprefix("aten::").partition(".")
        args = [
            values[int(arg[1:])] if isinstance(arg, str) and arg.startswith("%") else arg
            for arg in self.args
        ]
        function = getattr(getattr(torch.ops.aten, packet), overload or "default")
        given = list(zip(function._schema.arguments, args, strict=True))
        named = {formal.name: arg for formal, arg in given if formal.kwarg_only}
        if packet == "_to_copy":  # no number stands for a dtype here
            named["dtype"] = self.dtype
        return function(*(arg for formal, arg in given if not formal.kwarg_only), **named)

    def words(self) -> str:
        def word(arg: Any) -> str:
            if arg is None:
                return "none"
            if isinstance(arg, str):
                return arg if arg.startswith("%") else f'"{arg}"'
            if isinstance(arg, bool):
                return str(arg).lower()
            return f"{arg:e}" if isinstance(arg, float) else str(arg)

        return ", ".join(word(arg) for arg in self.args)


@dataclass(frozen=True)
class Kernel:
    name: str
    operands: tuple[Tensor, ...]
    calls: tuple[Call, ...]
    results: tuple[int, ...]  # numbers of values
    strides: tuple[int, ...] | None = None
    whole: bool = False

    def specs(self) -> list[Tensor]:
        """Those of all values."""
        shape = torch.broadcast_shapes(*(operand.shape for operand in self.operands))
        specs = list(self.operands)
        for call in self.calls:
            first = next(a for a in call.args if isinstance(a, str) and a.startswith("%"))
            dtype = call.dtype or specs[int(first[1:])].dtype
            specs.append(Tensor(tuple(shape), dtype, self.strides))
        return specs

    @property
    def text(self) -> str:
        specs = self.specs()
        arguments = ", ".join(f"%{i}: {t.text}" for i, t in enumerate(self.operands))
        lines = [f"fsdp.kernel @{self.name} {{", f"^bb0({arguments}):"]
        for index, call in enumerate(self.calls, len(self.operands)):
            taken = [a for a in call.args if isinstance(a, str) and a.startswith("%")]
            types = ", ".join(specs[int(a[1:])].text for a in taken)
            lines.append(
                f'%{index} = aten.call "{call.callee}"({call.words()}) : ({types}) -> '
                f"{specs[index].text}"
            )
        names = ", ".join(f"%{i}" for i in self.results)
        types = ", ".join(specs[i].text for i in self.results)
        lines.append(f"fsdp.kernel_return {names} : {types}")
        attributes = []
        if any(operand.strides for operand in self.operands):
            arrays = (", ".join(map(str, operand.strides or ())) for operand in self.operands)
            texts = (f"array<i64: {a}>" if a else "array<i64>" for a in arrays)
            attributes.append(f"operand_strides = [{', '.join(texts)}]")
        if self.strides:
            attributes.append(f"strides = array<i64: {', '.join(map(str, self.strides))}>")
        if self.whole:
            attributes.append("whole")
        lines.append(f"}} {{{', '.join(attributes)}}}" if attributes else "}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Code:
    image: bytes
    entry: int
    imports: tuple[str, ...]
    trips: int


def is_gpu(target: str) -> bool:
    return target.startswith("sm_")


def compile_kernels(kernels: list[Kernel], target: str, folder: Path) -> list[Code]:
    from harness import BIN, execute  # which hosts with a GPU need not have

    source, compiled = folder / "kernels.mlir", folder / "compiled.mlir"
    text = "\n".join(kernel.text for kernel in kernels)
    if is_gpu(target):
        device = f'{{arch = "{target}", device = "cuda", torch = "{torch.__version__}"}}'
        text = f"module attributes {{fsdp.captured_for = {device}}} {{\n{text}}}\n"
    source.write_text(text)
    option = f"--fsdp-compile-kernels=targets={target}"
    execute([BIN / "fsdp-opt", source, option, "-o", compiled])
    pattern = re.compile(
        r'"?' + target + r'"? = \{entry = (\d+) : i64, image = "([0-9a-f]*)", imports = \[(.*?)\]\}'
        r".*?trips = (\d+) : i64"
    )
    found = [
        Code(bytes.fromhex(image), int(entry), tuple(re.findall(r'"(\w+)"', imports)), int(trips))
        for entry, image, imports, trips in pattern.findall(compiled.read_text())
    ]
    assert len(found) == len(kernels), f"expected {len(kernels)} kernels, got {len(found)}"
    return found


class Function:
    """A kernel's function, in memory that may be executed."""

    TYPE = ctypes.CFUNCTYPE(
        None,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int64,
        ctypes.c_int64,
    )
    LIBRARY = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

    def __init__(self, code: Code) -> None:
        self.trips = code.trips
        self.memory = mmap.mmap(
            -1, len(code.image), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        )
        self.memory.write(code.image)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.run = self.TYPE(address + code.entry)
        imports = [
            ctypes.cast(getattr(self.LIBRARY, name), ctypes.c_void_p).value for name in code.imports
        ]
        self.imports = (ctypes.c_void_p * max(1, len(imports)))(*imports)

    def __call__(self, tensors: list[torch.Tensor], cuts: list[int]) -> None:
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        for begin, end in itertools.pairwise([0, *cuts, self.trips]):
            self.run(pointers, self.imports, begin, end)


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class GpuFunction:
    """The same of a GPU, which runs all of a kernel at once."""

    BLOCK = 256  # include/fsdp/Plan/KernelAbi.h

    def __init__(self, code: Code) -> None:
        self.trips = code.trips
        self.cudart = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        self.cudart.cudaLaunchKernel.argtypes = [
            ctypes.c_void_p,
            Dim3,
            Dim3,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]
        library, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()
        none = (None, None, 0, None, None, 0)
        self.check(
            self.cudart.cudaLibraryLoadData(ctypes.byref(library), code.image + b"\0", *none)
        )
        self.check(
            self.cudart.cudaLibraryGetKernel(ctypes.byref(self.kernel), library, b"fsdp_kernel")
        )

    @staticmethod
    def check(status: int) -> None:
        assert status == 0, f"CUDA error {status}"

    def __call__(self, tensors: list[torch.Tensor], cuts: list[int]) -> None:
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        arguments = (ctypes.c_void_p * len(tensors))(*(ctypes.addressof(p) for p in pointers))
        blocks = (self.trips + self.BLOCK - 1) // self.BLOCK
        stream = torch.cuda.current_stream().cuda_stream
        grid, block = Dim3(blocks, 1, 1), Dim3(self.BLOCK, 1, 1)
        launch = self.cudart.cudaLaunchKernel
        self.check(launch(self.kernel, grid, block, arguments, 0, stream))


def differing(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How many elements have other bits."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    bits = BITS[ours.dtype]
    equal = ours.contiguous().view(bits) == theirs.contiguous().view(bits)
    return int((~(equal | (ours.isnan() & theirs.isnan()))).sum())


def compare(
    kernel: Kernel, function: Function | GpuFunction, operands: list[torch.Tensor], cuts: list[int]
) -> int:
    specs = kernel.specs()
    values = list(operands)
    for call in kernel.calls:
        values.append(call.run(values))
    results = [specs[i].make(operands[0].device) for i in kernel.results]
    function([*operands, *results], cuts)
    return sum(differing(r, values[i]) for r, i in zip(results, kernel.results, strict=True))


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16

#: Of one result of the operands' dtype: the operator, its arguments, dtypes.
SINGLE: list[tuple[str, tuple[Any, ...], tuple[torch.dtype, ...]]] = [
    ("aten::abs", ("%0",), (F32, F64, BF16)),
    ("aten::neg", ("%0",), (F32, F64, BF16)),
    ("aten::reciprocal", ("%0",), (F32, F64, BF16)),
    ("aten::relu", ("%0",), (F32, F64, BF16)),
    ("aten::rsqrt", ("%0",), (F32, F64)),
    ("aten::pow.Tensor_Scalar", ("%0", 2), (F32, F64, BF16)),
    ("aten::pow.Tensor_Scalar", ("%0", 3.0), (F32, F64)),
    ("aten::clone", ("%0", None), (F32, F64, BF16)),
    ("aten::add.Tensor", ("%0", "%1", 1), (F32, F64, BF16)),
    ("aten::sub.Tensor", ("%0", "%1", 1), (F32, F64, BF16)),
    ("aten::mul.Tensor", ("%0", "%1"), (F32, F64, BF16)),
    ("aten::div.Tensor", ("%0", "%1"), (F32, F64, BF16)),
    ("aten::add.Scalar", ("%0", 0.3, 1), (F32, F64)),
    ("aten::sub.Scalar", ("%0", 7, 1), (F32, F64)),
    ("aten::mul.Scalar", ("%0", 0.1), (F32, F64)),
    ("aten::mul.Tensor", ("%0", 0.7), (F32, F64)),
    ("aten::div.Scalar", ("%0", 3), (F32, F64)),
    ("aten::sigmoid_backward", ("%0", "%1"), (F32, F64, BF16)),
    ("aten::threshold_backward", ("%0", "%1", 0), (F32, F64, BF16)),
]
#: What is not in a kernel for a GPU, and what is there alone.
CPU_ALONE = {"aten::relu", "aten::rsqrt", "aten::div.Scalar", "aten::threshold_backward"}
WIDE_ALONE = {"aten::sigmoid_backward", "aten::tanh_backward"}  # not in bfloat16
GPU_ALONE: list[tuple[str, tuple[Any, ...], tuple[torch.dtype, ...]]] = [
    ("aten::add.Scalar", ("%0", 0.3, 1), (BF16,)),
    ("aten::sub.Tensor", ("%0", 7, 1), (BF16,)),
    ("aten::mul.Scalar", ("%0", 0.1), (BF16,)),
    ("aten::mul.Tensor", ("%0", 0.7), (BF16,)),
]
#: Those that ATen computes otherwise where they do not fill its vectors.
WHOLE: list[tuple[str, tuple[Any, ...]]] = [
    ("aten::sigmoid", ("%0",)),
    ("aten::silu", ("%0",)),
    ("aten::silu_backward", ("%0", "%1")),
    ("aten::gelu", ("%0", "tanh")),
    ("aten::tanh_backward", ("%0", "%1")),
]
CASTS = [(F32, BF16), (BF16, F32), (F32, F64), (F64, F32)]


def numbers_of(args: tuple[Any, ...]) -> int:
    return sum(isinstance(arg, str) and arg.startswith("%") for arg in args)


def singles(target: str) -> list[tuple[str, tuple[Any, ...], tuple[torch.dtype, ...]]]:
    """On a GPU, those that need full vectors on a CPU are as others."""
    if not is_gpu(target):
        return SINGLE
    there = [entry for entry in SINGLE if entry[0] not in CPU_ALONE]
    return there + GPU_ALONE + [(callee, args, (F32, BF16)) for callee, args in WHOLE]


def single_kernels(target: str, source: random.Random) -> Iterator[Kernel]:
    """Each operator by itself: every length of a tail, several layouts, broadcasting."""
    for callee, args, dtypes in singles(target):
        for dtype in dtypes:
            count = numbers_of(args)
            call = (Call(callee, args),)
            for length in (*range(2, 36), 1000):
                yield Kernel("k", (Tensor((length,), dtype),) * count, call, (count,))
            rows = (source.randrange(2, 5), source.randrange(2, 7), source.randrange(2, 40))
            for own in itertools.product(*((n, 1) for n in rows)):
                operands = (Tensor(rows, dtype), Tensor(own, dtype))[:count]
                yield Kernel("k", operands, call, (count,))
            turned = (rows[1] * rows[2], rows[2], 1)
            other = (rows[2], rows[0] * rows[2], 1)
            for strides in (turned, other):
                operands = (Tensor(rows, dtype, strides),) * count
                yield Kernel("k", operands, call, (count,), strides)
    for callee, args in WHOLE:
        for dtype in (F32, BF16):
            count = numbers_of(args)
            for shape in ((64,), (3, 64), (5, 7, 192), (2, 64, 512)):
                operands = (Tensor(shape, dtype),) * count
                yield Kernel("k", operands, (Call(callee, args),), (count,), whole=True)
    for given, to in CASTS:
        for length in (*range(2, 36), 1000):
            call = Call("aten::_to_copy", ("%0", None, None, None, None, False, None), to)
            yield Kernel("k", (Tensor((length,), given),), (call,), (1,))
    for dtype in (F32, F64, BF16):
        operands = (Tensor((3, 33), torch.bool), Tensor((3, 33), dtype), Tensor((33,), dtype))
        yield Kernel("k", operands, (Call("aten::where.self", ("%0", "%1", "%2"), dtype),), (3,))


def chain(target: str, source: random.Random, dtype: torch.dtype) -> Kernel:
    """Some operators, each on what there is, in one of a few layouts."""
    shape = source.choice([(64,), (4, 32), (2, 3, 5, 16), (2, 4, 8, 32), (3, 129)])
    strides = None
    if len(shape) == 4 and source.random() < 0.5:
        _, h, s, d = shape
        strides = (h * s * d, d, h * d, 1)
    operands = []
    for _ in range(source.randrange(1, 5)):
        own = tuple(n if source.random() < 0.8 else 1 for n in shape)
        operands.append(Tensor(own, dtype))
    operands[0] = Tensor(shape, dtype, strides)
    choices = [entry for entry in singles(target) if dtype in entry[2]]
    calls: list[Call] = []
    # Every value has the shape of the results from the first call on.
    for _ in range(source.randrange(2, 16)):
        callee, args, _ = source.choice(choices)
        first = len(operands) + len(calls) - 1 if calls else 0
        there = len(operands) + len(calls)
        taken = {"%0": f"%{first}", "%1": f"%{source.randrange(there)}"}
        calls.append(
            Call(callee, tuple(taken.get(a, a) if isinstance(a, str) else a for a in args))
        )
    made = range(len(operands), len(operands) + len(calls))
    results = sorted({made[-1], *source.sample(made, source.randrange(len(made)))})
    return Kernel("k", tuple(operands), tuple(calls), tuple(results), strides)


def whole_chain(target: str, source: random.Random, dtype: torch.dtype) -> Kernel:
    """The same, of one row, with operators that need full vectors."""
    shape = source.choice([(64,), (6, 32), (2, 3, 5, 64), (2, 1536)])
    choices = [(c, a) for c, a, d in singles(target) if dtype in d] + WHOLE * 3
    count = source.randrange(1, 4)
    calls: list[Call] = []
    for _ in range(source.randrange(2, 10)):
        callee, args = source.choice(choices)
        there = count + len(calls)
        taken = {"%0": f"%{source.randrange(there)}", "%1": f"%{source.randrange(there)}"}
        calls.append(
            Call(callee, tuple(taken.get(a, a) if isinstance(a, str) else a for a in args))
        )
    results = tuple(range(count, count + len(calls)))
    return Kernel("k", (Tensor(shape, dtype),) * count, tuple(calls), results, whole=True)


def named(kernels: list[Kernel]) -> list[Kernel]:
    return [replace(kernel, name=f"k{i}") for i, kernel in enumerate(kernels)]


def is_wide_enough(kernel: Kernel) -> bool:
    specs = kernel.specs()[len(kernel.operands) :]
    pairs = zip(kernel.calls, specs, strict=True)
    return not any(call.callee in WIDE_ALONE and spec.dtype == BF16 for call, spec in pairs)


def make_kernels(target: str, seed: int, chains: int) -> list[Kernel]:
    source = random.Random(seed)
    kernels = list(single_kernels(target, source))
    kernels += [chain(target, source, source.choice([F32, F64, BF16])) for _ in range(chains)]
    kernels += [whole_chain(target, source, source.choice([F32, BF16])) for _ in range(chains)]
    if is_gpu(target):
        kernels = [replace(kernel, whole=False) for kernel in kernels if is_wide_enough(kernel)]
    return named(kernels)


def run_all(target: str, compiled: list[tuple[Kernel, Code]], seed: int) -> int:
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    failures = 0
    for kernel, code in compiled:
        operands = [spec.fill(generator) for spec in kernel.operands]
        function: Function | GpuFunction
        if is_gpu(target):
            function, cuts = GpuFunction(code), []
            operands = [operand.to("cuda") for operand in operands]
        else:
            function = Function(code)
            cuts = [] if kernel.whole else sorted(source.choices(range(code.trips + 1), k=2))
        if wrong := compare(kernel, function, operands, cuts):
            failures += 1
            print(f"{wrong} elements differ, cut at {cuts}:\n{kernel.text}")
    whose = (
        torch.cuda.get_device_name() if is_gpu(target) else torch.backends.cpu.get_cpu_capability()
    )
    print(f"{len(compiled)} kernels for {target}, ATen's {whose}, seed {seed}: {failures} differ")
    return failures


def unary_kernels(target: str) -> list[Kernel]:
    """Those of one float32, on 2^24 elements."""
    entries = [(c, a, False) for c, a, d in singles(target) if F32 in d and numbers_of(a) == 1]
    if not is_gpu(target):
        entries += [(c, a, True) for c, a in WHOLE if numbers_of(a) == 1]
    return named(
        [Kernel("k", (Tensor((1 << 24,)),), (Call(c, a),), (1,), whole=w) for c, a, w in entries]
    )


def run_every_input(target: str, compiled: list[tuple[Kernel, Code]]) -> int:
    """All 2^32 inputs, in parts of 2^24."""
    size = 1 << 24
    make = GpuFunction if is_gpu(target) else Function
    functions = [(kernel, make(code)) for kernel, code in compiled]
    wrong = [0] * len(functions)
    for part in range(1 << 8):
        device = "cuda" if is_gpu(target) else "cpu"
        bits = torch.arange(part * size, (part + 1) * size, dtype=torch.int64, device=device)
        operand = bits.to(torch.int32).view(F32)
        for index, (kernel, function) in enumerate(functions):
            wrong[index] += compare(kernel, function, [operand], [])
    for (kernel, _), count in zip(functions, wrong, strict=True):
        print(f"{kernel.calls[0].callee}{kernel.calls[0].args}: {count} of 2^32 inputs differ")
    return sum(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="x86-64-v3, x86-64-v4, or a GPU's sm_90")
    parser.add_argument("--folder", type=Path, help="keep what is compiled here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chains", type=int, default=300)
    parser.add_argument("--one-in", type=int, default=1, help="of the kernels, each n-th alone")
    parser.add_argument("--every-input", action="store_true")
    parser.add_argument("--save", type=Path, help="compile for another host, run nothing")
    parser.add_argument("--load", type=Path, help="run what was saved")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if args.load:
        compiled = pickle.loads(args.load.read_bytes())
    else:
        kernels = (
            unary_kernels(args.target)
            if args.every_input
            else make_kernels(args.target, args.seed, args.chains)
        )[:: args.one_in]
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.folder or Path(scratch)
            codes = compile_kernels(kernels, args.target, folder)
        compiled = list(zip(kernels, codes, strict=True))
    if args.save:
        args.save.write_bytes(pickle.dumps(compiled))
        return 0
    if args.every_input:
        return run_every_input(args.target, compiled) > 0
    return run_all(args.target, compiled, args.seed) > 0


if __name__ == "__main__":
    sys.exit(main())
