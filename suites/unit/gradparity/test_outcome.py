"""Records: snapshots that do not change, and fingerprints."""

import torch

from gradparity.outcome import KEEP_ELEMENTS, HookEvent, describe, fingerprint, freeze, snapshot


def test_a_snapshot_does_not_follow_the_tensor() -> None:
    tensor = torch.ones(2, 3).t()
    record = snapshot(tensor)
    tensor.mul_(2)
    assert record.parts[0].eq(1).all()
    assert (record.shape, record.strides, record.cls) == ((3, 2), (1, 3), "Tensor")


def test_fingerprints_see_bytes_shape_and_dtype() -> None:
    ones = torch.ones(4)
    same = {fingerprint(freeze(t)) for t in (ones, ones.clone(), torch.ones(8)[::2])}
    other = {fingerprint(freeze(t)) for t in (ones * 2, ones.view(2, 2), ones.double(), ones.int())}
    assert len(same) == 1
    assert len(other) == 4
    assert not same & other


def test_fingerprints_do_not_see_the_sign_of_zero_or_nan_bits() -> None:
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(freeze(nan[0])) == fingerprint(freeze(nan[1]))
    assert fingerprint(freeze(torch.tensor(0.0))) == fingerprint(freeze(torch.tensor(-0.0)))


def test_payloads_of_every_kind() -> None:
    payload = freeze((None, True, 3, 2.5, "word", (torch.tensor([1.0]), None)))
    event = HookEvent("here", "tensor", payload)
    assert event.describe() == "tensor here (None, True, 3, 2.5, 'word', (float32[1]=1, None))"
    assert event.fingerprint == HookEvent("there", "tensor", payload).fingerprint
    assert event.fingerprint != fingerprint(freeze((None, True, 3, 2.5, "word", (torch.tensor([2.0]), None))))


def test_dictionaries_and_sets_are_compared_by_what_they_hold() -> None:
    held = {"runs": 1, "seen": {"b", "a"}}
    before = freeze(held)
    held["runs"] += 1
    assert fingerprint(before) != fingerprint(freeze(held))
    assert describe(before) == "'dict', ('runs', 1), ('seen', ('set', 'a', 'b'))"


def test_a_large_payload_keeps_its_head_and_the_hash_of_all() -> None:
    big = torch.zeros(KEEP_ELEMENTS + 5)
    record = snapshot(big, KEEP_ELEMENTS)
    big[-1] = 1.0
    assert record.parts[0].numel() == KEEP_ELEMENTS
    assert record.digest is not None
    assert record.digest != snapshot(big, KEEP_ELEMENTS).digest


def test_sparse_and_nested_tensors_are_compared_by_their_parts() -> None:
    sparse = torch.eye(3).to_sparse()
    assert [tuple(part.shape) for part in snapshot(sparse).parts] == [(2, 3), (3,)]
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert any(part.numel() == 5 for part in snapshot(jagged).parts)


def test_complex_half_can_be_recorded() -> None:
    assert "complex32" in describe(freeze(torch.ones(9, dtype=torch.complex32)))


def test_a_module_is_shown_alike_whatever_was_made_of_it() -> None:
    module = torch.nn.Linear(1, 1)
    assert freeze(torch.compile(module, backend="eager")) == freeze(module)
