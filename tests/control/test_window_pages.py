"""Layers with a sliding window hold their window's pages and no others, through every way a request can go."""

from __future__ import annotations

import numpy as np
import pytest

from kv_common.errors import ConfigError, LayoutError, PageStateError
from kv_common.window_group import WindowGroup
from kv_control.control_plane import ControlPlane
from kv_control.invariants import check_invariants
from kv_control.page_map import NO_PAGE
from kv_control.plan import RequestHandle, RequestSlice, SamplingSpec, StepPlan
from kv_control.request import Request
from kv_control.window_pages import WindowPages
from tests.strategies import NAMESPACE, Loop, completion_alone, control_of, layout_of, loop_of, request_of


def of(control: ControlPlane) -> WindowPages:
    """The only window group."""
    [pages] = control.windows
    return pages


def feed(control: ControlPlane, handle: RequestHandle, num_tokens: int) -> StepPlan:
    """Run one step of so many tokens."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    reservation = control.reserve([RequestSlice(handle, control.num_written(handle), tokens)])
    assert reservation is not None
    plan = control.plan(control.confirm_scrubbed(reservation))
    control.commit(plan)
    return plan


def run(loop: Loop, *requests: Request) -> None:
    """To their ends; every token is as alone."""
    for request in requests:
        loop.scheduler.submit(request)
    loop.drain()
    for request in requests:
        prompt = request.prompt.tolist()
        assert request.error is None
        assert request.tokens[len(prompt) :].tolist() == completion_alone(prompt, request.max_tokens)


# --- what a window sees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 4, 7, 8, 9])
@pytest.mark.parametrize("page", [1, 3, 4])
def test_a_page_leaves_when_no_query_sees_its_last_slot_and_not_before(window: int, page: int) -> None:
    group = WindowGroup(window, layout_of(1, page))
    for position in range(30):
        seen = {key // page for key in range(max(0, position - window + 1), position + 1)}
        assert group.first_page(position) == group.first_pages(np.array([position]))[0]
        # The oldest key may be the query's own, which lies on a page that is still to come.
        assert group.first_page(position) == min(seen)


@pytest.mark.parametrize("window", [1, 5, 8])
@pytest.mark.parametrize("page", [1, 3, 4])
def test_no_step_of_any_rows_needs_more_than_is_counted_for_it(window: int, page: int) -> None:
    group = WindowGroup(window, layout_of(1, page))
    rng = np.random.default_rng(0)
    for _ in range(300):
        start, new = rng.integers(0, 40, 3), rng.integers(1, 9, 3)
        listed = [
            len({key // page for key in range(max(0, s - window + 1), s + n)}) for s, n in zip(start, new, strict=True)
        ]
        assert sum(listed) <= group.step_pages(num_rows=3, num_tokens=int(new.sum()))
        assert len({key // page for key in range(max(0, start[0] - window + 1), start[0] + 1)}) < group.row_pages


def test_a_window_that_sees_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="sliding_window=0"):
        WindowGroup(0, layout_of(1, 4))


def test_a_decoding_row_holds_its_window_and_its_table_begins_there() -> None:  # CASES 127
    control = control_of(16, 4, max_model_len=48, max_tokens=8, windows=[(8, 16)])
    handle = control.open()
    held = []
    for position in range(21):
        plan = feed(control, handle, 1)
        [table] = plan.window_tables
        first = max(0, position - 7) // 4
        assert table.kv_first_page_offset[0] == 4 * first
        assert table.kv_indptr[1] == position // 4 + 1 - first
        page = of(control).table[handle.row, position // 4]
        assert table.slot_mapping[0] == 4 * page + position % 4
        assert table.kv_last_page_len[0] == plan.table.kv_last_page_len[0]
        held.append(of(control).allocator.num_held)
    # Held after a step: what the next query sees of what is written.
    assert held == [len({key // 4 for key in range(max(0, n - 6), n + 1)}) for n in range(21)]
    assert (max(held), control.pages_held(handle)) == (3, 6)
    assert of(control).table[handle.row, :3].tolist() == [NO_PAGE] * 3
    check_invariants(control)


def test_a_chunk_longer_than_the_window_keeps_what_its_own_first_tokens_see() -> None:  # CASES 128
    control = control_of(16, 4, max_model_len=48, max_tokens=16, windows=[(4, 16)])
    handle = control.open()
    feed(control, handle, 8)
    assert (of(control).first[handle.row], of(control).end[handle.row]) == (1, 2)
    plan = feed(control, handle, 12)
    [table] = plan.window_tables
    assert (table.kv_first_page_offset[0], table.kv_indptr[1]) == (4, 4), "keys 5 .. 19, all of them for its queries"
    assert (of(control).first[handle.row], of(control).end[handle.row]) == (4, 5), "then key 17 is the oldest"


def test_sentinels_of_pages_that_left_are_never_freed_nor_handed_out() -> None:  # CASES 6
    control = control_of(8, 4, max_model_len=32, max_tokens=8, windows=[(4, 8)])
    handle = control.open()
    for _ in range(4):
        feed(control, handle, 8)
    assert of(control).table[handle.row].tolist().count(NO_PAGE) == 7
    control.release(handle)
    assert of(control).allocator.num_free == 8
    assert sorted(of(control).allocator.free_pages.tolist()) == list(range(8))


def test_a_page_that_left_is_dirty_until_its_next_holder_has_scrubbed_it() -> None:  # CASES 12
    control = control_of(8, 4, max_num_seqs=2, max_model_len=32, max_tokens=8, windows=[(4, 5)])
    one, other = control.open(), control.open()
    feed(control, one, 8)
    [passed] = of(control).allocator.free_pages[:1].tolist()
    reservation = control.reserve([RequestSlice(other, 0, np.arange(4, dtype=np.int32))])
    assert [chores.dirty_pages.tolist() for chores in reservation.windows] == [[passed]]
    with pytest.raises(PageStateError, match="never confirmed"):
        control.plan(type(control.confirm_scrubbed(reservation))(reservation.slices, reservation.serial))


def test_a_missed_scrub_of_a_window_page_is_an_exception() -> None:
    control = control_of(8, 4, max_num_seqs=2, max_model_len=32, max_tokens=8, windows=[(4, 5)])
    one, other = control.open(), control.open()
    feed(control, one, 8)
    reservation = control.reserve([RequestSlice(other, 0, np.arange(4, dtype=np.int32))])
    scrubbed = control.confirm_scrubbed(reservation)
    of(control).allocator._dirty[reservation.windows[0].dirty_pages] = True
    with pytest.raises(PageStateError, match="window 4 still carry"):
        control.plan(scrubbed)


def test_a_cancelled_reservation_gives_its_window_pages_back_and_keeps_the_others() -> None:
    control = control_of(8, 4, max_model_len=32, max_tokens=8, windows=[(4, 8)])
    handle = control.open()
    feed(control, handle, 6)
    before = of(control).allocator.num_held
    reservation = control.reserve([RequestSlice(handle, 6, np.arange(8, dtype=np.int32))])
    assert of(control).allocator.num_held == before + 2
    control.cancel(reservation)
    assert of(control).allocator.num_held == before
    check_invariants(control)
    feed(control, handle, 8)
    check_invariants(control)


def test_reserving_twice_adds_only_the_difference() -> None:  # CASES 10
    control = control_of(8, 4, max_model_len=32, max_tokens=8, windows=[(4, 8)])
    handle = control.open()
    for n in (3, 5, 8):
        control.reserve([RequestSlice(handle, 0, np.arange(n, dtype=np.int32))])
        assert of(control).allocator.num_held == -(-n // 4)


def test_no_room_in_a_window_group_is_no_room_and_nothing_is_half_reserved() -> None:
    control = control_of(8, 4, max_num_seqs=2, max_model_len=32, max_tokens=8, windows=[(8, 6)])
    one, other = control.open(), control.open()
    feed(control, one, 8)
    feed(control, one, 8)
    held = of(control).allocator.num_held, control.allocator.num_held
    assert of(control).allocator.num_free == 4
    several = [RequestSlice(one, 16, np.arange(8, dtype=np.int32)), RequestSlice(other, 0, np.arange(12))]
    assert control.reserve(several) is None
    assert (of(control).allocator.num_held, control.allocator.num_held) == held
    check_invariants(control)


def test_a_window_pool_that_could_not_hold_one_request_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"4 pages .* window of 8 tokens .* needs 6: raise `paged_num_pages`"):
        control_of(16, 4, max_model_len=64, max_tokens=8, windows=[(8, 4)])
    control_of(4, 4, max_model_len=64, max_tokens=8, windows=[(8, 4)])  # the other pool holds no more


# --- through the scheduler --------------------------------------------------------------------------------


def test_preempted_requests_and_chunks_give_the_tokens_of_a_request_alone() -> None:
    control = control_of(9, 2, max_model_len=18, max_tokens=8, windows=[(3, 8), (5, 9)])
    loop = loop_of(control, prefill_chunk_tokens=3)
    run(loop, *(request_of(i, n, max_tokens=new) for i, (n, new) in enumerate([(3, 14), (4, 13), (2, 15), (6, 9)])))
    assert control.counters.num_preemptions > 0
    assert all(window.num_passed_pages for window in control.metrics().windows)


def test_a_window_pool_that_is_full_admits_nobody_it_would_have_to_send_back() -> None:
    """The other pool holds four times what the requests need: windows alone decide."""
    control = control_of(64, 4, max_num_seqs=4, max_model_len=40, max_tokens=8, windows=[(8, 10)])
    loop = loop_of(control)
    run(loop, *(request_of(i, 6, max_tokens=30) for i in range(4)))
    assert control.counters.num_preemptions == 0
    assert of(control).peak_held <= 10


def test_long_requests_run_together_where_only_their_windows_fit() -> None:  # CASES 129
    """Four requests of ten pages; the window pool has what four windows need, not what four requests do."""
    control = control_of(40, 4, max_num_seqs=4, max_model_len=40, max_tokens=8, windows=[(8, 18)])
    loop = loop_of(control)
    seen = []
    for i in range(4):
        loop.scheduler.submit(request_of(i, 8, max_tokens=32))
    loop.drain(every_step=lambda: seen.append(loop.scheduler.num_running))
    assert max(seen) == 4 and control.counters.num_preemptions == 0
    assert of(control).peak_held <= 18 < control.num_pages == 40


# --- prefixes ----------------------------------------------------------------------------------------------


def shared_prompt(length: int, own: int = 0) -> list[int]:
    return [(5 * i + i * i) % 50 for i in range(length)] + [own % 50] * (own > 0)


@pytest.mark.parametrize("first", [9, 17, 30])
@pytest.mark.parametrize("second", [9, 13, 18, 31])
@pytest.mark.parametrize("chunk", [8, 32])
def test_a_hit_gives_the_tokens_of_a_miss_inside_and_outside_the_window(  # CASES 128
    first: int, second: int, chunk: int
) -> None:
    """Also where one step wrote more than a window: what left it at once is cached all the same."""
    control = control_of(40, 4, max_model_len=48, max_tokens=chunk, prefix_cache=True, windows=[(6, 40)])
    loop = loop_of(control)
    run(loop, request_of(1, shared_prompt(first), max_tokens=6))
    run(loop, request_of(2, shared_prompt(second, own=7), max_tokens=6))
    assert control.counters.num_cached_tokens == min(first, second) // 4 * 4


def test_a_hit_ends_where_the_last_whole_window_is_still_cached() -> None:
    control = control_of(40, 4, max_model_len=48, max_tokens=8, prefix_cache=True, windows=[(6, 40)])
    loop = loop_of(control)
    run(loop, request_of(1, shared_prompt(33), max_tokens=1))
    cache = of(control).cache
    nodes = list(cache.nodes)
    assert len(nodes) == 8
    assert control.windows.num_usable(nodes) == 8
    cache.forget(nodes[5])  # the last node's window reaches back to it: 32 - 5 = 27 = page 6, so it does not
    assert control.windows.num_usable(nodes) == 8
    cache.forget(nodes[6])
    assert control.windows.num_usable(nodes) == 5
    run(loop, request_of(2, shared_prompt(34), max_tokens=6))
    assert control.counters.num_cached_tokens == 20


def test_pages_that_left_the_window_are_cached_and_given_up_first_to_come_for_room() -> None:
    control = control_of(40, 4, max_num_seqs=2, max_model_len=48, max_tokens=8, prefix_cache=True, windows=[(6, 7)])
    loop = loop_of(control)
    run(loop, request_of(1, shared_prompt(33), max_tokens=1))
    metrics = control.metrics()
    [window] = metrics.windows
    assert metrics.num_retained_pages == 8, "the other layers' pages are all there"
    assert window.num_retained_pages < 8 and window.num_evictions > 0
    run(loop, request_of(2, shared_prompt(33, own=9), max_tokens=8))
    assert control.counters.num_cached_tokens == 32, "the newest were kept, and they are what a hit needs"


def test_only_pages_that_nobody_reads_are_given_up_for_room() -> None:
    control = control_of(40, 4, max_model_len=48, max_tokens=8, prefix_cache=True, windows=[(6, 40)])
    loop = loop_of(control)
    run(loop, request_of(1, shared_prompt(33), max_tokens=1))
    nodes = of(control).cache.nodes
    reader = control.open()
    control.adopt(reader, nodes)
    read = of(control).table[reader.row, of(control).first[reader.row] : 8].tolist()
    assert of(control).cache.num_evictable == 8 - len(read)
    given_up = of(control).cache.evict(8).tolist()
    assert len(given_up) == 8 - len(read) and not set(given_up) & set(read)
    assert of(control).cache.num_evictable == 0
    check_invariants(control)


def test_evicting_a_node_gives_its_window_pages_up() -> None:
    control = control_of(9, 4, max_num_seqs=1, max_model_len=36, max_tokens=8, prefix_cache=True, windows=[(6, 9)])
    loop = loop_of(control)
    run(loop, request_of(1, shared_prompt(30), max_tokens=1))
    run(loop, request_of(2, [3] * 30, max_tokens=1))
    assert control.metrics().num_evictions > 0
    live = {node.page for node in control.prefix_index.nodes()}
    assert {node.page for node in of(control).cache.nodes} <= live
    control.reset_prefix_cache()
    assert of(control).allocator.num_free == 9


def test_requests_wait_for_the_one_that_computes_lost_window_pages_again() -> None:
    control = control_of(40, 4, max_model_len=48, max_tokens=32, prefix_cache=True, windows=[(6, 40)])
    loop = loop_of(control, prefill_chunk_tokens=8)
    run(loop, request_of(1, shared_prompt(33), max_tokens=1))
    for node in of(control).cache.nodes:
        of(control).cache.forget(node)
    run(loop, *(request_of(i, shared_prompt(33, own=i), max_tokens=3) for i in range(2, 5)))
    assert control.counters.num_prefix_waits == 2
    assert control.counters.num_prefill_tokens == 33 + 34 + 2 * 2


def test_a_page_that_left_stays_until_it_was_offered_and_then_goes() -> None:
    """One step writes more than a window; its results, and with them the offer, come later."""
    control = control_of(40, 4, max_model_len=48, max_tokens=32, prefix_cache=True, windows=[(6, 40)])
    loop = loop_of(control)
    loop.scheduler.submit(request_of(1, shared_prompt(30), max_tokens=4))
    slices = loop.scheduler.slices(loop.scheduler.schedule())
    plan = loop.engine.run(slices)
    row = plan.slices[0].handle.row
    loop.scheduler.advance(plan.slices)
    assert (of(control).first[row], of(control).end[row]) == (0, 8)
    check_invariants(control, loop.scheduler)
    loop.scheduler.record(plan.slices[0], **loop.engine.results(plan, 0))
    assert (of(control).first[row], of(control).end[row]) == (6, 8), "30 sees 25 .. 30"
    assert len(of(control).cache.nodes) == 7
    check_invariants(control, loop.scheduler)
    loop.drain()


def test_new_weights_end_the_wait_for_offers_that_nobody_will_make() -> None:
    control = control_of(40, 4, max_model_len=48, max_tokens=32, prefix_cache=True, windows=[(6, 40)])
    handle = control.open()
    feed(control, handle, 30)
    assert of(control).first[handle.row] == 0
    control.reset_prefix_cache(b"other weights")
    assert of(control).first[handle.row] == 6
    check_invariants(control)


def test_a_row_that_offers_nothing_still_finds_room() -> None:
    """A handle held outside the scheduler publishes nothing: kept pages are given up before there is no room."""
    control = control_of(16, 4, max_model_len=64, max_tokens=8, prefix_cache=True, windows=[(8, 6)])
    handle = control.open()
    for _ in range(8):
        feed(control, handle, 8)
    assert control.num_written(handle) == 64
    check_invariants(control)


def test_pages_that_a_request_is_about_to_read_do_not_count_as_room() -> None:  # CASES 52
    control = control_of(40, 4, max_model_len=48, max_tokens=8, prefix_cache=True, windows=[(8, 6)])
    loop = loop_of(control)
    run(loop, request_of(1, shared_prompt(24), max_tokens=1))
    tokens = np.array(shared_prompt(24), np.int32)
    nodes = control.prefix_index.match(control.prefix_index.page_keys(NAMESPACE, tokens), tokens)
    assert (control.windows.num_usable(nodes), of(control).num_available) == (6, 6)

    def fits() -> bool:
        """Behind 24 cached tokens: the last two pages of its window are there, two more are needed."""
        return control.windows.fit(
            np.zeros(0, np.int64), np.array([32]), np.array([1]), nodes=nodes, num_shared_tokens=24
        )

    assert fits(), "six pages, of which it reads two"
    of(control)._allocate(2)
    assert fits(), "four, of which it reads two"
    of(control)._allocate(1)
    assert of(control).num_available == 3 and not fits(), "three, of which it reads two"


def test_prompts_under_way_are_charged_one_steps_chunk_together() -> None:
    """Windows of 8 tokens are 4 pages each, and a step of 16 tokens adds 4 to all of them."""
    control = control_of(64, 4, max_model_len=64, max_tokens=16, windows=[(8, 12)])
    nobody, prompt = np.zeros(0, np.int64), np.array([40])
    assert control.windows.fit(nobody, prompt, prompt)
    one, two = control.open(), control.open()
    rows = np.array([one.row, two.row])
    assert control.windows.fit(rows[:1], np.array([40, 40]), np.array([40, 40])), "4 + 4 and the 4 of a step"
    assert not control.windows.fit(rows, np.array([40] * 3), np.array([40] * 3)), "4 + 4 + 4 and the 4 of a step"
    assert control.windows.fit(rows, np.array([40] * 3), np.array([1] * 3)), "nobody has a prompt to compute"
    assert control.windows.fit(rows, np.array([12] * 3), np.array([12] * 3)), "three pages each, chunks included"


# --- samples -----------------------------------------------------------------------------------------------


def samples(n: int, prompt: int, max_tokens: int) -> list[Request]:
    tokens = shared_prompt(prompt)
    return [
        request_of(i, tokens, max_tokens=max_tokens, group=1, sampling=SamplingSpec(sample_index=i)) for i in range(n)
    ]


@pytest.mark.parametrize("length", range(10, 18))
def test_samples_fork_wherever_their_prompt_ends_on_a_page(length: int) -> None:
    """Their source has computed the last token too, and may have given up what the one before it sees."""
    control = control_of(40, 4, max_model_len=48, max_tokens=20, windows=[(6, 40)])
    loop = loop_of(control)
    run(loop, *samples(3, prompt=length, max_tokens=12))
    assert control.counters.num_shared_tokens == 2 * (length - 1)
    assert of(control).peak_held <= 3 * 5
    assert of(control).copies.pending.size == 0


def test_a_sample_that_ends_before_its_page_was_copied_lets_go_of_both() -> None:
    control = control_of(8, 4, max_num_seqs=2, max_model_len=32, max_tokens=8, windows=[(6, 8)])
    source, target = control.open(), control.open()
    feed(control, source, 6)
    assert control.fork(source, target, 6)
    assert of(control).copies.pending.shape == (2, 1)
    check_invariants(control)
    control.release(target)
    assert of(control).copies.pending.size == 0
    control.release(source)
    assert of(control).allocator.num_free == 8
    check_invariants(control)


def test_a_fork_without_a_page_for_its_copy_changes_nothing() -> None:  # CASES 9
    control = control_of(8, 4, max_num_seqs=2, max_model_len=32, max_tokens=8, windows=[(8, 6)])
    source, target = control.open(), control.open()
    feed(control, source, 7)
    taken = of(control).allocator.allocate(4)
    assert not control.fork(source, target, 7)
    assert control.pages_held(target) == 0 and of(control).end[target.row] == 0
    of(control).allocator.free(taken[:1])
    assert control.fork(source, target, 7)


def test_a_sample_that_comes_when_the_window_has_passed_computes_its_own_prompt() -> None:
    control = control_of(40, 4, max_num_seqs=2, max_model_len=48, max_tokens=16, windows=[(6, 40)])
    loop = loop_of(control)
    requests = samples(2, prompt=14, max_tokens=24)
    loop.scheduler.submit(requests[0])
    for _ in range(10):
        loop.step()
    loop.scheduler.submit(requests[1])
    loop.drain()
    assert control.counters.num_shared_tokens == 0
    expected = completion_alone(requests[0].prompt.tolist(), 24)
    assert [request.tokens[14:].tolist() for request in requests] == [expected] * 2


# --- without windows ---------------------------------------------------------------------------------------


def test_a_control_plane_without_windows_has_none_of_it() -> None:
    control = control_of(8, 4)
    handle = control.open()
    plan = feed(control, handle, 5)
    assert not control.windows and plan.window_tables == () and control.metrics().windows == ()
