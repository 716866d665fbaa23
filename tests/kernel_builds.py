"""Kernels without a GPU: in Triton's interpreter for their numbers, compiled for an absent one for their code."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import standard
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

FILES = ("forecast", "capture", "rope_scatter_kv", "subset_kernel")
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.int32: "i32"}


def file(name: str) -> Any:
    """A module of the kernels; the package gives its functions under the same names."""
    return import_module(f"cachedit.kernels.{name}")


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the launchers take CPU tensors: every kernel, and what Triton itself has written in Triton, runs in numpy.

    What a launcher allocates is full of NaN, so that nothing it forgets to write goes unnoticed.
    """
    with pytest.MonkeyPatch.context() as patch, _language_kept():
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(InterpreterBuilder, "create_dot", _dot)
        for module in (*map(file, FILES), triton.language, standard):
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, JITFunction):
                    patch.setattr(module, name, InterpretedFunction(kernel.fn))
        torch.use_deterministic_algorithms(True)
        try:
            with np.errstate(divide="ignore"):  # the logarithm of nothing is -inf, as on a GPU
                yield
        finally:
            torch.use_deterministic_algorithms(False)


@contextmanager
def dispatched() -> Iterator[Counter[str]]:
    """Let the engines take the way of a GPU with CPU tensors; counts the kernels of attention that were launched."""
    launched: Counter[str] = Counter()

    def counted(name: str, launch: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            launched[name] += 1
            return launch(*arguments, **more)

        return call

    write, read, chosen = file("rope_scatter_kv"), file("subset_attention"), file("registration").run_on
    with interpreted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_operation", counted("write", write._launch))
        patch.setattr(read, "_operation", counted("read", read.launch, device=(1, 9)))
        for module in [module for name, module in sys.modules.items() if name.startswith("cachedit.")]:
            if vars(module).get("run_on") is chosen:
                patch.setattr(module, "run_on", lambda x: x.dtype != torch.float64)
        yield launched


@contextmanager
def _language_kept() -> Iterator[None]:
    """Undo what the interpreter leaves of itself in Triton's language, which no compiler understands."""
    core = triton.language.core
    owners = (triton.language, core, triton.language.math, standard, core.tensor, core.dtype, core.condition)
    kept = [(owner, dict(vars(owner))) for owner in (*owners, core.tensor_descriptor_base)]
    try:
        yield
    finally:
        for owner, members in kept:
            for name, value in members.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


_plain_dot = InterpreterBuilder.create_dot


def _dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter holds bf16 as integers, and multiplies those."""
    a, b = (
        TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), triton.language.float32)
        if x.dtype.scalar == triton.language.bfloat16
        else x
        for x in (a, b)
    )
    return _plain_dot(builder, a, b, *rest)


@dataclass
class Build:
    """A kernel as it would be launched, compiled.

    Attributes:
        ptx: its code.
        shared: bytes of shared memory.
        registers, local: of a thread; local memory is where registers spill to, in bytes.
    """

    ptx: str
    shared: int
    registers: int
    local: int

    def wide(self, what: str) -> int:
        """128-bit accesses to global memory: "ld" or "st", and "cp" for copies to shared memory."""
        pattern = r"cp\.async\.c[ag]\.shared\.global.*0x10" if what == "cp" else rf"{what}\.global\S*\.v4\.b32"
        return len(re.findall(pattern, self.ptx))


def builds(arch: int, launch: Callable[..., Any], *arguments: Any, **more: Any) -> list[Build]:
    """Compile every kernel that ``launch`` would start with these arguments, which may be on the meta device."""
    started: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in map(file, FILES):
            for name, kernel in list(vars(module).items()):
                if isinstance(kernel, JITFunction):
                    patch.setattr(module, name, _Recorder(kernel, started))
        launch(*arguments, **more)
    return [_compile(arch, *one) for one in started]


class _Recorder:
    def __init__(self, kernel: Any, started: list[Any]) -> None:
        self.kernel, self.started = kernel, started

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: self.started.append((self.kernel, args, kwargs))


def _compile(arch: int, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Build:
    """Compile with what Triton would know of these arguments at a launch: ones, multiples of 16, absent tensors."""
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    signature: dict[str, Any] = {}
    constants: dict[Any, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def enter(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(enter(one, (*path, k)) for k, one in enumerate(value))
        if value is None or (type(value) is int and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return "*" + NAMES[value.dtype]
        return "fp32" if isinstance(value, float) else "i64" if value >= 2**31 else "i32"

    for k, name in enumerate(kernel.arg_names):
        if name in kwargs:
            signature[name], constants[(k,)] = "constexpr", kwargs[name]
        else:
            signature[name] = enter(args[k], (k,))
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return Build(done.asm["ptx"], done.metadata.shared, *_resources(done.asm["cubin"]))


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as kept:
        kept.write(cubin)
        kept.flush()
        said = subprocess.run([tool, "--dump-resource-usage", kept.name], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(REG|LOCAL|STACK):(\d+)", said.stdout))
    return int(found["REG"]), int(found["LOCAL"]) + int(found["STACK"])
