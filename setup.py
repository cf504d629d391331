"""Builds the compiled kernels; everything else about the package is in pyproject.toml.

A machine without a C++ compiler still installs: the build warns, and `dlmserve.kernels` runs on torch.
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
    """`build_ext` that turns a failure into a warning."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self.warn(f"the C++ kernels were not built ({error}): dlmserve.kernels will use torch, slower")

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def get_output_mapping(self) -> dict[str, str]:
        return {built: path for built, path in super().get_output_mapping().items() if os.path.exists(built)}


native = Extension(
    "dlmserve.kernels._native",
    sources=[f"{CSRC}/{name}.cpp" for name in ("module", "kernels", "select")],
    depends=[f"{CSRC}/{name}" for name in HEADERS],
    language="c++",
    py_limited_api=True,
    define_macros=[("Py_LIMITED_API", "0x030A0000")],
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

setup(
    ext_modules=[native],
    cmdclass={"build_ext": BuildOrWarn},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
