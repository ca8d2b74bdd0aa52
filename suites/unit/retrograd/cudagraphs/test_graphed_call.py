"""A call that records itself: without a device, by a recorder that reads remembered memory."""

from __future__ import annotations

import functools
import gc
import os
import random
import threading

import pytest
import torch

from retrograd.cudagraphs import graphed_call, program, results
from retrograd.cudagraphs.addresses import AddressHistory
from retrograd.cudagraphs.graphed_call import (
    MOST_INVERSIONS,
    MOST_LARGE,
    MOST_RECORDINGS,
    TRIED,
    WARM_UPS,
    GraphedCall,
    SharedMemory,
    Values,
)
from unit.retrograd.cudagraphs.without_device import Recorder

CPU = torch.device("cpu")
#: bytes of two inputs.
SIZES = [16, 16]


def double(inputs):
    (x,) = inputs
    inputs.clear()
    return [x * 2]


def call_of(fn, recorder, memory=None, **values):
    told = []
    tell = functools.cache(told.append)
    kept, kin = {place: place for place in values.pop("kept", ())}, values.pop("kin", None)
    return GraphedCall(fn, recorder.program, CPU, Values(kept, memory=memory, **values), tell, kin), told


def warmed(call, *inputs):
    """Run until the next call is recorded."""
    for _ in range(WARM_UPS):
        call(list(inputs))


def test_the_first_calls_run_as_they_are_then_one_is_recorded_and_replayed():
    recorder, x = Recorder(), torch.ones(3)
    call, told = call_of(double, recorder)
    seen = []
    for step in range(WARM_UPS + 3):
        x.fill_(step)
        assert torch.equal(call([x])[0], torch.full((3,), 2.0 * step))
        seen.append((recorder.records, recorder.replays))
    assert seen == [(0, 0)] * WARM_UPS + [(1, 1), (1, 2), (1, 3)]
    assert told == []


def test_the_list_of_inputs_is_emptied_by_a_replay():
    x = torch.ones(3)
    call, _ = call_of(double, Recorder())
    for _ in range(WARM_UPS + 2):
        inputs = [x]
        call(inputs)
        assert inputs == []


def test_a_result_is_not_changed_by_the_next_replay():
    x = torch.ones(3)
    call, _ = call_of(double, Recorder())
    warmed(call, x)
    first = call([x])[0]
    x.fill_(5)
    second = call([x])[0]
    assert (first.tolist(), second.tolist()) == ([2] * 3, [10] * 3)


def test_another_address_is_not_read_through_an_old_recording():
    recorder, one, other = Recorder(), torch.ones(3), torch.full((3,), 7.0)
    call, _ = call_of(double, recorder)
    warmed(call, one)
    for x in (one, other, one, other, one, other):
        assert torch.equal(call([x])[0], x * 2)
    assert recorder.records == 2


def test_an_input_that_always_comes_from_elsewhere_is_copied():
    recorder, weight = Recorder(), torch.full((3,), 3.0)

    def times(inputs):
        x, w = inputs
        inputs.clear()
        return [x * w]

    call, told = call_of(times, recorder, copyable=12)
    held = [torch.full((3,), float(i)) for i in range(12)]
    for x in held:
        assert torch.equal(call([x, weight])[0], x * 3)
    assert recorder.records == 1
    assert recorder.replays == 12 - WARM_UPS
    assert told == []


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.full((1, 3), float(i)).expand(4, 3),
        lambda i: torch.full((6, 4), float(i))[::2, 1:3],
        lambda i: torch.full((3, 4), float(i)).t(),
        lambda i: torch.full((), float(i)),
        lambda i: torch.empty(0),
    ],
)
def test_an_input_of_any_layout_is_copied(make):
    recorder = Recorder()
    call, _ = call_of(lambda inputs: [inputs[0] * 2, inputs[0]], recorder, copyable=1000)
    held = [make(i) for i in range(8)]
    for x in held:
        doubled, same = call([x])
        assert torch.equal(doubled, x * 2)
        assert same is x
        assert doubled.stride() == (x * 2).stride()
    assert recorder.replays


def test_an_input_that_is_none_stays_none():
    def add(inputs):
        x, y = inputs
        return [x if y is None else x + y, None, 4]

    call, told = call_of(add, Recorder())
    x = torch.ones(2)
    for _ in range(WARM_UPS + 2):
        (total, nothing, four) = call([x, None])
        assert (total is x, nothing, four) == (True, None, 4)
    assert told == []


def test_two_inputs_that_are_the_same_memory():
    def both(inputs):
        x, y = inputs
        return [x + y]

    call, _ = call_of(both, Recorder())
    x = torch.ones(4)
    for step in range(WARM_UPS + 3):
        x.fill_(step)
        assert torch.equal(call([x, x.view(4)])[0], torch.full((4,), 2.0 * step))


def test_results_that_are_or_show_an_input_are_those_of_this_call():
    def shown(inputs):
        x = inputs[0]
        return [x, x[1:], x.t(), x + 1]

    call, _ = call_of(shown, Recorder())
    held = [torch.full((3, 3), float(i)) for i in range(8)]
    for x in held:
        same, rest, turned, _ = call([x])
        assert same is x
        x[1, 0] = 50
        assert rest[0, 0] == 50
        assert turned[0, 1] == 50


def test_results_that_share_memory_still_do():
    def twice(inputs):
        made = inputs[0] * 2
        return [made, made[1:], made.expand(2, 3)]

    call, _ = call_of(twice, Recorder())
    x = torch.ones(3)
    for _ in range(WARM_UPS + 2):
        made, rest, wide = call([x])
        made[1] = 9
        assert rest[0] == 9
        assert wide.tolist() == [[2, 9, 2]] * 2
        assert made._version == 1


def test_results_that_are_one_tensor_still_are():
    def twice(inputs):
        made = inputs[0] * 2
        return [made, inputs[0], made, inputs[0]]

    call, _ = call_of(twice, Recorder())
    x = torch.ones(3)
    for _ in range(WARM_UPS + 2):
        made, same, again, same_again = call([x])
        assert made is again
        assert same is same_again is x


@pytest.mark.parametrize("place", [0, 1])
def test_a_kept_result_that_is_also_handed_out_is_not_kept(place):
    def twice(inputs):
        made = inputs[0] * 2
        return [made, made]

    recorder, x = Recorder(), torch.ones(3)
    call, _ = call_of(twice, recorder, kept=[place])
    warmed(call, x)
    out, saved = call([x])
    call([x.fill_(5)])
    assert out is saved
    assert saved.tolist() == [2] * 3
    assert recorder.replays == 2


def test_a_result_with_gaps_keeps_its_layout():
    call, _ = call_of(lambda inputs: [(inputs[0] * 2)[:, ::2]], Recorder())
    x = torch.arange(12.0).view(3, 4)
    for _ in range(WARM_UPS + 2):
        (result,) = call([x])
        assert result.stride() == (4, 2)
        assert torch.equal(result, (x * 2)[:, ::2])


def test_what_shows_memory_as_another_dtype_is_not_recorded():
    call, told = call_of(lambda inputs: [inputs[0].view(torch.int32)], Recorder())
    x = torch.ones(3)
    for _ in range(WARM_UPS + 2):
        assert torch.equal(call([x])[0], x.view(torch.int32))
    assert [reason.code for reason in told] == ["cuda-graphs-failed"]


# kept results


def test_a_kept_result_stays_in_place_and_while_it_is_held_another_recording_is_replayed():
    recorder, x = Recorder(), torch.ones(3)
    call, told = call_of(lambda inputs: [inputs[0] * 2, inputs[0] * 3], recorder, kept=[1])
    warmed(call, x)
    out, saved = call([x])
    where = saved.data_ptr()
    other_out, other_saved = call([x.fill_(4)])
    assert (recorder.records, recorder.replays) == (2, 2)
    assert (out.tolist(), saved.tolist()) == ([2] * 3, [3] * 3)
    assert (other_out.tolist(), other_saved.tolist()) == ([8] * 3, [12] * 3)
    del other_saved
    other_saved = call([x.fill_(5)])[1]
    assert (saved.tolist(), other_saved.tolist()) == ([3] * 3, [15] * 3)
    del saved, other_saved
    assert call([x])[1].data_ptr() == where  # of several, the oldest
    assert (recorder.records, recorder.replays) == (2, 4)
    assert not told


def test_calls_that_overlap_in_the_order_in_which_they_began_are_replayed_where_they_can_be():
    recorder, x, waiting = Recorder(), torch.ones(3), []
    call, _ = call_of(lambda inputs: [inputs[0] * 2], recorder, SharedMemory(), kept=[0])
    for step in range(90):
        waiting.append((call([x.fill_(step)])[0], 2.0 * step))
        if len(waiting) == 2:
            saved, expected = waiting.pop(0)
            assert saved.tolist() == [expected] * 3
            del saved
    assert recorder.records <= MOST_INVERSIONS + 4
    assert recorder.replays >= 40


@pytest.mark.parametrize("most", [0, 3])
def test_so_many_recordings_are_held_at_once_then_it_runs_as_it_is(monkeypatch, most):
    monkeypatch.setattr(graphed_call, "MOST_AT_ONCE", most)
    recorder, x = Recorder(), torch.ones(3)
    call, told = call_of(lambda inputs: [inputs[0] * 2], recorder, kept=[0])
    warmed(call, x)
    held = [(call([x.fill_(i)])[0], 2.0 * i) for i in range(6)]
    assert all(saved.tolist() == [expected] * 3 for saved, expected in held)
    assert (recorder.records, recorder.replays) == (most + 1, most + 1)
    assert [reason.code for reason in told] == ["cuda-graphs-held"]
    held.clear()
    del held
    call([x])
    assert (recorder.records, recorder.replays) == (most + 1, most + 2)


def test_a_view_of_a_kept_result_is_not_overwritten():
    recorder, x = Recorder(), torch.ones(3)
    call, _ = call_of(lambda inputs: [inputs[0] * 2], recorder, kept=[0])
    warmed(call, x)
    view = call([x])[0][1:]
    assert call([x.fill_(4)])[0].tolist() == [8] * 3
    assert view.tolist() == [2] * 2
    assert recorder.records == 2
    where = view.data_ptr()
    del view
    assert call([x])[0][1:].data_ptr() == where


def test_a_kept_result_saved_by_autograd_is_not_overwritten_until_its_graph_lets_go():
    recorder, x = Recorder(), torch.ones(3)
    call, _ = call_of(lambda inputs: [inputs[0] * 2], recorder, kept=[0])
    warmed(call, x)
    leaf, saved = torch.ones(3, requires_grad=True), call([x])[0]
    where, product = saved.data_ptr(), leaf * saved
    del saved
    assert call([x.fill_(4)])[0].data_ptr() != where
    product.sum().backward()
    assert leaf.grad.tolist() == [2] * 3
    assert call([x])[0].data_ptr() == where
    assert (recorder.records, recorder.replays) == (2, 3)


def test_a_kept_result_has_versions_of_its_own():
    x = torch.ones(3)
    call, _ = call_of(lambda inputs: [inputs[0] * 2], Recorder(), kept=[0])
    warmed(call, x)
    kept = call([x])[0]
    kept.add_(1)
    assert kept._version == 1
    del kept
    again = call([x])[0]
    assert (again._version, again.tolist()) == (0, [2] * 3)


def test_what_shares_memory_with_a_result_that_is_handed_out_is_not_kept():
    def made(inputs):
        out = inputs[0] * 2
        return [out, out[1:]]

    recorder, x = Recorder(), torch.ones(3)
    call, _ = call_of(made, recorder, kept=[1])
    warmed(call, x)
    out, saved = call([x])
    call([x.fill_(5)])
    assert (out.tolist(), saved.tolist()) == ([2] * 3, [2] * 2)
    assert recorder.replays == 2


# how many


def test_the_recordings_used_last_are_held():
    recorder = Recorder()
    call, _ = call_of(double, recorder)
    held = [torch.full((2,), float(i)) for i in range(MOST_RECORDINGS)]
    for x in held:
        for _ in range(2**MOST_RECORDINGS):
            call([x])
    made, replays = recorder.records, recorder.replays
    for x in held:
        call([x])
    assert (made, recorder.records) == (MOST_RECORDINGS, MOST_RECORDINGS)
    assert recorder.replays == replays + MOST_RECORDINGS


def test_addresses_that_come_again_are_recorded_and_little_that_changes_is_copied():
    history = AddressHistory(copyable=0)
    assert [history.note([1, i], SIZES) for i in (1, 2, 3, 2, 4, 5, 6, 7, 2)] == [
        *[False] * 3,
        True,
        *[False] * 5,
    ]
    assert history.copied == frozenset()
    history = AddressHistory(copyable=20)
    assert [history.note([1, i], SIZES) for i in (1, 2, 3)] == [False, True, True]
    assert history.copied == {1}
    assert not history.note([2, 4], SIZES)  # both together are more
    assert history.copied == {1}
    assert history.note([2, 5], SIZES)


def test_what_moves_to_where_a_recording_gives_it_is_not_copied_unless_it_moves_away_again():
    history = AddressHistory(copyable=64)
    assert [history.note([1, i], SIZES, given) for i, given in ((1, []), (2, []), (3, [1]), (3, [1]))] == [
        False,
        True,
        True,
        True,
    ]
    assert history.copied == {1}
    assert history.settle([1])
    assert history.copied == frozenset()
    assert all(history.note([1, i], SIZES, [1]) for i in range(4, 40))
    assert history.copied == frozenset()
    assert [history.note([1, i], SIZES) for i in (50, 51)] == [True, True]
    assert history.copied == {1}
    assert not history.settle([1])


def test_batches_in_turn_share_one_recording_of_a_forward():
    recorder, weight = Recorder(), torch.full((8,), 3.0)
    fn = lambda inputs: [inputs[0][0] * inputs[1], inputs[1] * 2]  # noqa: E731
    call, told = call_of(fn, recorder, kept=[1], copyable=64)
    batches = [torch.full((2,), float(i)) for i in range(3)]
    for step in range(12):
        x = batches[step % 3]
        out, saved = call([x, weight])
        assert torch.equal(out, x[0] * weight)
        assert torch.equal(saved, weight * 2)
        del saved
    assert (recorder.records, recorder.replays) == (1, 12 - WARM_UPS)
    assert told == []


def pair(recorder, size=8):
    """A forward that keeps a result, and a backward that reads it, in one memory."""
    memory = SharedMemory()
    forward, _ = call_of(lambda inputs: [inputs[0] * 2], recorder, kept=[0], copyable=4 * size, memory=memory)
    backward, _ = call_of(lambda inputs: [inputs[0].sum()], recorder, copyable=4, memory=memory)
    return forward, backward


def test_a_backward_is_recorded_once_its_forward_is_and_in_its_memory():
    recorder = Recorder()
    forward, backward = pair(recorder)
    held = []  # so that each forward that runs as it is saves elsewhere
    for step, x in enumerate([torch.full((8,), float(step)) for step in range(8)]):
        (saved,) = forward([x])
        assert backward([saved])[0] == 16 * step
        if step < WARM_UPS:
            held.append(saved)
        del saved
    assert recorder.lie_in == [1, 1]
    assert not backward._history.copied


def test_a_forward_that_is_recorded_anew_frees_what_was_recorded_before():
    recorder = Recorder()
    forward, backward = pair(recorder)
    here, there = torch.ones(8), torch.full((8,), 2.0)
    for x in (here,) * 5 + (there,) * 4:  # from then on, `x` is copied
        (saved,) = forward([x])
        assert backward([saved])[0] == 2 * x.sum()
        del saved
    assert len(forward._recordings) == len(backward._recordings) == 1
    assert recorder.lie_in == [1] * 4


def test_where_inputs_move_without_end_recordings_become_rare():
    recorder = Recorder()
    call, _ = call_of(double, recorder)
    for x in [torch.ones(8) for _ in range(32)]:
        for _ in range(2):  # each address comes twice
            assert call([x])[0].tolist() == [2] * 8
    assert recorder.records <= 6


def test_recordings_that_are_seldom_replayed_are_let_go_of(monkeypatch):
    monkeypatch.setattr(graphed_call, "MOST_RECORDINGS", 2)
    recorder = Recorder()
    call, told = call_of(lambda inputs: [inputs[0] + inputs[1]], recorder, written={0, 1})  # none is copied
    x = torch.ones(8)
    places = [torch.ones(8) for _ in range(100)]
    for place in places:
        for _ in range(2):
            assert call([x, place])[0].tolist() == [2] * 8
    assert recorder.records == TRIED
    assert [reason.code for reason in told] == ["cuda-graphs-moving"]
    gc.collect()
    assert not recorder.program.pools
    records = recorder.records
    for _ in range(8):
        assert call([x, x])[0].tolist() == [2] * 8
    assert recorder.records == records


def test_recordings_of_a_function_copy_into_the_same_buffers_and_keep_no_memory_for_what_they_copy():
    recorder, weights = Recorder(), [torch.full((8,), 2.0), torch.full((8,), 3.0)]
    call, _ = call_of(lambda inputs: [inputs[0] * inputs[1]], recorder, copyable=32, written={1})
    for step in range(40):
        x, weight = torch.full((8,), float(step)), weights[step % 2]
        assert torch.equal(call([x, weight])[0], x * weight)
    assert recorder.records == 2
    first, second = call._recordings
    assert first._buffers[0].tensor is second._buffers[0].tensor
    assert all(block.is_free() for block in blocks_of(recorder))


def test_all_recordings_of_a_pool_copy_into_the_same_buffers_one_for_each_input():
    recorder = Recorder()
    minus, _ = call_of(lambda inputs: [inputs[0] - inputs[1]], recorder, copyable=64)
    times, _ = call_of(lambda inputs: [inputs[0] * 2], recorder, copyable=64)
    for step in range(40):
        x, y = torch.full((8,), float(step)), torch.full((8,), step / 3)
        difference = minus([x, y])[0]
        assert torch.equal(times([y.clone()])[0], y * 2)
        assert torch.equal(difference, x - y)
    assert recorder.records == 2
    (one,), (other,) = minus._recordings, times._recordings
    assert one._buffers[0] is other._buffers[0] is not one._buffers[1]
    del one, other, minus, times
    gc.collect()
    assert not recorder.program.pools


def test_of_what_holds_much_fewer_recordings_are_held(monkeypatch):
    monkeypatch.setattr(graphed_call, "MUCH", 16)
    for copyable, most in ((16, MOST_RECORDINGS), (17, MOST_LARGE)):
        call, _ = call_of(lambda inputs: [inputs[0] * 2], Recorder(), copyable=copyable)
        for x in [torch.ones(8) for _ in range(MOST_RECORDINGS + 1)]:
            for _ in range(2 * 2**MOST_RECORDINGS):
                call([x])
        assert len(call._recordings) == most


def test_a_backward_on_another_stream_is_recorded_apart():
    recorder = Recorder()
    forward, backward = pair(recorder)
    x = torch.ones(8)
    for _ in range(6):
        recorder.current = 0
        (saved,) = forward([x])
        recorder.current = 1
        backward([saved])
        del saved
    assert recorder.lie_in == [1, 2]


def test_results_are_copied_before_another_thread_replays():
    recorder, x = Recorder(), torch.ones(3)
    one, _ = call_of(double, recorder)
    other, _ = call_of(double, recorder)
    for call in (one, other):
        warmed(call, x)
        call([x])
    replay, free = one._recordings[0]._replay, []

    def replay_and_look():
        replay()
        thread = threading.Thread(target=lambda: free.append(recorder.program.replaying.take_if_free()))
        thread.start()
        thread.join()

    one._recordings[0]._replay = replay_and_look
    one([x])
    assert free == [False]


def test_a_recording_holds_none_of_the_inputs():
    call, _ = call_of(lambda inputs: [inputs[0] * 2, inputs[0]], _Forgetful())
    x = torch.ones(3)
    warmed(call, x)
    call([x])
    count = torch._C._storage_Use_Count(x.untyped_storage()._cdata)
    fresh = torch.ones(3)
    assert count == torch._C._storage_Use_Count(fresh.untyped_storage()._cdata)


class _Forgetful(Recorder):
    """Holds no memory, as a CUDA graph holds none."""

    def record(self, fn, inputs, device, pool):
        recording = super().record(fn, inputs, device, pool)
        recording._memory = []
        recording.replay = lambda: None
        return recording


# refusals


@pytest.mark.parametrize("code", ["cuda-graphs-not-now"])
def test_what_speaks_against_it_now_is_asked_in_each_call_and_told_once(code):
    recorder, x = Recorder(), torch.ones(3)
    call, told = call_of(double, recorder)
    warmed(call, x)
    recorder.now = "anomaly mode is on"
    for _ in range(3):
        assert call([x])[0].tolist() == [2] * 3
    recorder.now = None
    call([x])
    assert (recorder.records, recorder.replays) == (1, 1)
    assert [(reason.code, "anomaly mode is on" in reason.text) for reason in told] == [(code, True)]


def test_another_stream_than_the_recorded_one():
    recorder, x = Recorder(), torch.ones(3)
    call, told = call_of(double, recorder)
    warmed(call, x)
    call([x])
    recorder.current = 1
    assert call([x])[0].tolist() == [2] * 3
    other = torch.ones(3)
    for _ in range(3):
        call([other])
    assert (recorder.records, recorder.replays) == (1, 1)
    assert ["another stream" in reason.text for reason in told] == [True]


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "an input is float"), (torch.empty(1, device="meta"), "an input is on meta")]
)
def test_inputs_that_are_no_tensors_of_the_device(value, text):
    recorder = Recorder()
    call, told = call_of(lambda inputs: [inputs[0] * 2], recorder)
    x = torch.ones(3)
    for _ in range(WARM_UPS + 2):
        assert call([x, value])[0].tolist() == [2] * 3
    assert recorder.records == 0
    assert [text in reason.text for reason in told] == [True]


class _Refusing(Recorder):
    def record(self, fn, inputs, device, pool):
        self.records += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_recorded_runs_as_it_is_and_is_not_tried_again():
    recorder, x = _Refusing(), torch.ones(3)
    call, told = call_of(double, recorder)
    for _ in range(WARM_UPS + 4):
        assert call([x])[0].tolist() == [2] * 3
    assert recorder.records == 1
    (reason,) = told
    assert reason.code == "cuda-graphs-failed"
    assert "RuntimeError: operation not permitted" in reason.text


class _Picky(Recorder):
    """Cannot record functions that wait."""

    def record(self, fn, inputs, device, pool):
        if fn is not double:
            self.records += 1
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(fn, inputs, device, pool)


def test_a_custom_operator_that_cannot_be_recorded_is_tried_once_and_spoils_no_pool():
    recorder, xs = _Picky(), [torch.full((3,), float(i)) for i in range(4)]
    plain = [call_of(double, recorder)[0] for _ in range(2)]
    waiting = [call_of(lambda i: double(i), recorder, custom=frozenset({"my::op"})) for _ in range(2)]
    other, _ = call_of(double, recorder, custom=frozenset({"my::other"}))
    for _ in range(WARM_UPS + 3):
        for call, x in zip([plain[0], waiting[0][0], waiting[1][0], plain[1]], xs, strict=True):
            assert torch.equal(call([x])[0], x * 2)
        assert torch.equal(other([xs[0]])[0], xs[0] * 2)
    assert recorder.records == 4
    assert [len(call._recordings) for call in (*plain, other)] == [1, 1, 1]
    assert recorder.lie_in[0] == recorder.lie_in[1] != recorder.lie_in[2]
    assert [told[0].code for _, told in waiting] == ["cuda-graphs-failed"] * 2
    assert "my::op failed to be recorded before" in waiting[1][1][0].text


def test_a_failure_leaves_older_recordings_in_use():
    recorder, x, y = Recorder(), torch.ones(3), torch.full((3,), 2.0)
    call, _ = call_of(double, recorder)
    warmed(call, x)
    call([x])
    recorder.record = _Refusing().record
    for _ in range(3):
        assert call([y])[0].tolist() == [4] * 3
    call([x])
    assert recorder.replays == 2


def test_errors_of_the_function_are_its_own():
    def fails(inputs):
        raise ZeroDivisionError("of the user's")

    call, _ = call_of(fails, Recorder())
    for _ in range(WARM_UPS + 2):
        with pytest.raises(ZeroDivisionError, match="of the user's"):
            call([torch.ones(1)])


def test_a_second_thread_runs_the_function_as_it_is_meanwhile():
    recorder, x = Recorder(), torch.ones(3)
    call, _ = call_of(double, recorder)
    warmed(call, x)
    call([x])
    results, replay = [], call._recordings[0]._replay

    def replay_slowly():
        thread = threading.Thread(target=lambda: results.append(call([x])[0].tolist()))
        thread.start()
        thread.join()
        replay()

    call._recordings[0]._replay = replay_slowly
    assert call([x])[0].tolist() == [2] * 3
    assert results == [[2] * 3]
    assert recorder.replays == 2


def test_a_call_inside_a_recording_runs_the_function_as_it_is():
    recorder, x, inner, waiting = Recorder(), torch.ones(3), [], []

    def calls_itself(inputs):
        if waiting and waiting.pop():
            inner.append(call([x])[0].tolist())
        return double(inputs)

    call, _ = call_of(calls_itself, recorder)
    warmed(call, x)
    waiting.append(True)
    assert call([x])[0].tolist() == [2] * 3
    assert inner == [[2] * 3]
    assert recorder.records == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_while_another_thread_is_inside_leaves_the_call_usable():
    recorder, x = Recorder(), torch.ones(3)
    call, _ = call_of(double, recorder)
    warmed(call, x)
    call([x])
    replay, inside, forked = call._recordings[0]._replay, threading.Event(), threading.Event()

    def replay_slowly():
        inside.set()
        forked.wait(60)
        replay()

    call._recordings[0]._replay = replay_slowly
    thread = threading.Thread(target=lambda: call([x]))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        call._recordings[0]._replay = replay
        before = recorder.replays
        os._exit(0 if call([x])[0].tolist() == [2] * 3 and recorder.replays == before + 1 else 1)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_inputs_called_loose_may_come_in_other_strides():
    recorder = Recorder()
    call, _ = call_of(lambda inputs: [inputs[0] * 2], recorder, loose=[0])
    memory = torch.arange(9.0)
    square, turned = memory.view(3, 3), memory.view(3, 3).t()
    warmed(call, square)
    for x in (square, turned, square, turned, turned):
        assert torch.equal(call([x])[0], x * 2)


@pytest.mark.parametrize("change", [torch.conj, lambda x: x.conj().imag.view(3)])
def test_lazily_changed_inputs_and_results_are_not_recorded(change):
    x = torch.randn(3, dtype=torch.complex64)
    call, told = call_of(lambda inputs: [inputs[0] * 2], Recorder(), loose=[0])
    plain = x if change is torch.conj else x.imag
    warmed(call, plain)
    call([plain])
    assert torch.equal(call([change(x)])[0], change(x) * 2)  # the same memory
    assert ["lazily" in reason.text for reason in told] == [True]
    call, told = call_of(lambda inputs: [change(inputs[0]), inputs[0] * 2], Recorder())
    for _ in range(WARM_UPS + 2):
        assert torch.equal(call([x])[0], change(x))
    assert ["lazily" in reason.text for reason in told] == [True]


def test_batches_of_is_grads_batched_run_as_they_are():
    call, told = call_of(lambda inputs: [inputs[0] * 2], Recorder(), loose=[0])
    weight = torch.ones(3, requires_grad=True)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return call([grad])[0]

    warmed(call, torch.ones(3))
    call([torch.ones(3)])
    (rows,) = torch.autograd.grad(Double.apply(weight), weight, torch.eye(3), is_grads_batched=True)
    assert torch.equal(rows, 2 * torch.eye(3))
    assert ["batched" in reason.text for reason in told] == [True]


def test_counters_tell_replays_from_plain_calls():
    counters, x = graphed_call.counters, torch.ones(3)
    before = dict(counters)
    call, _ = call_of(double, Recorder())
    for _ in range(WARM_UPS + 2):
        call([x])
    names = ("cuda_graph_plain_calls", "cuda_graph_recordings", "cuda_graph_replays")
    assert [counters[name] - before.get(name, 0) for name in names] == [WARM_UPS, 1, 2]


def test_a_call_that_dies_lets_its_recordings_go():
    call, _ = call_of(double, Recorder())
    x = torch.ones(3)
    warmed(call, x)
    call([x])
    del call
    gc.collect()
    fresh = torch.ones(3)
    assert torch._C._storage_Use_Count(x.untyped_storage()._cdata) == torch._C._storage_Use_Count(
        fresh.untyped_storage()._cdata
    )


def test_an_input_that_is_written_is_never_copied():
    recorder = Recorder()

    def adds(inputs):
        total, x = inputs
        inputs.clear()
        total.add_(x)
        return [None]

    call, told = call_of(adds, recorder, copyable=1000, written={0})
    totals = [torch.zeros(3), torch.zeros(3)]
    expected = [0.0, 0.0]
    for step in range(20):
        which = step % 3 == 2
        call([totals[which], torch.full((3,), float(step))])
        expected[which] += step
    assert [total.tolist() for total in totals] == [[value] * 3 for value in expected]
    assert recorder.replays > 5
    assert told == []


# results that stay


@pytest.fixture
def all_large(monkeypatch):
    """Every result is large enough to stay."""
    monkeypatch.setattr(results, "LITTLE", 0)


def trained(recorder, lets_go, steps=24, micro_batches=1):
    """Steps of a forward that gives an output and what is saved, and a backward that gives a gradient.

    Args:
        lets_go: of the step, whether the gradient is let go of before the next forward, and whether the
            output is.

    Returns:
        The addresses of gradients, and all that somebody held to the end, with what it should be.
    """
    memory, weight = SharedMemory(), torch.full((8,), 3.0)
    forward, _ = call_of(lambda i: [i[0] * i[1], i[0] * 2], recorder, kept=[1], copyable=64, memory=memory)
    backward, _ = call_of(lambda i: [i[0] * i[1]], recorder, memory, copyable=64, results={0: 1})
    held, where, grad, expected = [], [], None, None
    for step in range(steps):
        gradient_goes, output_goes = lets_go(step)
        if gradient_goes:
            if step % 16 == 15:
                held.append((grad, expected))
            grad = None
        for micro_batch in range(micro_batches):
            x = torch.full((8,), float(step + micro_batch))
            output, saved = forward([x, weight])
            assert torch.equal(output, x * 3)
            if not output_goes:
                held.append((output, x * 3))
            args = [saved, output]
            del saved, output
            (found,) = backward(args)
            where.append(found.data_ptr())
            expected = x * 2 * x * 3 + (0 if grad is None else grad)
            grad = found if grad is None else grad.add_(found)
            assert torch.equal(grad, expected)
            del found
    return where, held


@pytest.mark.usefixtures("all_large")
def test_a_gradient_that_is_let_go_of_stays_where_it_is():
    recorder = Recorder()
    where, _ = trained(recorder, lambda step: (True, True), 14)
    assert len(set(where[-6:])) == 1
    assert recorder.records == 2
    assert recorder.waits == recorder.replays


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "lets_go",
    [
        lambda step: (False, True),
        lambda step: (True, False),
        lambda step: (step % 7 != 6, step % 5 != 4),
        lambda step: (step < 12, step < 9),
    ],
)
def test_what_somebody_holds_is_not_overwritten_and_copied_from_then_on(lets_go, micro_batches):
    recorder = Recorder()
    _, held = trained(recorder, lets_go, 40, micro_batches)
    assert all(torch.equal(value, expected) for value, expected in held)
    assert recorder.replays > 20 * micro_batches
    assert recorder.records <= 8


@pytest.mark.usefixtures("all_large")
def test_nothing_is_replayed_in_memory_where_a_recording_that_is_gone_left_a_result(monkeypatch):
    monkeypatch.setattr(graphed_call, "MOST_RECORDINGS", 1)
    recorder, memory, x = Recorder(), SharedMemory(), torch.full((8,), 3.0)
    forward, _ = call_of(lambda i: [i[0] * 2], recorder, kept=[0], copyable=64, memory=memory)
    backward, _ = call_of(lambda i: [i[0] + i[1]], recorder, memory=memory)
    ones, twos = torch.ones(8), torch.full((8,), 2.0)
    saved = found = None
    while recorder.records < 2:
        del saved, found
        (saved,) = forward([x])
        (found,) = backward([saved, ones])
    while recorder.records == 2:  # its place is taken by another recording
        (other,) = backward([saved, twos])
    del saved, other
    assert torch.equal(forward([x])[0], x * 2)
    assert torch.equal(found, x * 2 + 1)


@pytest.mark.usefixtures("all_large")
def test_what_a_function_that_is_gone_has_given_is_not_overwritten_by_others():
    recorder, x = Recorder(), torch.full((8,), 3.0)
    one, _ = pair(recorder)
    other, _ = pair(recorder)
    for _ in range(WARM_UPS + 2):
        held = None
        one([x])
        (held,) = other([x])
    assert recorder.lie_in == [1, 1]
    del other
    gc.collect()
    for step in range(4):
        assert one([x.fill_(step)])[0].tolist() == [2.0 * step] * 8
    assert held.tolist() == [6] * 8
    assert recorder.lie_in == [1, 1, 1]  # recorded once more, where that is not


@pytest.mark.usefixtures("all_large")
def test_memory_of_a_function_that_is_gone_is_free_for_what_is_recorded_later():
    recorder, x = Recorder(), torch.ones(8)
    (one, _), (other, _), (third, _) = [pair(recorder) for _ in range(3)]
    for _ in range(WARM_UPS + 2):
        one([x])
        other([x])
    (pool,) = recorder.program.pools.values()
    of_other = pool.handle.blocks[1]
    assert not of_other.is_free()
    del other
    gc.collect()
    for _ in range(WARM_UPS + 2):
        third([x])
    assert recorder.lie_in == [1, 1, 1]
    assert of_other.is_free()


@pytest.mark.usefixtures("all_large")
def test_a_result_whose_memory_was_taken_away_is_written_elsewhere():
    recorder, x = Recorder(), torch.ones(8)
    call, _ = call_of(lambda inputs: [inputs[0] * 2, inputs[0] * 3], recorder, SharedMemory(), kept=[1])
    warmed(call, x)
    for step in range(12):
        x.fill_(step)
        result, saved = call([x])
        assert result.tolist() == [2 * step] * 8
        del saved
        if step == 3:
            result.share_memory_()
        del result
    assert recorder.replays > 4


@pytest.mark.usefixtures("all_large")
def test_in_inference_mode_results_are_inference_tensors():
    recorder, x = Recorder(), torch.ones(8)
    call, _ = call_of(lambda inputs: [inputs[0] * 2, inputs[0] * 3], recorder, SharedMemory(), kept=[1])
    warmed(call, x)
    call([x])
    with torch.inference_mode():
        assert all(value.is_inference() for value in call([x]))
    assert not any(value.is_inference() for value in call([x]))
    assert recorder.replays == 2


def forward_and_backward(recorder):
    """Of a function whose result the backward does not read."""
    memory = SharedMemory()
    forward, told = call_of(lambda i: [i[0] * 2, i[0] * 3], recorder, memory, kept=[1], copyable=64)
    backward, _ = call_of(lambda i: [i[0] + 1], recorder, memory, copyable=64, results={0: 1})
    return forward, backward, told


@pytest.mark.usefixtures("all_large")
def test_a_result_that_nobody_holds_leaves_its_memory_to_the_backward():
    recorder, x = Recorder(), torch.ones(8)
    forward, backward, _ = forward_and_backward(recorder)
    for step in range(WARM_UPS + 4):
        result, saved = forward([x.fill_(step)])
        assert result.tolist() == [2 * step] * 8
        del result
        args = [saved]
        del saved
        assert backward(args)[0].tolist() == [3 * step + 1] * 8
    (pool,) = recorder.program.pools.values()
    assert [block.is_free() for block in pool.handle.blocks] == [True, True, False]
    assert recorder.records == 2


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("holds", [lambda step: step > 8, lambda step: step % 3 == 0, lambda step: step == 9])
def test_a_result_that_somebody_holds_in_some_backwards_is_not_overwritten(holds):
    recorder, x = Recorder(), torch.ones(8)
    forward, backward, told = forward_and_backward(recorder)
    for step in range(40):
        result, saved = forward([x.fill_(step)])
        kept = result if holds(step) else None
        del result
        args = [saved]
        del saved
        assert backward(args)[0].tolist() == [3 * step + 1] * 8
        assert kept is None or kept.tolist() == [2 * step] * 8
        del kept
    assert recorder.replays > 2 * 25
    assert recorder.records <= 8
    assert not told


# one pool for several functions


def pieces(recorder, count, **kin):
    """So many forwards, each of which works on what the one before it gives, and their backwards, to which
    what is saved is donated."""
    made = []
    for _ in range(count):
        given = {"memory": SharedMemory(), "copyable": 64, **kin}
        forward, told = call_of(lambda i: [i[0] * 2, i[0] + 1], recorder, kept=[1], **given)
        backward, _ = call_of(lambda i: [i[0] * i[1]], recorder, results={0: 1}, **given)
        made.append((forward, backward, told))
    return made


def run_pieces(made, x):
    """A step of all of them, and what it should be."""
    saved, expected = [], torch.ones(8)
    for forward, _, _ in made:
        expected = expected * (x + 1)
        x, kept = forward([x])
        saved.append(kept)
        del kept
    grad = torch.ones(8)
    for _, backward, _ in reversed(made):
        (grad,) = backward([saved.pop(), grad])
    return grad, expected


def run_steps(made, x, count):
    """So many steps of all of them, with three batches in turn."""
    for step in range(count):
        found, expected = run_pieces(made, x.fill_(step % 3))
        assert torch.equal(found, expected)
        del found


@pytest.mark.usefixtures("all_large")
def test_pieces_of_a_program_work_in_one_memory():
    recorder, x = Recorder(), torch.ones(8)
    made = pieces(recorder, 3)
    run_steps(made, x, 16)
    assert set(recorder.lie_in) == {1}
    assert recorder.replays > 6 * 10
    assert not any(told for *_, told in made)
    forwards, backwards, _ = zip(*made, strict=True)
    copied = [piece._history.copied for piece in (*forwards, *backwards)]
    # each reads what it is given where it is, but for the gradient that the test makes
    assert copied == [set()] * 5 + [{1}]


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("seed", [0, 1, 3])
def test_what_recordings_produce_in_turn_is_copied(seed):
    # layers are skipped at random, so each has other neighbours in each step
    recorder, draw, x = Recorder(), random.Random(seed), torch.ones(8)
    first, _ = call_of(lambda i: [i[0] + 0], recorder, SharedMemory(), copyable=64)
    made, records = pieces(recorder, 6), []
    for step in range(200):
        kept = [piece for piece in made if step < 2 * WARM_UPS or draw.random() < 0.8]
        (y,) = first([x.fill_(step % 3)])
        found, expected = run_pieces(kept, y)
        assert torch.equal(found, expected)
        del found, y
        records.append(recorder.records)
    assert all(len(call._recordings) == 1 for *calls, _ in made for call in calls), "each holds its results"
    assert records[-1] - records[-50] <= 2
    blocks = sum(len(pool.handle.blocks) for pool in recorder.program.pools.values())
    assert blocks <= 1.5 * (1 + 3 * len(made)), "late recordings leave gaps"


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("begin", [0, 3])
def test_recordings_stay_whatever_they_read_of_what_another_gives(begin):
    recorder, x = Recorder(), torch.ones(8)
    shared, _ = call_of(lambda i: [i[0] * 2], recorder, SharedMemory(), copyable=64)
    apart = [call_of(lambda i: [i[0] + 1], recorder, SharedMemory(), copyable=64)[0] for _ in range(6)]
    for step in range(12):
        for call in apart:
            (y,) = call([x.fill_(step % 3)])
            part = y[begin:]
            assert torch.equal(shared([part])[0], part * 2)
            del y, part
    assert len(shared._recordings) == 6


@pytest.mark.usefixtures("all_large")
def test_code_that_layers_share_is_recorded_for_what_each_of_them_gives():
    recorder, x = Recorder(), torch.ones(8)
    shared, _ = call_of(lambda i: [i[0] * 2], recorder, SharedMemory(), copyable=64)
    apart = [call_of(lambda i: [i[0] + 1], recorder, SharedMemory(), copyable=64)[0] for _ in range(6)]
    for step in range(12):
        expected = y = x.fill_(step % 3)
        for call in apart:
            (y,) = call([y])
            (y,) = shared([y])
            expected = (expected + 1) * 2
        assert torch.equal(y, expected)
        del y
    assert recorder.records <= 6 + 6 + 3
    assert recorder.replays >= 9 * 12
    assert len(shared._recordings) == 6
    assert len(recorder.program.pools) == 1


@pytest.mark.usefixtures("all_large")
def test_code_of_layers_whose_inputs_are_copied_is_recorded_for_each_of_them():
    recorder, memory = Recorder(), SharedMemory()
    forward, told = call_of(lambda i: [i[0] * 2, i[0] + 1], recorder, memory, kept=[1], copyable=64)
    backward, _ = call_of(lambda i: [i[0] * i[1]], recorder, memory, copyable=64, results={0: 1})
    elsewhere = []  # so that inputs come from other places each time
    for step in range(12):
        recorded, replays = recorder.records, recorder.replays
        waiting = []
        for layer in range(4):
            elsewhere.append(torch.full((8,), float(step + layer)))
            waiting.append((forward([elsewhere[-1]])[1], elsewhere[-1] + 1))
        while waiting:
            saved, expected = waiting.pop()
            elsewhere.append(torch.full((8,), 2.0))
            args = [saved, elsewhere[-1]]
            del saved
            assert torch.equal(backward(args)[0], expected * 2)
    assert (recorder.records, recorder.replays) == (recorded, replays + 8)
    assert len(forward._recordings) == len(backward._recordings) == 4
    assert len(recorder.program.pools) == 1
    assert not told


@pytest.mark.usefixtures("all_large")
def test_all_that_a_program_repeats_is_recorded_in_the_order_in_which_it_runs():
    recorder, x = Recorder(), torch.ones(8)
    often, _ = pair(recorder)
    made = [pair(recorder)[0] for _ in range(3)]
    for _ in range(12):
        for call in (made[0], often, made[1], often, made[2]):
            call([x])
    calls = (made[0], often, made[1], made[2])
    assert [len(call._recordings) for call in calls] == [1] * 4
    assert [call._recordings[0]._number for call in calls] == [1, 2, 3, 4]


# memory that a forward donates to its backward


def blocks_of(recorder):
    (pool,) = recorder.program.pools.values()
    return pool.handle.blocks


@pytest.mark.usefixtures("all_large")
def test_a_backward_works_in_what_its_forward_saved():
    recorder, x = Recorder(), torch.ones(8)
    made = pieces(recorder, 2)
    run_steps(made, x, 12)
    # an output and what is saved by each forward, then a gradient by each backward; the last output is held
    assert [block.is_free() for block in blocks_of(recorder)] == [True, True, False, True, False, False]
    assert recorder.records == 4


@pytest.mark.usefixtures("all_large")
def test_a_backward_that_retains_its_graph_does_not_work_in_what_was_saved():
    recorder, x = Recorder(), torch.ones(8)
    ((forward, backward, _),) = made = pieces(recorder, 1)
    for _ in range(8):
        run_pieces(made, x)
    replays = recorder.replays
    for step in range(4):
        out, saved = forward([x.fill_(step)])
        for factor in (1.0, 2.0):
            assert torch.equal(backward([saved, torch.full((8,), factor)])[0], (x + 1) * factor)
        del out
        last = [saved]
        del saved
        assert torch.equal(backward([last.pop(), torch.ones(8)])[0], x + 1)
    assert recorder.replays == replays + 4 + 4


@pytest.mark.usefixtures("all_large")
def test_a_backward_that_always_retains_its_graph_is_recorded_beside_what_was_saved():
    recorder, x = Recorder(), torch.ones(8)
    ((forward, backward, _),) = pieces(recorder, 1)
    for step in range(12):
        saved = forward([x.fill_(step)])[1]
        for factor in (1.0, 2.0):
            assert torch.equal(backward([saved, torch.full((8,), factor)])[0], (x + 1) * factor)
        del saved
    assert sum(not block.is_free() for block in blocks_of(recorder)) == 3
    assert recorder.replays > 2 * 8


@pytest.mark.usefixtures("all_large")
def test_what_was_saved_outlives_the_functions_that_gave_and_would_read_it():
    recorder, x = Recorder(), torch.ones(8)
    made = pieces(recorder, 1)
    for _ in range(8):
        run_pieces(made, x)
    saved = made[0][0]([x.fill_(5)])[1]
    del made
    gc.collect()
    assert saved.tolist() == [6] * 8
    assert recorder.program.pools
    del saved
    other, _ = call_of(double, Recorder())
    warmed(other, x)
    other([x])
    gc.collect()
    assert not recorder.program.pools


@pytest.mark.usefixtures("all_large")
def test_what_is_recorded_while_donated_memory_is_in_use_lies_in_another_pool():
    recorder, x = Recorder(), torch.ones(8)
    ((forward, backward, _),) = made = pieces(recorder, 1)
    for _ in range(8):
        run_pieces(made, x)
    before = [*forward._recordings, *backward._recordings]
    between, _ = pair(recorder)
    for step in range(16):
        out, saved = forward([x.fill_(step)])
        assert torch.equal(between([x])[0], x * 2)
        assert torch.equal(saved, x + 1)
        args = [saved, torch.ones(8)]
        del out, saved
        assert torch.equal(backward(args)[0], x + 1)
    assert recorder.lie_in == [1, 1, 2]
    assert before == [*forward._recordings, *backward._recordings]


@pytest.mark.usefixtures("all_large")
def test_so_many_pools_give_memory_away_and_one_more_does_not(monkeypatch):
    monkeypatch.setattr(program, "MOST_DONATING", 2)
    monkeypatch.setattr(program, "MOST_TIDIED", 0)
    recorder, x = Recorder(), torch.ones(8)
    made = []
    for _ in range(program.MOST_DONATING + 2):  # each is recorded inside the others, which have been by then
        made += pieces(recorder, 1)
        run_steps(made, x, 12)
    assert recorder.lie_in[:4] == [1, 1, 2, 2]
    assert set(recorder.lie_in[4:]) == {3}
    saved = [made[i][0]._recordings[0].results._until[0] < results.NOBODY for i in range(len(made))]
    assert saved == [True] * program.MOST_DONATING + [False] * 2
    replays = recorder.replays
    run_steps(made, x, 3)
    assert recorder.replays == replays + 3 * 8


@pytest.mark.usefixtures("all_large")
def test_a_gradient_may_be_what_was_saved():
    recorder, memory, x = Recorder(), SharedMemory(), torch.ones(8)
    forward, _ = call_of(lambda i: [i[0] * 2, i[0] + 1], recorder, memory, kept=[1], copyable=64)
    backward, _ = call_of(lambda i: [i[0], i[0][2:], i[1] * 2], recorder, memory, copyable=64, results={0: 1})
    held = []
    for step in range(24):
        out, saved = forward([x.fill_(step)])
        args = [saved, torch.ones(8)]
        del out, saved
        whole, part, _ = backward(args)
        assert torch.equal(whole, x + 1)
        assert torch.equal(part, whole[2:])
        if step % 4 == 3:
            held.append((whole, x + 1))
        del whole, part
        assert all(torch.equal(value, expected) for value, expected in held)
    assert recorder.replays > 20


@pytest.mark.usefixtures("all_large")
def test_what_was_recorded_before_what_runs_earlier_is_recorded_once_more():
    recorder, x = Recorder(), torch.ones(8)
    first, second, third = made = pieces(recorder, 3)
    for late, early in ((second, [third]), (first, [second, third])):
        run_steps(early, x, 8)
        assert late[0]._recordings == []
    before = recorder.records
    run_steps(made, x, 16)
    assert recorder.records <= before + 15
    replays = recorder.replays
    run_pieces(made, x)
    assert recorder.replays == replays + 6
    assert set(recorder.lie_in) == {1}


@pytest.mark.usefixtures("all_large")
def test_functions_that_wait_for_each_other_in_turns_end_in_pools_of_their_own():
    recorder, x = Recorder(), torch.ones(8)
    waiting = []
    (one, back, _), (other, other_back, _) = pieces(recorder, 2)
    for step in range(60):
        forward, backward = ((one, back), (other, other_back))[step % 2]
        x = torch.full((8,), float(step % 5))
        waiting.append((backward, forward([x.clone()])[1], x + 1))
        if len(waiting) == 2:
            earlier, saved, expected = waiting.pop(0)
            assert torch.equal(earlier([saved, torch.ones(8)])[0], expected)
            del saved
    assert len(set(recorder.lie_in)) > 1
    records, replays = recorder.records, recorder.replays
    assert records < 40
    for step in range(4):
        forward, backward = ((one, back), (other, other_back))[step % 2]
        waiting.append((backward, forward([x])[1], x + 1))
        earlier, saved, expected = waiting.pop(0)
        earlier([saved, torch.ones(8)])
        del saved
    assert (recorder.records, recorder.replays) == (records, replays + 8)


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("most", [0, 2])
def test_recordings_made_in_another_order_are_made_once_more_in_that_of_the_calls(monkeypatch, most):
    monkeypatch.setattr(program, "MOST_TIDIED", most)
    recorder, x = Recorder(), torch.ones(8)
    made = []
    for _ in range(8):  # each in front of those that have been recorded
        made.insert(0, *pieces(recorder, 1))
        run_steps(made, x, 10)
    calls = [*(forward for forward, *_ in made), *(backward for _, backward, _ in reversed(made))]
    numbers = [recorded._number for call in calls for recorded in call._recordings]
    assert len(numbers) == 16
    assert (numbers == [*range(1, 17)]) == (most > 0)
    records, replays = recorder.records, recorder.replays
    run_steps(made, x, 1)
    assert (recorder.records, recorder.replays) == (records, replays + 16)


@pytest.mark.usefixtures("all_large")
def test_nothing_is_made_once_more_while_somebody_holds_what_was_saved():
    recorder, x = Recorder(), torch.ones(8)
    ((other, _, _),) = pieces(recorder, 1)
    warmed(other, x)
    kept = other([x])[1]
    made = pieces(recorder, 8)
    run_steps(made, x, 5)
    assert recorder.records == 1 + 16
    recorder.program._made += 8  # as if so many had been made again
    run_steps(made, x, 5)
    assert recorder.program.is_untidy
    assert recorder.records == 1 + 16
    assert kept.tolist() == [2] * 8
    del kept
    run_steps(made, x, 2)
    assert recorder.records == 1 + 16 + 16
    assert not recorder.program.is_untidy


@pytest.mark.usefixtures("all_large")
def test_all_is_made_once_more_a_few_times_and_again_when_the_program_has_grown():
    recorder, x = Recorder(), torch.ones(8)
    made = pieces(recorder, 8)
    run_steps(made, x, 5)

    def made_again() -> int:
        """How many recordings are made, where as many as there are seem to be gone."""
        before = recorder.records
        recorder.program._made += 2 * len(made)
        run_steps(made, x, 6)
        return recorder.records - before

    assert [made_again() for _ in range(program.MOST_TIDIED + 2)] == [16] * program.MOST_TIDIED + [0] * 2
    made += pieces(recorder, 1)
    run_steps(made, x, 6)
    assert made_again() == 18


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_order_of_calls_and_whoever_holds_results_nothing_is_overwritten(seed, monkeypatch):
    """Forwards, backwards, and functions that are neither; results are held for as long as it comes. In half
    of the programs, all is recorded once more as soon as that is possible."""
    if seed % 2:
        monkeypatch.setattr(program, "MANY", 0)
        monkeypatch.setattr(program, "GAPS", 1)
        monkeypatch.setattr(program, "MOST_TIDIED", 1000)
        monkeypatch.setattr(program, "QUIET", 0)
        monkeypatch.setattr(program, "PATIENCE", 1000)
    draw, recorder = random.Random(seed), Recorder()
    batches = [torch.full((8,), float(i)) for i in range(3)]
    kin = "sizes" if seed % 4 > 1 else None
    made = pieces(recorder, 3, kin=kin)
    before = [call_of(lambda i: [i[0] + 0], recorder, SharedMemory(), copyable=64, kin=kin) for _ in "123"]
    alone, _ = call_of(lambda i: [i[0] * 3], recorder, copyable=64)
    waiting, held = [], []
    schedule = [draw.randrange(8) for _ in range(draw.choice([3, 7, 13]))]
    for step in range(360):
        what = schedule[step % len(schedule)] if draw.random() < 0.9 else draw.randrange(8)
        x = draw.choice(batches)
        x.fill_(draw.randrange(50))
        if what < 3:
            forward, backward, _ = made[what]
            given = draw.choice(before)[0]([x])[0] if draw.random() < 0.7 else x
            out, saved = forward([given])
            if given is not x and draw.random() < 0.2:
                held.append((given.view(2, 4), x.clone().view(2, 4)))
            del given
            waiting.append((backward, saved, out, x + 1, x * 2))
            assert torch.equal(saved, x + 1)
            del out, saved
        elif what < 6 and waiting:
            backward, saved, out, plus, twice = waiting.pop(draw.randrange(len(waiting)))
            assert torch.equal(saved, plus)
            args = [saved, out]
            if draw.random() < 0.2:  # the graph is retained
                held.append((saved, plus))
            del saved, out
            (grad,) = backward(args)
            held.append((grad, plus * twice))
            del grad
        elif what == 6:
            held.append((alone([x])[0], x * 3))
        elif draw.random() < 0.2:
            made[draw.randrange(3)] = pieces(recorder, 1)[0]
        for value, expected in held:
            assert torch.equal(value, expected)
        if held and draw.random() < 0.6:
            held.pop(draw.randrange(len(held)))
    assert recorder.replays


@pytest.fixture
def asked(monkeypatch):
    """Grows whenever the results of a recording are looked at."""
    found, ask = [], results.Results.is_in_the_way
    monkeypatch.setattr(results.Results, "is_in_the_way", lambda *given: found.append(1) or ask(*given))
    return found


@pytest.mark.parametrize("count", [4, 32])
def test_how_much_is_looked_at_before_a_replay_does_not_grow_with_the_recordings(count, asked):
    recorder = Recorder()
    made = [call_of(lambda i: [i[0] * 2, i[0] + 1], recorder, kept=[1], copyable=64) for _ in range(count)]
    calls = [call for call, _ in made]

    def step(x):
        for call in calls:
            (x, _) = call([x / 2])
        return x.tolist()

    x = torch.ones(3)
    for _ in range(WARM_UPS + 4):
        step(x)
    before = recorder.replays
    asked.clear()
    assert step(x) == [1] * 3
    assert recorder.replays == before + count
    assert len(asked) <= 2 * count


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("count", [2, 7])
def test_nor_does_it_with_backwards(count, asked):
    recorder = Recorder()
    made, x = pieces(recorder, count), torch.ones(8)
    run_steps(made, x, 18)
    before = recorder.replays
    asked.clear()
    run_pieces(made, x.fill_(0))
    assert recorder.replays == before + 2 * count
    assert len(asked) <= 5 * count


def saving_three(recorder):
    """A forward that saves three results, two of which share memory, and backwards of these and the third."""
    memory = SharedMemory()

    def forward(inputs):
        both = torch.stack([inputs[0] + 1, inputs[0] + 2])
        return [inputs[0] * 1, *both, inputs[0] + 3]

    def made(fn, **values):
        return call_of(fn, recorder, memory, copyable=64, **values)[0]

    def backward(inputs):
        return [sum(inputs)]

    return (
        made(forward, kept=[1, 2, 3]),
        made(backward, results={0: 1, 1: 2}),
        made(backward, results={0: 3}),
    )


@pytest.mark.parametrize("count", [3, 12])
def test_who_reads_what_was_saved_is_asked_at_once(count, monkeypatch):
    """Not one tensor after the other, though the results of each forward are donated to two backwards."""
    recorder, asked = Recorder(), []
    only = results.are_only_here
    monkeypatch.setattr(
        results, "are_only_here", lambda of, places: asked.append(len(places)) or only(of, places)
    )
    layers = [saving_three(recorder) for _ in range(count)]

    def step(x):
        saved, grads = [], []
        for forward, _, _ in layers:
            x, *kept = forward([x])
            saved.append(kept)
            del kept
        for _, first, second in reversed(layers):
            one, other, last = saved.pop()
            args = [[one, other], [last]]
            del one, other, last
            grads += [first(args[0])[0], second(args[1])[0]]
        return [grad.tolist() for grad in grads]

    x = torch.ones(3)
    for _ in range(WARM_UPS + 12):
        assert step(x) == [[5] * 3, [4] * 3] * count
    before = recorder.replays
    asked.clear()
    step(x)
    assert recorder.replays == before + 3 * count
    assert sorted(asked) == [1] * count + [2] * count


@pytest.mark.usefixtures("all_large")
def test_a_result_that_is_moved_after_it_was_donated_to_an_earlier_backward_is_written_elsewhere():
    recorder, x = Recorder(), torch.ones(3)
    forward, first, second = saving_three(recorder)
    for step in range(12):
        out, one, other, last = forward([x.fill_(step)])
        assert out.tolist() == [step] * 3
        if step == 8:
            out.share_memory_()
        args = [[one, other], [last]]
        del out, one, other, last
        assert first(args[0])[0].tolist() == [2 * step + 3] * 3
        assert second(args[1])[0].tolist() == [step + 3] * 3
    assert recorder.replays > 20
