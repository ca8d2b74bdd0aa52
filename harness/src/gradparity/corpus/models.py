"""The corpus "models": a GPT-2 and a BERT of two layers, tiny, with random weights.

In: transformers (optional; nothing is downloaded). Out: programs that run loss.backward with every parameter
as a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradparity.case import Case
from gradparity.corpus.base import Program
from gradparity.errors import UnavailableError, UnknownNameError
from gradparity.probe import Body, Probe

VOCABULARY = 97
LENGTH = 12


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError("corpus models", str(error), "pip install 'gradparity[models]'") from error
    return transformers


def _gpt2() -> Any:
    lib = _transformers()
    config = lib.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    return lib.GPT2LMHeadModel(config)


def _bert() -> Any:
    lib = _transformers()
    config = lib.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    return lib.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": _gpt2, "bert": _bert}


class ModelCorpus:
    """The models as a corpus; one chunk each. Raises UnavailableError without transformers."""

    name = "models"

    def chunks(self) -> list[str]:
        """The models' names."""
        _transformers()
        return list(MODELS)

    def programs(self, chunk: str, device: torch.device, seed: int) -> Iterable[Program]:
        """One training step of this model."""
        if chunk not in MODELS:
            raise UnknownNameError("model", chunk, sorted(MODELS))
        yield Program(
            Case(self.name, chunk, None, seed), _body(MODELS[chunk]), f"{chunk}: loss and all gradients"
        )


def _body(build: Callable[[], Any]) -> Body:
    def run(p: Probe) -> None:
        model = p.module(build()).train()
        tokens = p.randint(VOCABULARY, 2, LENGTH)
        loss = p.compile(model)(input_ids=tokens, labels=tokens).loss
        p.value("loss", loss)
        with p.backward():
            loss.backward()

    return run
