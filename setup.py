"""Package metadata of MegaMuon.

Owns what `pip install` needs to know. Invariant: building imports no torch and asks for none, so an
install never replaces the torch build that matches a machine's driver; `make setup` brings torch
first. Tested by ``tests/test_repository.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# NVIDIA apex is absent on purpose: it is built from source, and the package that the Python index
# calls `apex` is an unrelated web toolkit.
EXTRAS = {
    "gpu": ["triton", "transformer-engine[pytorch]"],
    "huggingface": ["transformers>=4.56"],
    "plots": ["matplotlib>=3.8"],
    "wandb": ["wandb"],
    "test": ["pytest>=8", "pytest-timeout>=2.3", "ruff==0.17.6", "transformers>=4.56"],
}


def read_version() -> str:
    """The version in megamuon/__init__.py, read as text: a build imports nothing of the package."""
    text = (ROOT / "megamuon" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('megamuon/__init__.py has no line of the form __version__ = "1.2.3"')
    return found.group(1)


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
        packages=find_packages(include=["megamuon", "megamuon.*"]),
        package_data={"megamuon": ["**/*.json"]},
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
