"""Builds what is compiled: the kernels, and the simulator's inner loop. All else is in pyproject.toml.

A machine without a compiler still installs: the build warns, `dlmserve.kernels` runs on torch, the simulator on numpy.
"""

import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = "dlmserve/kernels/csrc"
HEADERS = (
    "kernels.h",
    "threads.h",
    "lanes.inc",
    "gemm.inc",
    "head.inc",
    "linear.inc",
    "pointwise.inc",
    "rows.inc",
)


class BuildOrWarn(build_ext):
    """`build_ext` that turns the failure of an extension into a warning."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            self.warn(f"{ext.name} was not built, what takes its place is slower: {error}")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def get_output_mapping(self) -> dict[str, str]:
        return {built: path for built, path in super().get_output_mapping().items() if os.path.exists(built)}


LIMITED_API = [("Py_LIMITED_API", "0x030A0000")]

kernels = Extension(
    "dlmserve.kernels._native",
    optional=True,
    sources=[f"{CSRC}/{name}.cpp" for name in ("module", "kernels", "select")],
    depends=[f"{CSRC}/{name}" for name in HEADERS],
    language="c++",
    py_limited_api=True,
    define_macros=LIMITED_API,
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-ffp-contract=fast",
        "-Wno-psabi",
    ],
    extra_link_args=["-pthread"],
)

simulation = Extension(
    "dlmserve.simulation._next_step",
    optional=True,
    sources=["dlmserve/simulation/csrc/next_step.c"],
    py_limited_api=True,
    define_macros=LIMITED_API,
    # Contracted or reordered sums would not be numpy's to the bit.
    extra_compile_args=["-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-ffp-contract=off"],
)

setup(
    ext_modules=[kernels, simulation],
    cmdclass={"build_ext": BuildOrWarn},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
