"""Builds `trident._frame`: one Cython 3 module and the C++17 runtime, against the installed torch.

Objects are compiled in parallel and only when something they depend on changed: the compiler
writes each object's header dependencies (`-MMD`), and the exact command is stored beside the
object, so a new torch, Python or flag rebuilds. Works without a package index:

    python setup.py build_ext --inplace
    pip install --no-build-isolation .
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "trident"
PYTHON_VERSIONS = ((3, 11), (3, 13))  # first and last supported
TORCH_VERSIONS = ((2, 11), (2, 15))


def require(ok: bool, message: str) -> None:
    if not ok:
        sys.exit(f"trident cannot be built here: {message}")


def check_environment() -> None:
    """Refuses, before anything is compiled, what the built extension would refuse to load in."""
    here = sys.version_info[:2]
    first, last = ("{}.{}".format(*version) for version in PYTHON_VERSIONS)
    require(
        PYTHON_VERSIONS[0] <= here <= PYTHON_VERSIONS[1],
        f"Python {here[0]}.{here[1]} is not supported, use {first} to {last}.",
    )
    require(
        not sysconfig.get_config_var("Py_GIL_DISABLED"),
        "this is a free-threaded Python, use the default build with a GIL.",
    )
    require(sys.platform == "linux", f"only Linux is supported, not {sys.platform}.")
    include = sysconfig.get_paths()["include"]
    require(
        os.path.exists(os.path.join(include, "Python.h")),
        f"{include}/Python.h is missing; on Debian: apt-get install python3-dev.",
    )


check_environment()

try:
    import torch
except ImportError as error:
    require(
        False,
        f"torch is needed at build time ({error}). Install it first, then run\n"
        "    pip install --no-build-isolation .",
    )

from setuptools import Extension, setup  # noqa: E402  (after the checks: their text comes first)
from setuptools.command.build_ext import build_ext  # noqa: E402

TORCH = Path(torch.__file__).resolve().parent
torch_release = tuple(int(part) for part in torch.__version__.split(".")[:2])
require(
    TORCH_VERSIONS[0] <= torch_release <= TORCH_VERSIONS[1],
    f"torch {torch.__version__} is not supported, use {{}}.{{}} to {{}}.{{}}.".format(
        *TORCH_VERSIONS[0], *TORCH_VERSIONS[1]
    ),
)


def compile_flags() -> list[str]:
    # Torch's headers are system headers: their warnings are not ours to mend.
    includes = [TORCH / "include", TORCH / "include/torch/csrc/api/include"]
    return [
        *("-std=c++17", "-O2", "-g0", "-fPIC", "-fwrapv", "-fvisibility=hidden", "-DNDEBUG"),
        *("-Wall", "-Wno-unused-function", "-Wno-unused-variable"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{PACKAGE}",
        f"-I{PACKAGE / 'runtime'}",
        f"-I{sysconfig.get_paths()['include']}",
        *(f"-isystem{path}" for path in includes),
        *shlex.split(os.environ.get("CPPFLAGS", "")),
        *shlex.split(os.environ.get("CXXFLAGS", "")),
    ]


def link_flags() -> list[str]:
    # $ORIGIN serves an installation beside torch, the absolute path a build in place.
    libraries = TORCH / "lib"
    return [
        "-shared",
        f"-L{libraries}",
        *("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"),
        f"-Wl,-rpath,$ORIGIN/../torch/lib,-rpath,{libraries}",
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]


def run(command: list[str], shown: str) -> None:
    print(f"  {shown}", flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.stdout or done.stderr:
        print(done.stdout, done.stderr, sep="", end="", flush=True)
    if done.returncode != 0:
        sys.exit(f"trident: the build failed ({done.returncode}) in:\n    {shlex.join(command)}")


def is_fresh(target: Path, stamp: Path, signature: str, inputs: list[Path]) -> bool:
    """Whether `target` was made by this very command and is newer than all that went in."""
    if not target.exists() or not stamp.exists() or stamp.read_text() != signature:
        return False
    made = target.stat().st_mtime_ns
    return all(path.exists() and path.stat().st_mtime_ns <= made for path in inputs)


def dependencies(rule: Path) -> list[Path]:
    """Reads the files named by a Makefile rule that `-MMD` wrote."""
    if not rule.exists():
        return [rule]  # not there: never fresh
    text = rule.read_text().replace("\\\n", " ")
    return [ROOT / name for name in shlex.split(text.split(":", 1)[1])]


def cython_source(source: Path) -> Path:
    """Translates a .pyx when needed; without Cython, what was generated before is used."""
    generated = source.with_suffix(".cpp")
    try:
        from Cython.Build import cythonize
    except ImportError:
        require(
            generated.exists(),
            f"Cython 3 is needed to build {source.name} (pip install 'cython>=3,<4').",
        )
        print(f"  Cython is not installed: using the existing {generated.name}", flush=True)
        return generated
    options = {"language_level": "3"}
    name = f"trident.{source.stem}"
    extension = Extension(name, [str(source.relative_to(ROOT))], language="c++")
    cythonize([extension], compiler_directives=options, include_path=[str(ROOT)], quiet=True)
    return generated


class BuildExt(build_ext):
    """Compiles an extension's sources side by side, incrementally, and records for what."""

    def run(self) -> None:
        in_place = bool(self.inplace or getattr(self, "editable_mode", False))
        (ROOT / "build").mkdir(exist_ok=True)
        with open(ROOT / "build" / "lock", "w") as lock:  # two builds at once share the objects
            fcntl.flock(lock, fcntl.LOCK_EX)
            super().run()
            folder = PACKAGE if in_place else Path(self.build_lib) / "trident"
            self.write_build_info(folder / "_build_info.py")
            self.write_operators(folder / "_operators.txt")

    def build_extension(self, ext: Extension) -> None:
        started = time.perf_counter()
        cxx = shlex.split(os.environ.get("CXX", "g++"))
        tag = hashlib.sha1(f"{sys.version}{torch.__version__}{TORCH}".encode()).hexdigest()[:8]
        objects_dir = ROOT / "build" / f"objects-{sys.implementation.cache_tag}-{tag}"
        objects_dir.mkdir(parents=True, exist_ok=True)
        jobs = self.parallel if isinstance(self.parallel, int) else os.cpu_count() or 1
        jobs = int(os.environ.get("MAX_JOBS", jobs))
        paths = [ROOT / name for name in ext.sources]
        sources = [cython_source(path) if path.suffix == ".pyx" else path for path in paths]
        sources.sort(key=lambda path: -path.stat().st_size)  # the longest job first
        print(
            f"building {ext.name} for torch {torch.__version__}, {jobs} jobs "
            f"({len(sources)} files, about half a minute each when they include torch)",
            flush=True,
        )
        with ThreadPoolExecutor(jobs) as pool:
            compiled = [pool.submit(self.compile_one, cxx, path, objects_dir) for path in sources]
            objects = [future.result() for future in compiled]
        self.link(cxx, objects, objects_dir, Path(self.get_ext_fullpath(ext.name)))
        print(f"built {ext.name} in {time.perf_counter() - started:.1f} s", flush=True)

    def compile_one(self, cxx: list[str], source: Path, objects_dir: Path) -> Path:
        target = objects_dir / f"{source.stem}.o"
        rule, stamp = target.with_suffix(".d"), target.with_suffix(".command")
        command = [*cxx, *compile_flags(), "-MMD", "-MF", str(rule), "-c", str(source)]
        command += ["-o", str(target)]
        if not is_fresh(target, stamp, shlex.join(command), [source, *dependencies(rule)]):
            stamp.unlink(missing_ok=True)
            started_ns = time.time_ns()
            run(command, f"compile {source.relative_to(ROOT)}")
            os.utime(target, ns=(started_ns, started_ns))  # what is edited meanwhile is newer
            stamp.write_text(shlex.join(command))
        return target

    def link(self, cxx: list[str], objects: list[Path], objects_dir: Path, target: Path) -> None:
        stamp = objects_dir / "link.command"
        objects = sorted(objects)
        command = [*cxx, *map(str, objects), *link_flags(), "-o", str(target)]
        made_ns = [str(path.stat().st_mtime_ns) for path in objects]
        signature = shlex.join([*command, *made_ns])
        if not is_fresh(target, stamp, signature, objects):
            stamp.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            run(command, f"link {target.name}")
            stamp.write_text(signature)

    def write_build_info(self, path: Path) -> None:
        text = (
            '"""Written by setup.py: what this extension was built for."""\n\n'
            f"TORCH_VERSION = {str(torch.__version__)!r}\n"
            f"TORCH_GIT_VERSION = {torch.version.git_version!r}\n"
            f"PYTHON_VERSION = {sys.version_info[:2]!r}\n"
        )
        if not path.exists() or path.read_text() != text:
            path.write_text(text)

    def write_operators(self, path: Path) -> None:
        """The C++ functions of PyTorch's operators: symbol and signature, a line each. Without nm
        or c++filt the file is empty, and operators are called through the boxed dispatcher."""
        library = Path(TORCH) / "lib" / "libtorch_cpu.so"
        header = f"# {torch.__version__} {torch.version.git_version}\n"
        if path.exists() and path.read_text().startswith(header):
            return
        try:
            nm = ["nm", "-D", "--defined-only", "--format=posix", str(library)]
            listed = subprocess.run(nm, check=True, capture_output=True, text=True).stdout
            symbols = [line.split(" ", 1)[0] for line in listed.splitlines()]
            symbols = [s for s in symbols if s.startswith("_ZN2at4_ops") and "4callE" in s]
            demangled = subprocess.run(
                ["c++filt"], input="\n".join(symbols), check=True, capture_output=True, text=True
            ).stdout.splitlines()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no operator table ({error}): operators will be called through the dispatcher")
            symbols = demangled = []
        lines = [f"{a}\t{b}\n" for a, b in zip(symbols, demangled, strict=True)]
        path.write_text(header + "".join(sorted(lines)))


def sources() -> list[str]:
    runtime = sorted((PACKAGE / "runtime").glob("*.cpp"))
    names = [PACKAGE / "_frame.pyx", *runtime]
    return [str(path.relative_to(ROOT)) for path in names]


setup(
    ext_modules=[Extension("trident._frame", sources(), language="c++")],
    cmdclass={"build_ext": BuildExt},
)
