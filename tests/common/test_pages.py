"""Page arithmetic against counting tokens one by one."""

from __future__ import annotations

import numpy as np
import pytest

from kv_common.pages import full_pages, last_page_len, page_and_offset, pages_for_tokens, slots_of

SIZES = [1, 2, 3, 4, 16]


def count_by_hand(num_tokens: int, tokens_per_page: int) -> tuple[int, int, int]:
    """Pages, tokens in the last one and full pages, by laying out one token after another."""
    pages: list[int] = []
    for _ in range(num_tokens):
        if not pages or pages[-1] == tokens_per_page:
            pages.append(0)
        pages[-1] += 1
    return len(pages), pages[-1] if pages else 0, pages.count(tokens_per_page)


@pytest.mark.parametrize("tokens_per_page", SIZES)
def test_pages_last_length_and_full_pages_are_those_of_laying_out_tokens_one_by_one(tokens_per_page):
    for num_tokens in range(4 * tokens_per_page + 2):
        counted = (
            pages_for_tokens(num_tokens, tokens_per_page),
            last_page_len(num_tokens, tokens_per_page),
            full_pages(num_tokens, tokens_per_page),
        )
        assert counted == count_by_hand(num_tokens, tokens_per_page)


@pytest.mark.parametrize("tokens_per_page", SIZES)
def test_an_array_of_token_counts_gives_what_each_count_gives(tokens_per_page):
    num_tokens = np.arange(4 * tokens_per_page + 2)
    by_hand = [count_by_hand(n, tokens_per_page) for n in num_tokens.tolist()]
    assert pages_for_tokens(num_tokens, tokens_per_page).tolist() == [pages for pages, _, _ in by_hand]
    assert last_page_len(num_tokens, tokens_per_page).tolist() == [last for _, last, _ in by_hand]


def test_a_length_of_ten_tokens_is_three_pages_of_four():  # CASES 21
    assert pages_for_tokens(10, 4) == 3


def test_page_and_offset_walk_a_request_token_by_token():
    page, offset = page_and_offset(np.arange(9), 4)
    assert list(zip(page.tolist(), offset.tolist(), strict=True)) == [(p, o) for p in range(3) for o in range(4)][:9]


def test_slots_follow_the_pages_of_the_request_and_stay_int32_at_the_end_of_a_large_pool():
    assert slots_of(np.array([2, 0], np.int32), 2, 3, 4).tolist() == [10, 11, 0]
    last = slots_of(np.array([2**27 - 1], np.int32), 0, 16, 16)
    assert last.dtype == np.int32 and last.tolist() == list(range(2**31 - 16, 2**31))
