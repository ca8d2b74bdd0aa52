"""Corpora: the same programs every time, inputs that no run can spoil, every case found again by its
address.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.testing._internal.autograd_function_db import autograd_function_db as database

from gradparity.case import Case
from gradparity.corpus.cotangents import LAYOUTS, PER_CASE, cotangent, laid_out
from gradparity.corpus.fresh import differentiable, fresh
from gradparity.corpus.registry import NAMED, USUAL, corpus, program
from gradparity.corpus.scenario import registered, scenario
from gradparity.corpus.zoo.shrunk import small_forms
from gradparity.differential import compare
from gradparity.errors import CaseError, UnknownNameError
from gradparity.observe import observe
from gradparity.probe import Probe
from gradparity.subjects.base import Subject
from gradparity.subjects.registry import resolve
from gradparity.verdict import Verdict

CPU = torch.device("cpu")


def probe(dtype: torch.dtype = torch.float32) -> Probe:
    return Probe(Case("test", "p"), resolve("eager"), dtype, CPU)


def test_names() -> None:
    usual = ["scenarios", "op_db", "module_db", "autograd_function_db", "hop_db", "models", "threads"]
    assert usual == USUAL
    assert [name for name in NAMED if name not in USUAL] == [
        "op_db:float64",
        "op_db:bfloat16",
        "op_db:complex64",
        "op_db_cotangents",
        "op_db_cotangents:float64",
        "op_db_cotangents:bfloat16",
        "op_db_cotangents:complex64",
        "module_db_cotangents",
        "module_db:float64",
        "demo",
        "generated",
        "zoo",
        "architectures",
    ]
    assert all(corpus(name).name == name for name in NAMED)
    with pytest.raises(UnknownNameError, match=r"(?s)unknown corpus 'x'.*op_db"):
        corpus("x")


def test_every_function_of_torchs_database_is_a_chunk_that_agrees_with_itself() -> None:
    found = corpus("autograd_function_db")
    assert len(found.chunks()) == len({op.name for op in database})
    for chunk in found.chunks():
        for item in found.programs(chunk, CPU, 0):
            assert compare(item, resolve("eager"), CPU).row.verdict is Verdict.AGREE


def test_op_db_has_the_differentiable_operators() -> None:
    chunks = corpus("op_db").chunks()
    assert 500 < len(chunks) == len(set(chunks))
    assert "add" in chunks
    assert "ones_like" not in chunks


@pytest.mark.parametrize(
    "address",
    [
        "op_db::mul::2",
        "op_db::nn.functional.dropout::1",
        "op_db:complex64::mul::2",
        "module_db::nn.Linear::0",
        "module_db:float64::nn.Linear::0",
    ],
)
def test_a_case_is_found_again_with_the_same_inputs(address: str) -> None:
    case = Case.parse(address)
    one, two = (compare(program(case, CPU), resolve("eager"), CPU).evidence for _ in range(2))
    assert one.eager.grads
    for left, right in zip(one.eager.grads, two.eager.grads, strict=True):
        assert torch.equal(left.value.parts[0], right.value.parts[0])


@pytest.mark.parametrize(
    ("name", "chunk", "dtype"),
    [
        ("op_db", "mul", torch.float32),
        ("op_db:float64", "mul", torch.float64),
        ("op_db:bfloat16", "mul", torch.bfloat16),
        ("op_db:complex64", "mul", torch.complex64),
        ("module_db:float64", "nn.Linear", torch.float64),
    ],
)
def test_every_gradient_of_a_corpus_has_its_dtype(name: str, chunk: str, dtype: torch.dtype) -> None:
    for item in corpus(name).programs(chunk, CPU, 0):
        evidence = compare(item, resolve("planted:last-bit"), CPU).evidence
        assert {grad.value.dtype for grad in evidence.eager.grads if grad.value is not None} == {dtype}
        assert item.fp64 is (dtype is not torch.float64)


def test_a_corpus_lists_only_operators_that_have_its_dtype() -> None:
    real, complex_ = (set(corpus(name).chunks()) for name in ("op_db", "op_db:complex64"))
    assert "mul" in complex_ & real
    assert "nn.functional.relu" in real - complex_
    assert 300 < len(complex_) < len(real)


def test_an_index_too_high_is_reported() -> None:
    with pytest.raises(UnknownNameError, match="unknown case"):
        program(Case("op_db", "mul", 100_000), CPU)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_have_gradients_for_all_parameters(name: str) -> None:
    pytest.importorskip("transformers", reason="the extra 'models' is not installed")
    found = compare(program(Case("models", name), CPU), resolve("planted:scale-grad"), CPU)
    assert found.row.symptom == "grad-values-bits"
    assert len(found.evidence.eager.grads) > 20
    assert all(grad.value is not None for grad in found.evidence.eager.grads)


def test_fresh_copies_keep_strides_and_sharing() -> None:
    base = torch.randn(4, 6)
    turned, cut = base.t().requires_grad_(), base[:, ::2]
    one, two, again, number, dtype = fresh((turned, cut, turned, 3, torch.float32), probe())
    assert one is again
    assert (one.stride(), two.stride(), number, dtype) == (turned.stride(), cut.stride(), 3, torch.float32)
    assert one.requires_grad
    assert one.is_leaf
    with torch.no_grad():
        one.zero_()
    assert base.abs().sum() > 0


def test_fresh_copies_are_wide_in_the_reference_run() -> None:
    made = fresh(
        [torch.ones(2), torch.ones(2, dtype=torch.complex64), torch.ones(2).int(), torch.float32],
        probe(torch.float64),
    )
    assert [made[0].dtype, made[1].dtype, made[2].dtype, made[3]] == [
        torch.float64,
        torch.complex128,
        torch.int32,
        torch.float64,
    ]


def test_cotangents_fit_their_outputs() -> None:
    for output in (torch.ones(2, 3), torch.ones(2, dtype=torch.complex64), torch.eye(2).to_sparse()):
        made = cotangent(output, probe())
        assert (made.shape, made.dtype, made.layout) == (output.shape, output.dtype, output.layout)


def test_differentiable_tensors_once_each() -> None:
    x = torch.ones(1, requires_grad=True)
    assert differentiable({"a": [x, x], "b": (torch.ones(1), x)}) == [x]


def test_a_scenario_needs_a_sentence_and_an_own_name() -> None:
    with pytest.raises(CaseError, match="no docstring"):
        scenario()(lambda p: None)
    taken = next(iter(registered()), None)

    def again(p: Probe) -> None:
        """Says something."""

    if taken is not None:
        again.__name__ = taken
        with pytest.raises(CaseError, match="two scenarios"):
            scenario()(again)


def test_every_higher_order_operator_with_samples_here_has_a_gradient() -> None:
    found = corpus("hop_db")
    assert {"map.nested", "cond.simple", "invoke_subgraph.simple"} <= set(found.chunks())
    assert not {"scan.simple", "while_loop.simple"} & set(found.chunks())
    # Up to 2.12, some have none on a CPU: neither eager attention by a score function, nor `local_map`.
    none = {"flex_attention.simple", "flex_attention_backward.simple", "local_map_hop.simple"}
    without = none & set(found.chunks()) if torch.__version__ < "2.13" else set()
    for chunk in found.chunks():
        for item in found.programs(chunk, CPU, 0):
            grads = compare(item, resolve("eager"), CPU).evidence.eager.grads
            has_all = bool(grads) and all(grad.value is not None for grad in grads)
            assert has_all == (chunk not in without), chunk


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_are_given_to_the_subject_to_compile(name: str) -> None:
    pytest.importorskip("transformers", reason="the extra 'models' is not installed")

    class Refuses(Subject):
        def compile(self, target):
            raise LookupError(type(target).__name__)

    found = compare(program(Case("models", name), CPU), Refuses("refuses"), CPU)
    assert found.row.symptom == "raises LookupError"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4, 5), (0, 2)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_keeps_shape_and_dtype(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.randn(shape, dtype=dtype)
    made = laid_out(name, value)
    assert (made.shape, made.dtype) == (value.shape, value.dtype)
    if name in ("contiguous", "transposed", "strided", "channels last", "offset"):
        assert torch.equal(made, value)


def test_layouts_are_what_their_names_say() -> None:
    value = torch.randn(2, 3, 4, 5)
    assert laid_out("expanded", value).stride() == (0, 0, 0, 0)
    assert laid_out("transposed", value).stride() == (1, 2, 6, 24)
    assert laid_out("strided", value).stride() == (120, 40, 10, 2)
    assert laid_out("channels last", value).is_contiguous(memory_format=torch.channels_last)
    assert laid_out("offset", value).storage_offset() == 1
    assert laid_out("negated", value).is_neg()
    assert laid_out("negated", value.to(torch.complex64)).is_conj()


def test_each_layout_is_the_first_that_some_case_sees() -> None:
    names = [
        [
            value.name.removeprefix("grad 0 of ")
            for value in observe(item.case, item.body, resolve("eager"), torch.float32, CPU).values
            if value.name.startswith("grad 0 ")
        ]
        for item in corpus("op_db_cotangents").programs("sub", CPU, 0)
    ]
    assert [found[:PER_CASE] for found in names[:3]] == [list(LAYOUTS)[n : n + PER_CASE] for n in range(3)]


def test_architectures_are_those_of_the_packages_in_each_memory_format() -> None:
    pytest.importorskip("transformers", reason="the extra 'models' is not installed")
    found = corpus("architectures")
    chunks = found.chunks()
    assert len(set(chunks)) == len(chunks) > 100
    assert {"transformers/gpt2", "transformers/bert", "transformers/t5", "transformers/vit"} <= {*chunks}
    assert [len(list(found.programs(f"transformers/{kind}", CPU, 0))) for kind in ("gpt2", "vit")] == [1, 2]
    with pytest.raises(UnknownNameError, match="unknown architecture 'transformers/none'"):
        list(found.programs("transformers/none", CPU, 0))


@pytest.mark.parametrize("kind", ["gpt2", "t5", "vit"])
def test_an_architecture_is_trained_from_a_small_configuration(kind: str) -> None:
    pytest.importorskip("transformers", reason="the extra 'models' is not installed")
    found = compare(program(Case("architectures", f"transformers/{kind}", 0), CPU), resolve("eager"), CPU)
    assert found.row.verdict is Verdict.AGREE
    assert not found.row.set_aside
    assert found.evidence is not None
    assert [value.name for value in found.evidence.eager.values] == ["loss 0", "loss 1", "loss 2"]


def test_a_configuration_gets_small_sizes_of_the_names_that_it_has() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    given = SimpleNamespace(
        hidden_size=768, num_heads=[2, 4], sliding_window=None, use_cache=True, layer_types=kinds, head_dim=64
    )
    sizes = {"hidden_size": 32, "use_cache": False, "head_dim": 8}
    two = {"layer_types": ["sliding_attention", "full_attention"]}
    without = {"hidden_size": 32, "use_cache": False}
    assert list(small_forms(given, is_of_images=False)) == [{**sizes, **two}, sizes, {**without, **two}]
    (first, *_) = small_forms(SimpleNamespace(d_model=512, is_encoder_decoder=True), is_of_images=False)
    assert first == {"d_model": 32, "decoder_start_token_id": 0}
    images = SimpleNamespace(image_size=224, patch_size=16, vocab_size=9, depths=[2, 2, 6])
    (first, *_) = small_forms(images, is_of_images=True)
    assert first == {"image_size": 32, "patch_size": 8, "depths": [1, 1, 1]}
