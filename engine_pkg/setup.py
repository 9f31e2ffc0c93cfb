"""Builds the native CPU kernels into the wheel with the machine's compiler; everything else is in pyproject.toml.

Without a compiler the installation succeeds all the same: the kernels are then built when they are first wanted, or
plain torch computes in their place.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("src/paged_engine/kernels")


def load_builder():  # type: ignore[no-untyped-def]
    """kernels/build.py by itself: the package around it needs torch, which an installer does not have."""
    spec = importlib.util.spec_from_file_location("build_kernels", KERNELS.resolve() / "build.py")
    builder = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = builder
    spec.loader.exec_module(builder)
    return builder


class BuildWithKernels(build_py):
    """Adds the compiled library to the package."""

    def run(self) -> None:
        """Copy the sources, then compile; an editable installation compiles on first use."""
        super().run()
        if self.editable_mode:
            return
        builder = load_builder()
        try:
            builder.build(Path(self.build_lib) / "paged_engine" / "kernels" / builder.library_name())
        except builder.BuildError as error:
            self.warn(f"installing without native CPU kernels: {error}")


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python: the library is plain C to Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The tags of the wheel's name."""
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """A distribution that is not the same everywhere."""

    def has_ext_modules(self) -> bool:
        """Makes setuptools install into the platform's folder."""
        return True


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)
