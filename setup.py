"""Package metadata of MegaMuon.

Owns what `pip install` needs to know. Invariant: building imports no torch and asks for none, so an
install never replaces the torch build that matches a machine's driver; `make setup` brings torch
first. The native libraries are ``csrc/build.py``'s: an install builds the host library always, and
the device library as MEGAMUON_BUILD says. Tested by ``tests/test_repository.py`` and
``tests/collectives/test_build.py``.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent

# NVIDIA apex is absent on purpose: it is built from source, and the package that the Python index
# calls `apex` is an unrelated web toolkit.
EXTRAS = {
    "gpu": ["triton", "transformer-engine[pytorch]"],
    "huggingface": ["transformers>=4.56"],
    "plots": ["matplotlib>=3.8"],
    "wandb": ["wandb"],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff==0.17.6",
        "transformers>=4.56",
        "matplotlib>=3.8",  # bench/equal_time.py draws by default
    ],
}


def read_version() -> str:
    """The version in megamuon/__init__.py, read as text: a build imports nothing of the package."""
    text = (ROOT / "megamuon" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('megamuon/__init__.py has no line of the form __version__ = "1.2.3"')
    return found.group(1)


def native_build() -> ModuleType:
    """csrc/build.py, by its path: an isolated build has no sys.path entry for it."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "csrc" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """The native libraries in place of extension modules: loaded by ctypes, so no Python header and
    none of setuptools' compiler settings take part.
    """

    def run(self) -> None:
        """Build into the package of an editable install, else into the wheel."""
        try:
            native_build().build_all(self._folder())
        except RuntimeError as error:
            raise ExecError(str(error)) from None

    def _folder(self) -> Path:
        top = ROOT if self.inplace or self.editable_mode else Path(self.build_lib)
        return top / "megamuon" / "_native"

    def get_outputs(self) -> list[str]:
        """The libraries that there are."""
        return [str(path) for path in self._folder().glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is built in one place and used in another."""
        return {}


class NativeWheel(bdist_wheel):
    """A wheel for one kind of machine and for every Python 3: the libraries do not know Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        return ("py3", "none", super().get_tag()[2])


if __name__ == "__main__":
    setup(
        name="megamuon",
        version=read_version(),
        description="Pretraining with matrix optimizers whose matrices have owners",
        long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
        long_description_content_type="text/markdown",
        license_expression="Apache-2.0",
        license_files=["LICENSE"],
        python_requires=">=3.11",
        # The Pythons on which the whole set-up, training and tests have been tried.
        classifiers=[
            "Programming Language :: Python :: 3.11",
            "Programming Language :: Python :: 3.12",
            "Programming Language :: Python :: 3.13",
        ],
        packages=find_packages(include=["megamuon", "megamuon.*"]),
        package_data={"megamuon": ["**/*.json"]},
        ext_modules=[Extension("megamuon._native", sources=[])],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
        install_requires=[
            "numpy>=1.26",
            "packaging>=23",
            "psutil>=5.9",
            "safetensors>=0.5",
            "sentencepiece>=0.2",
            "tensorboard>=2.16",
            "tokenizers>=0.20",
            "tqdm>=4.66",
        ],
        extras_require=EXTRAS,
    )
