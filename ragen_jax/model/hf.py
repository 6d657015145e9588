"""Model directories in Hugging Face format: config.json, safetensors weights, tokenizer files.

weights.py reads and writes the tensors, config_json.py config.json. For a vision-language model,
vision/tensors.py reads and writes the tensors of its tower, which is loaded next to the language
model and stays frozen, and vision/images.py reads and writes preprocessor_config.json.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ragen_jax.core.sharding import is_main_process
from ragen_jax.core.types import Params
from ragen_jax.model import config_json, qwen, tokenizer_config, weights, wheels
from ragen_jax.model.layout import param_shardings
from ragen_jax.model.tokenizer import CHAT_TEMPLATE, SEEING_TEMPLATE
from ragen_jax.model.vision import images
from ragen_jax.model.vision import tensors as vision_tensors
from ragen_jax.model.vision import tower as vision
from ragen_jax.model.weights import INDEX, WEIGHTS
from ragen_jax.storage import confined, limits
from ragen_jax.storage.atomic_io import atomic_write, disk_error_message, with_retries
from ragen_jax.storage.checksums import CHECKSUMS, damage, write_checksums

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NEEDED = f"config.json, {WEIGHTS} (or {INDEX} and its shards), tokenizer.json"
DOWNLOADED = ("*.json", "*.safetensors", "*.txt", "*.jinja")
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (  # files from which transformers reads a tokenizer
    *("tokenizer.json", tokenizer_config.FILE, TEMPLATE_FILE, "additional_chat_templates/*"),
    *("vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    "chat_template.json",
)
PLAIN_BYTES = 1 << 20  # largest file of a tokenizer that needs no child process
WEIGHT_FILES = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


def load(
    path: str | Path, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> "tuple[qwen.Qwen, Params, PreTrainedTokenizerFast]":
    """Open a model directory, a GGUF file or a model of the Hugging Face hub.

    Args:
      path: a directory, a .gguf file, or a hub id such as "Qwen/Qwen2.5-0.5B-Instruct".
      mesh: mesh to put the parameters on; each process reads only the parts that its devices
        hold. None: the default device.
      dtype: dtype of activations and matrix products; None: float32.

    Returns:
      (model, float32 parameters, tokenizer). For a vision-language model this is the language
      model; `load_tower` loads its vision tower.

    Raises:
      ValueError: the model is missing, its files do not match checksums.json, its architecture is
        not supported, its tensors are not finite or do not match its config.json, or its tokenizer
        has more ids than its embedding.
    """
    directory = resolve(path)
    found = damage(directory) if is_main_process() else None
    if found:
        raise ValueError(
            f"the model is damaged: {found}; copy it again (or delete {directory / CHECKSUMS} "
            "if the change was intended)"
        )
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        # The check's child process takes a second; the weights are read in the meantime.
        checked = executor.submit(check_tokenizer, directory)
        model, params = load_weights(directory, mesh=mesh, dtype=dtype)
        checked.result()
    tokenizer = load_tokenizer(directory)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"{directory}: the tokenizer has {len(tokenizer)} ids, the embedding only "
            f"{model.config.vocab_size} rows (vocab_size)"
        )
    return model, params, tokenizer


def save(
    path: str | Path,
    model: qwen.Qwen,
    params: Params,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    tower: vision.Tower | None = None,
    stop_ids: Sequence[int] = (),
    card: str = "",
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a model directory in the format of the model's family, for `load` and transformers.

    The files are written next to `path` and renamed at the end, so a killed save leaves no partial
    directory. An earlier save at `path` is replaced.

    Args:
      path: directory to write; its parents are created.
      params: the model's parameters, on any devices. If they are spread over several processes,
        every process must call this; only process 0 writes.
      tower: the vision tower of a vision-language model.
      card: the model card, written to README.md; "": none.
      stop_ids: ids that end a reply, in addition to the tokenizer's. The function `stop_ids`
        returns those of the directory that the model came from.
      dtype: dtype of the weights on disk: "float32", "bfloat16" or "float16".
      max_shard_bytes: largest size of a weight file (a single tensor may be larger).

    Raises:
      ValueError: the parameters or the tower do not fit the model, float16 cannot hold them, an
        argument is out of range, or `path` holds files that would be lost.
    """
    if dtype not in weights.SAVE_DTYPES:
        raise ValueError(f"dtype {dtype!r}; accepted: {', '.join(weights.SAVE_DTYPES)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes {max_shard_bytes}: must be at least 1")
    fields = config_json.from_config(model.config, dtype) | token_ids(tokenizer, stop_ids)
    outside = [int(i) for i in stop_ids if not 0 <= i < model.config.vocab_size]
    if outside:
        raise ValueError(f"stop ids {outside}: the model has only {model.config.vocab_size} ids")
    tensors = weights.to_tensors(model.config, params)
    if tower is not None or model.config.vision is not None:
        tensors += _tower_tensors(model.config, tower)

    writer = weights.is_writer((params, tower and tower.params))
    with replacement(path, writer=writer) as fresh:
        if writer:
            if card:
                atomic_write(fresh / "README.md", card)
            write_json(fresh / "config.json", fields)
            write_json(
                fresh / "generation_config.json",
                {k: fields[k] for k in config_json.TOKEN_IDS if k in fields},
            )
            tokenizer_config.save_tokenizer(fresh, tokenizer)
            if tower is not None:
                write_json(fresh / images.FILE, images.to_fields(tower.images))
        weights.write(fresh, tensors, dtype=dtype, max_shard_bytes=max_shard_bytes, writer=writer)
        if writer:
            write_checksums(fresh)


def resolve(path: str | Path) -> Path:
    """Return the directory of a model.

    Args:
      path: a directory; a .gguf file, whose model is converted and kept in the cache (model/gguf);
        or a hub id, which is downloaded. A few hub ids that cannot be downloaded are replaced by
        models in Python packages (model/wheels.py).

    Raises:
      ValueError: there is no such directory or file, the id cannot be downloaded, or the GGUF file
        is damaged or not supported.
    """
    name = str(path)
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if directory.suffix == ".gguf":
        from ragen_jax.model.gguf.convert import convert  # imported here: it imports this module

        return convert(directory)
    if directory.exists():
        raise ValueError(f"{name} is a file; a model is a directory with {NEEDED}, or a .gguf file")
    if name.startswith(("/", ".", "~")) or name.count("/") != 1 or name.endswith("/"):
        raise ValueError(f"no model directory {name}; it must hold {NEEDED}")

    import huggingface_hub  # imported here because local directories do not need it
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    try:
        folder = huggingface_hub.snapshot_download(name, allow_patterns=list(DOWNLOADED))
    except (OSError, EntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        if disk_error_message(error) is not None:  # a disk error of the download cache
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if name in wheels.WHEELS:
            return wheels.model_directory(name, reason)
        raise ValueError(
            f"no directory {name} here, and the model {name} could not be downloaded from the "
            f"Hugging Face hub ({reason}). With network access, run `hf download {name} "
            "--local-dir DIR`, copy DIR here and pass --config.model.path=DIR"
        ) from error
    return Path(folder)


def model_config(path: str | Path) -> qwen.ModelConfig:
    """Return the `qwen.ModelConfig` of a path that `resolve` accepts, from its config.json alone.

    Raises:
      ValueError: no config.json, another architecture, or a feature that qwen.py lacks.
    """
    file = resolve(path) / "config.json"
    return config_json.to_config(read_json(file), file)


def stop_ids(path: str | Path) -> tuple[int, ...]:
    """Return the ids that end a reply, from the generation_config.json of a directory or hub id.

    Empty if the file or its eos_token_id is missing.
    """
    file = resolve(path) / "generation_config.json"
    ids = read_json(file).get("eos_token_id") if file.exists() else None
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a model directory.

    Raises:
      ValueError: the directory has no tokenizer files, they are damaged, or `check_tokenizer`
        refuses them.
    """
    directory = Path(directory)
    from transformers import PreTrainedTokenizerFast

    # AutoTokenizer builds Qwen's pipeline for every qwen2 directory and ignores tokenizer.json: a
    # tokenizer without NFC normalisation would come back with it.
    two = (directory / "vocab.json").exists() and (directory / "merges.txt").exists()
    if not (directory / "tokenizer.json").exists() and not two:
        raise ValueError(f"{directory} has neither tokenizer.json nor vocab.json and merges.txt")
    check_tokenizer(directory)
    try:
        if (directory / "tokenizer.json").exists():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            # `tokenizer_config.save_tokenizer` reads this: the class above is not the source's.
            tokenizer.init_kwargs["tokenizer_class"] = tokenizer_config.source_class(directory)
            return tokenizer
        from transformers import AutoTokenizer  # takes a while to import

        # ty: ignore[invalid-explicit-return] of these two files it makes a fast one
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"the tokenizer of {directory} cannot be read: {error!r}") from error


def check_tokenizer(directory: Path) -> None:
    """Refuse a tokenizer or chat template that exhausts memory or time (storage/confined).

    A tokenizer like those of our tiny agents needs no child process: it has no normaliser, no
    regular expression and no merges, and it uses our template.

    Raises:
      ValueError: it exhausts memory or time, or a file is larger than limits.MAX_CONFIG_BYTES.
    """
    files = [file for pattern in TOKENIZER_FILES for file in sorted(directory.glob(pattern))]
    for file in files:
        if file.stat().st_size > limits.MAX_CONFIG_BYTES:
            raise ValueError(
                f"{file} has {file.stat().st_size:,} bytes; a tokenizer file may have up to "
                f"{limits.MAX_CONFIG_BYTES:,}"
            )
    if files and not _is_plain_tokenizer(directory, files):
        confined.check_tokenizer(directory, files)


def _is_plain_tokenizer(directory: Path, files: Sequence[Path]) -> bool:
    """Return whether a tokenizer is of the kind that `tokenizer.build_tokenizer` makes."""
    names = {file.name for file in files}
    if names != {"tokenizer.json", tokenizer_config.FILE, TEMPLATE_FILE}:
        return False
    try:
        fields = limits.read_json(directory / "tokenizer.json", PLAIN_BYTES)
        others = limits.read_json(directory / tokenizer_config.FILE, PLAIN_BYTES)
        template, after = (directory / TEMPLATE_FILE).read_text(), fields["post_processor"]
        return (
            template in (CHAT_TEMPLATE, SEEING_TEMPLATE)
            and "chat_template" not in others
            and fields["normalizer"] is None
            and (after is None or (after["special_tokens"] == {} and len(after["single"]) == 1))
            and fields["pre_tokenizer"]["type"] == "ByteLevel"
            and fields["model"]["type"] == "BPE"
            and fields["model"]["merges"] == []
        )
    except (ValueError, KeyError, TypeError, OSError):  # loading reports the error
        return False


def load_weights(
    directory: str | Path, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> tuple[qwen.Qwen, Params]:
    """Load (model, params) of a directory; see `load`. Checks shapes before it reads the data."""
    directory = Path(directory)
    config = dataclasses.replace(model_config(directory), dtype=_compute_dtype(dtype))
    model = qwen.Qwen(config)
    shardings = None if mesh is None else param_shardings(model, mesh)
    with weights.open_tensors(directory) as found:
        tensors = weights.by_published_names(found, config)
        weights.check_tensors(directory, config, tensors)
        return model, weights.read(tensors, config, shardings)


def load_tower(
    path: str | Path, *, mesh: Mesh | None = None, dtype: DTypeLike | None = None
) -> vision.Tower | None:
    """Load the vision tower of a directory or hub id that `load` opens; None if it has none.

    Args:
      mesh: mesh to put the parameters on; each process reads only the parts that its devices
        hold. None: the default device.
      dtype: dtype of activations and matrix products, and of all parameters except the scales of
        norms, since the tower is frozen. None: float32.

    Raises:
      ValueError: the tower's tensors are not finite or do not match config.json, or the directory
        has no image settings, or settings for another patch size.
    """
    directory = resolve(path)
    config = model_config(directory)
    if config.vision is None:
        return None
    pictures = images.read_config(directory)
    seen = dataclasses.replace(config.vision, dtype=_compute_dtype(dtype))
    shardings = None if mesh is None else vision.param_shardings(seen, mesh)
    with weights.open_tensors(directory) as found:
        tensors = weights.by_published_names(found, config)
        vision_tensors.check_tensors(directory, seen, tensors)
        params = vision_tensors.read(tensors, seen, shardings)
    return vision.Tower(vision.VisionTower(seen), params, pictures)


def _compute_dtype(dtype: DTypeLike | None) -> str:
    """Return the name of a dtype.

    Raises:
      ValueError: it is not in COMPUTE_DTYPES.
    """
    try:
        name = "float32" if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {name!r}; accepted: {', '.join(COMPUTE_DTYPES)}")
    return name


def _tower_tensors(
    config: qwen.ModelConfig, tower: vision.Tower | None
) -> list[weights.StoredTensor]:
    """Return the tensors of a model's tower.

    Raises:
      ValueError: the tower does not belong to the model.
    """
    if config.vision is None:
        raise ValueError(
            f"a tower was passed, but models of family {config.family!r} have no vision"
        )
    if tower is None:
        raise ValueError(
            f"a model of family {config.family!r} is saved with its vision tower; pass tower=, "
            "as returned by load_tower for the model's original directory"
        )
    seen = dataclasses.replace(tower.model.config, dtype=config.vision.dtype)
    if seen != config.vision:
        raise ValueError(f"the tower has config {seen}, but the model expects {config.vision}")
    return vision_tensors.to_tensors(seen, tower.params)


def token_ids(tokenizer: "PreTrainedTokenizerFast", stop_ids: Sequence[int]) -> dict[str, Any]:
    """Return the fields of config.json and generation_config.json that name single tokens."""
    ids = {name: getattr(tokenizer, name) for name in config_json.TOKEN_IDS}
    stops = dict.fromkeys([*map(int, stop_ids), ids["eos_token_id"]])
    stops = [i for i in stops if i is not None]
    ids["eos_token_id"] = stops if len(stops) > 1 else stops[0] if stops else None
    return {name: value for name, value in ids.items() if value is not None}


@contextlib.contextmanager
def replacement(path: str | Path, *, writer: bool = True) -> Generator[Path]:
    """Yield a new directory next to `path`; at the end, if nothing failed, rename it to `path`.

    The old `path` is removed only after the new directory is in place. If `writer` is False
    (another process writes), nothing is touched and the yielded path does not exist.

    Raises:
      ValueError: `path` holds files other than weights that the new directory does not replace.
    """
    path = Path(path).expanduser().resolve()
    fresh = path.with_name(f".{path.name}.saving-{os.getpid()}")
    if not writer:
        yield fresh
        return
    with_retries(functools.partial(_begin_anew, fresh), path)
    try:
        yield fresh
        with_retries(functools.partial(_sync, fresh), path)
        if path.exists():
            lost = sorted(set(os.listdir(path)) - set(os.listdir(fresh)))
            lost = [name for name in lost if not re.fullmatch(WEIGHT_FILES, name)]
            if lost:
                raise ValueError(
                    f"{path} holds other files ({', '.join(lost[:4])}); choose another directory"
                )
            old = path.with_name(f".{path.name}.replaced-{os.getpid()}")
            with_retries(functools.partial(path.rename, old), path)
            try:
                with_retries(functools.partial(fresh.rename, path), path)
            except OSError:
                old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)  # the new directory is complete either way
        else:
            with_retries(functools.partial(fresh.rename, path), path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _begin_anew(folder: Path) -> None:
    """Make an empty folder, and its parents."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sync(folder: Path) -> None:
    """Flush the files of a folder to disk."""
    for file in folder.iterdir():
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a model directory.

    Raises:
      ValueError: the file holds no object.
    """
    try:
        content = limits.read_json(file)
    except FileNotFoundError as error:
        raise ValueError(f"no {file}; a model directory must hold {NEEDED}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write a JSON file in the layout of Hugging Face's libraries."""
    atomic_write(file, json.dumps(value, indent=2) + "\n")
