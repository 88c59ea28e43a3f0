"""Small operations of a loop over time by C code, compiled on the machine where it runs.

With feedback at every position, a step has few rows: each of torch's operations takes microseconds of which most are
not arithmetic, and none is shared among threads. ``kernels.c`` takes each norm, each gated unit and each attention in
one call. The compiler is the machine's own (``$CC``, or ``cc``), takes about a second, and is asked once: the library
is kept in the user's cache, under a name that says what it was made of.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from pipeline.errors import ConfigError

SOURCE = Path(__file__).with_name("kernels.c")
# The linker is not told of -ffast-math: it would let the whole process take small numbers for zero.
FLAGS = ("-O3", "-march=native", "-ffast-math", "-fPIC")
# The first is compiled with, but not linked to, a library of threads: torch has brought one, and two would fight for
# the cores. Where torch's is of another kind the library cannot be loaded, and the second takes its place.
THREADS = ("-fopenmp", "-fopenmp-simd")
MOST_HEAD = 1024
"""Widest head that attention takes."""


class Attention(ctypes.Structure):
    """Sizes and places of one attention; see ``struct Attention`` in ``kernels.c``.

    Attributes:
        held: tensors that it points to and nobody else may hold.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "n", "kv_heads", "group", "width", "own", "slots", "first")),
        *((name, ctypes.c_int64) for name in ("near", "begin", "stop", "causal", "again", "threads", "head_step")),
        *((name, ctypes.c_int64) for name in ("table_row_step", "table_step", "mask_row_step", "mask_step")),
        ("least", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("x", "w", "cos", "sin", "mask", "keys", "values", "factors", "scaled")),
        *((name, ctypes.c_void_p) for name in ("weights", "out", "gradient", "of_keys", "of_values", "scores", "of_x")),
        ("sums", ctypes.c_void_p),
    )
    held: tuple[Tensor | None, ...]


class Kernels:
    """The compiled operations, on tensors of the host in float32 or float64 (``take``); see ``kernels.c``.

    Args:
        path: compiled library.

    Attributes:
        threads: threads that rows are shared among: those that torch has when this is made.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, whole, real, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
        arguments = {
            "norm": [*[pointer] * 4, *[whole] * 2, real, threads],
            "norm_back": [*[pointer] * 6, *[whole] * 2, threads],
            "multiply": [*[pointer] * 3, *[whole] * 3, threads],
            "swiglu": [*[pointer] * 2, *[whole] * 2, threads],
            "swiglu_back": [*[pointer] * 3, *[whole] * 2, threads],
            "attend": [ctypes.POINTER(Attention)],
            "attend_back": [ctypes.POINTER(Attention)],
        }
        self._functions = {}
        for name, types in arguments.items():
            for dtype, suffix in ((torch.float32, "float"), (torch.float64, "double")):
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes, function.restype = types, None
                self._functions[name, dtype] = function
        self.threads = torch.get_num_threads()

    @staticmethod
    def take(x: Tensor) -> bool:
        """Return whether the operations take tensors like x."""
        return x.device.type == "cpu" and (x.dtype is torch.float32 or x.dtype is torch.float64)

    def norm(self, x: Tensor, weight: Tensor, least: float, out: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return y = x f weight, written to ``out`` if that is given, and f = 1 / sqrt(|x|^2 + least).

        Args:
            x: [..., width], contiguous.
            weight: [width].
            least: added to the squared norm.
            out: contiguous, like x.
        """
        width = x.shape[-1]
        rows = x.numel() // width
        y, factor = torch.empty_like(x) if out is None else out, x.new_empty(rows)
        call = self._functions["norm", x.dtype]
        call(x.data_ptr(), weight.data_ptr(), y.data_ptr(), factor.data_ptr(), rows, width, least, self.threads)
        return y, factor

    def norm_back(
        self, x: Tensor, weight: Tensor, factor: Tensor, gradient: Tensor, sums: Tensor, out: Tensor | None
    ) -> Tensor:
        """Return the gradient of ``norm``'s x, written to ``out`` if that is given.

        Args:
            x: as given to ``norm``.
            weight: likewise.
            factor: f.
            gradient: of y.
            sums: gradient x f is added to it, [threads, width].
            out: contiguous, like x.
        """
        gradient, of_x, width = gradient.contiguous(), torch.empty_like(x) if out is None else out, x.shape[-1]
        self._functions["norm_back", x.dtype](
            x.data_ptr(),
            weight.data_ptr(),
            factor.data_ptr(),
            gradient.data_ptr(),
            of_x.data_ptr(),
            sums.data_ptr(),
            factor.numel(),
            width,
            self.threads,
        )
        return of_x

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x W [rows, out] for x [rows, in] and W [in, out], both contiguous."""
        (rows, height), width = x.shape, weight.shape[1]
        y = x.new_empty(rows, width)
        call = self._functions["multiply", x.dtype]
        call(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, height, width, self.threads)
        return y

    def swiglu(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return silu(gate) * up for both behind each other, [..., 2 width], contiguous."""
        width = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], width) if out is None else out
        self._functions["swiglu", x.dtype](x.data_ptr(), y.data_ptr(), y.numel() // width, width, self.threads)
        return y

    def swiglu_back(self, x: Tensor, gradient: Tensor, out: Tensor | None) -> Tensor:
        """Return the gradient of ``swiglu``'s x."""
        gradient, of_x, width = gradient.contiguous(), torch.empty_like(x) if out is None else out, gradient.shape[-1]
        rows = gradient.numel() // width
        self._functions["swiglu_back", x.dtype](
            x.data_ptr(), gradient.data_ptr(), of_x.data_ptr(), rows, width, self.threads
        )
        return of_x

    def attend(self, dtype: torch.dtype, call: Attention) -> None:
        """Attend, from the packed projection to what the output projection reads."""
        self._functions["attend", dtype](call)

    def attend_back(self, dtype: torch.dtype, call: Attention) -> None:
        """Write the gradient of ``call.x``, and add those of keys and values."""
        self._functions["attend_back", dtype](call)


def chosen(which: str) -> Kernels | None:
    """Return the operations that a setting asks for; None: torch's.

    Args:
        which: ``torch``, ``compiled``, or ``auto``: compiled where that is possible.

    Raises:
        ConfigError: they are to be compiled, and cannot be.
    """
    if which == "auto":
        return _at_hand()
    return compiled() if which == "compiled" else None


@functools.cache
def _at_hand() -> Kernels | None:
    try:
        return compiled()
    except ConfigError:
        return None


@functools.cache
def compiled() -> Kernels:
    """Return the operations, compiled if they have not been.

    Raises:
        ConfigError: there is no compiler, or it fails.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise ConfigError(
            f"solver.kernels=compiled needs a C compiler, and there is no {compiler[0]!r}: install one, name it in "
            "$CC, or set solver.kernels=torch"
        )
    failure = ""
    for threads in THREADS:
        try:
            return Kernels(_library(compiler, [*FLAGS, threads]))
        except subprocess.CalledProcessError as error:
            failure = (error.stderr.decode(errors="replace").split("\n")[0] or str(error)).strip()
        except OSError as error:
            failure = str(error)
    raise ConfigError(f"solver.kernels=compiled: {compiler[0]} made no library of {SOURCE}: {failure}")


def _library(compiler: list[str], flags: list[str]) -> Path:
    """Return the library that a compiler makes of the source, from the user's cache if it is there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "backfeed"
    made_of = repr((SOURCE.read_bytes(), compiler, flags, platform.machine(), _processor()))
    path = cache / f"kernels-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # other processes may be at it: renamed when whole
            made = Path(folder) / path.name
            part = str(made.with_suffix(".o"))
            for arguments in ([*flags, "-c", str(SOURCE), "-o", part], ["-shared", part, "-o", str(made), "-lm"]):
                subprocess.run([*compiler, *arguments], check=True, capture_output=True)
            made.replace(path)
    return path


def _processor() -> str:
    """Return what tells processors apart that share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
