"""The child process of ragen_jax.storage.confined: one task on one file, under limits.

    python -P child.py MEMORY SECONDS < request.json

It writes JSON lines: {"stage": ...} before work that might exceed a limit, and at the end
{"done": true} or {"refused": REASON}. If a limit ends the child, it writes neither of these two.
"""

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = 77  # exit code, the same as in the parent
ROW_BYTES = 256  # bytes of an empty row as a Python object
PAGE_BYTES = resource.getpagesize()


class Refused(Exception):
    """A file must not be read; the message is the reason."""


def say(**line: Any) -> None:
    """Write a JSON line to the parent."""
    ANSWERS.write(json.dumps(line) + "\n")
    ANSWERS.flush()


def limit(memory: int, seconds: int) -> None:
    """Limit the additional memory (bytes) and processor time (seconds) of this process."""
    with contextlib.suppress(ValueError, OSError):  # the system may not support this limit
        used = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    end = int(time.process_time()) + seconds + 1
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (end, end))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# ------------------------------------------------------------------------------ Parquet


def scan_parquet(request: dict[str, Any], confine: Callable[[], None]) -> None:
    """Decode each file as its readers do, and count the bytes."""
    import pyarrow
    from pyarrow import parquet  # noqa: F401  its memory does not count as the files'

    pyarrow.set_cpu_count(1)  # each thread reserves address space
    confine()
    for path in request["paths"]:
        say(stage="decoding it", path=path)
        try:
            scan_parquet_file(path, request)
        except pyarrow.ArrowMemoryError:
            raise MemoryError from None
        except (pyarrow.ArrowException, OSError):
            pass  # not Parquet, or damaged; its reader reports it


def scan_parquet_file(path: str, request: dict[str, Any]) -> None:
    """Decode a file; raise Refused if it exceeds a limit of the request."""
    from pyarrow import parquet

    total = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=request["rows"], use_threads=False):
            size = batch.num_rows * ROW_BYTES + sum(map(decoded_bytes, batch.columns))
            total += size
            if size > request["most_of_rows"]:
                raise Refused(
                    f"{batch.num_rows} rows decode to {size:,} bytes; accepted: "
                    f"{request['most_of_rows']:,}"
                )
            if request["most"] is not None and total > request["most"]:
                raise Refused(
                    f"it decodes to more than {request['most']:,} bytes; split it into files"
                )


def decoded_bytes(column: Any) -> int:
    """Return the bytes of a column when each of its values is written out."""
    from pyarrow import compute, types

    functions: Any = compute  # it creates its functions at import, where types do not see them
    kind = column.type
    if types.is_dictionary(kind):  # a value that is stored once can occur in every row
        return decoded_bytes(column.dictionary_decode())
    if types.is_run_end_encoded(kind):
        return decoded_bytes(functions.run_end_decode(column))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return functions.sum(functions.binary_length(column)).as_py() or 0
    if types.is_struct(kind):
        return sum(decoded_bytes(field) for field in column.flatten())
    if hasattr(column, "storage"):
        return decoded_bytes(column.storage)
    if types.is_map(kind):
        return column.nbytes + decoded_bytes(column.keys) + decoded_bytes(column.items)
    if types.is_nested(kind) and hasattr(column, "flatten"):  # lists of any kind
        return column.nbytes + decoded_bytes(column.flatten())
    return column.nbytes


# ------------------------------------------------------------------------------ GGUF


def read_gguf(request: dict[str, Any], confine: Callable[[], None]) -> None:
    """Read the header of each file as its reader does."""
    import gguf

    confine()
    for path in request["paths"]:
        say(stage="reading its header", path=path)
        try:
            for field in gguf.GGUFReader(path).fields.values():
                field.contents()
        except MemoryError:
            raise
        except Exception:
            pass  # damaged, or not GGUF; model/gguf/reader.py reports it


# ------------------------------------------------------------------------------ tokenizers

TURNS = 48  # messages of the longest conversation
# Texts that grow, or take long to encode, with a hostile normaliser or regular expression: every
# character that is often normalised or split at, alone and repeated, and ordinary prose.
PROSE = (
    "The quick brown fox's 12,345 jumps over  the lazy dog: don't!\n\n\t"
    "\u00c4\u00e9 e\u0301 \ufb01 \ufdfa \u6f22\u5b57 \U0001f600"
)
REPEATED = 400  # number of repetitions of a character


def probe_texts(tokenizer: Any) -> list[str]:
    characters = [chr(code) for code in range(32, 127)] + list("\n\t\u00e9\ufdfa\u6f22\u2581\u0120")
    texts = [PROSE, *(c * REPEATED + "!" for c in characters), "".join(characters) * 4]
    texts += [(c + " ") * (REPEATED // 2) for c in "aA0.("]
    # Texts that the tokenizer's normaliser looks for.
    normal = json.loads(tokenizer.backend_tokenizer.to_str()).get("normalizer")
    return texts + [text * 8 for text in strings(normal) if text]


def strings(value: Any) -> list[str]:
    """Return the patterns and contents of a normaliser, at any depth."""
    waiting, found = [value], []
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            found.append(part)
        elif isinstance(part, dict):
            waiting += list(part.values())
        elif isinstance(part, list):
            waiting += part
    return [text[:1000] for text in found[:1000]]


def probe_tokenizer(request: dict[str, Any], confine: Callable[[], None]) -> None:
    """Load a tokenizer, encode texts and render conversations."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    transformers.logging.set_verbosity_error()
    directory = Path(request["path"])
    confine()
    say(stage="loading its tokenizer")
    whole = (directory / "tokenizer.json").exists()
    kind: Any = PreTrainedTokenizerFast if whole else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception:
        return  # `hf.load_tokenizer` reports it
    except BaseException as error:  # a panic of the library, which `load_tokenizer` cannot catch
        raise Refused(f"loading its tokenizer crashes the library: {error}") from None
    say(stage="encoding a short text with its tokenizer")
    for text in probe_texts(tokenizer):
        try:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except MemoryError:
            raise
        except Exception:
            continue  # the tokenizer refuses the text; `plain_ids` reports it
        except BaseException as error:
            raise Refused(f"encoding a text crashes the tokenizers library: {error}") from None
        if len(ids) > request["tokens_per_byte"] * len(text.encode()):
            raise Refused(f"its tokenizer makes {len(ids):,} tokens of {len(text)} characters")
    say(stage="rendering a short conversation with its chat template")
    for messages, tools in conversations():
        characters = sum(len(str(message["content"])) for message in messages)
        most = request["rendered"] + request["rendered_per_character"] * characters
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=True,
            )
        except MemoryError:
            raise
        except Exception:
            continue  # the template refuses the conversation; `parse_chat_template` reports it
        if len(text) > most:
            raise Refused(
                f"its chat template makes {len(text):,} characters of {len(messages)} messages "
                f"with {characters:,}"
            )


def conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Return (messages, tools) pairs: short and long, with and without a system message, tools and
    an image."""
    tool = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
    system = [{"role": "system", "content": "SYSTEM_TEXT"}]
    first_turn = [
        {"role": "user", "content": "FIRST_USER"},
        {"role": "assistant", "content": "FIRST_REPLY"},
    ]
    next_question = [{"role": "user", "content": "SECOND_USER"}]
    seen = [{"type": "text", "text": "SECOND_USER"}, {"type": "image"}]
    long = [{"role": ("user", "assistant")[i % 2], "content": PROSE} for i in range(TURNS + 1)]
    found = [
        *(
            [*system, *first_turn, *next_question],
            [*first_turn, *next_question],
            next_question,
            [*system, *next_question],
        ),
        [*first_turn, {"role": "user", "content": seen}],
        [*first_turn, {"role": "tool", "content": "RESULT"}],
        [{"role": "user", "content": PROSE * 40}],
        *(long, [*system, *long]),
    ]
    return [(messages, tools) for messages in found for tools in (None, [tool])]


TASKS = {
    "scan_parquet": scan_parquet,
    "read_gguf": read_gguf,
    "probe_tokenizer": probe_tokenizer,
}

if __name__ == "__main__":
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep what libraries print out of the answers
    memory, seconds = map(int, sys.argv[1:])
    request = json.load(sys.stdin)
    try:
        TASKS[request["task"]](request, lambda: limit(memory, seconds))
    except Refused as error:
        say(refused=str(error))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the last line names the stage
    else:
        say(done=True)
    ANSWERS.flush()
    os._exit(0)  # skip the exit handlers of libraries
