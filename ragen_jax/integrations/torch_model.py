"""Log-probabilities of a torch model of transformers, without a trace on its training."""

import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from ragen_jax.integrations.monitor import Logprob

if TYPE_CHECKING:
    import torch


def torch_logprob(model: "torch.nn.Module", *, rows: int = 8, accelerator: Any = None) -> Logprob:
    """Return the function of log-probabilities of a causal language model.

    It leaves the model as it was: no gradients, dropout off, and the modules' modes and torch's
    random states restored.

    Args:
      model: called with input_ids and attention_mask, returns `logits`.
      rows: rows of a forward pass.
      accelerator: of the package accelerate. Its processes must all call the function, with equal
        arguments; they share the rows, each makes the same number of forward passes (as sharded
        weights require), and all return all values. None: one process.
    """
    processes, process, device = 1, 0, next(model.parameters()).device
    autocast: Callable[[], Any] = contextlib.nullcontext
    if accelerator is not None:
        processes, process = accelerator.num_processes, accelerator.process_index
        device, autocast = accelerator.device, accelerator.autocast
    keeps_logits = _accepts(model, "logits_to_keep")

    def logprob(
        prompts: Sequence[list[int]], completions: Sequence[list[int]]
    ) -> list[list[float]]:
        # Rows of similar length share a pass, which is padded to its longest.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(completions[i]))
        batches = [order[first : first + rows] for first in range(0, len(order), rows)]
        found: dict[int, list[float]] = {}
        with _scoring(model, device), autocast():
            for first in range(0, len(batches), processes):
                # A process without a batch of its own repeats the last one.
                batch = batches[min(first + process, len(batches) - 1)]
                values = _forward(
                    model,
                    [prompts[i] for i in batch],
                    [completions[i] for i in batch],
                    device,
                    keeps_logits,
                )
                found.update(zip(batch, values, strict=True))
        if processes > 1:
            from accelerate.utils import gather_object

            found = {i: row for part in gather_object([found]) for i, row in part.items()}
        return [found[i] for i in range(len(prompts))]

    return logprob


def _forward(
    model: "torch.nn.Module",
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    device: Any,
    keeps_logits: bool,
) -> list[list[float]]:
    """Return the log-probabilities of completions from one forward pass over right-padded rows."""
    import torch

    pairs = [[*x, *z] for x, z in zip(prompts, completions, strict=True)]
    length = max(map(len, pairs))
    ids = torch.tensor([pair + [0] * (length - len(pair)) for pair in pairs], device=device)
    mask = torch.tensor(
        [[1] * len(pair) + [0] * (length - len(pair)) for pair in pairs], device=device
    )
    kept = length - min(map(len, prompts)) + 1  # logits from the last token of the first prompt
    options = {"logits_to_keep": kept} if keeps_logits else {}
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
    offset = length - logits.shape[1]
    values = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        first = len(prompt) - 1 - offset
        # A row at a time, since float32 logits of all rows may not fit.
        logp = logits[row, first : first + len(completion)].float().log_softmax(-1)
        chosen = torch.tensor(completion, device=device)[:, None]
        values.append(logp.gather(1, chosen)[:, 0].tolist())
    return values


@contextlib.contextmanager
def _scoring(model: "torch.nn.Module", device: Any) -> Generator[None]:
    """Turn off gradients and dropout; restore each module's mode, and torch's random states."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training


def _accepts(model: "torch.nn.Module", name: str) -> bool:
    """Return whether the innermost model's forward takes an argument of that name."""
    while True:
        inner = getattr(model, "module", None)  # wrapped for several devices
        if hasattr(model, "get_base_model"):  # with adapters of PEFT
            inner = model.get_base_model()
        if inner is None:
            return name in inspect.signature(model.forward).parameters
        model = inner
