"""Package metadata of megatron_paradyse."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="megatron_paradyse",
    version="0.1.0",
    description="Parallel strategies that switch per layer and microbatch, for Megatron-LM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="megatron-lm, sequence parallelism, context parallelism, long sequences",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    package_data={"megatron_paradyse.report": ["page.html"]},
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_paradyse", "megatron_paradyse.*"]),
    install_requires=[
        "megatron-core>=0.19,<0.20",
        "torch",
        "numpy",
        "xgboost",
        "PyYAML",
        "click",
        "rich",
        "matplotlib",
        "Jinja2",
        # What megatron.training imports beyond megatron-core's own requirements.
        "accelerate",
        "einops",
        "flask-restful",
        "omegaconf",
        "psutil",
        "sentencepiece",
        "tensorboard",
        "tiktoken",
        "transformers",
        "wandb",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]"],
        "dev": [
            "atheris; sys_platform == 'linux'",
            "hypothesis",
            "jsonschema",
            "mypy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-PyYAML",
        ],
    },
    entry_points={
        "console_scripts": ["megatron-paradyse = megatron_paradyse.cli:main"],
    },
)
