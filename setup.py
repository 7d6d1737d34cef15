"""Build ``pipekernels._C``, without torch, by CMake and Ninja: csrc/cmake/build_extension.py."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc" / "cmake"))

from build_extension import build


class CMakeBuild(build_ext):
    """The extension has no sources that setuptools would know what to do with."""

    def build_extension(self, ext: Extension) -> None:
        try:
            build(Path(self.get_ext_fullpath(ext.name)).resolve().parent)
        except RuntimeError as error:  # setuptools would print a traceback after it.
            sys.exit(f"pipekernels: {error}")


setup(ext_modules=[Extension("pipekernels._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
