// One call's work: which kernel serves each row, and how the rows are cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"

namespace paged {

// A decode that was cut: partials [first, first + count) of the workspace are merged into its row.
struct Merge {
  Item item;
  int64_t first, count;
};

// As bad_page: the row's list ends before its tokens do.
constexpr int64_t kTooFewPages = INT64_MIN;

struct WorkList {
  std::vector<Item> items;      // the most expensive first
  std::vector<Merge> merges;
  std::vector<float> workspace;
  int64_t num_decodes = 0, num_visible = 0;  // rows of one new token, and the keys they see
  int64_t num_chunks = 0;                    // pieces those rows were cut into
  bool fused = false;                        // whether they were handed to split-KV
  int64_t cost = 0;                          // element reads, roughly
  int64_t bad_row = -1, bad_page = 0;        // the first row that names a page outside the pool
};

// How decode rows are cut follows from the pages they read, not from their tokens: the host keeps its copy of the plan
// (kv_execution/split_plan.py, the same rule) until a row reads another page.
//
// When decode rows are cut over their keys. One request alone needs min_tokens visible, several min_tokens_per_request
// each on average; below, every row is walked whole by one thread.
struct Floors {
  int64_t min_tokens, min_tokens_per_request;
};

inline WorkList plan_work(const Call& call, int64_t num_rows, int64_t num_tokens, int64_t threads, Floors floors) {
  constexpr int64_t kMinChunk = 256;
  WorkList work;
  const auto oldest_key = [&](int64_t row, int64_t position) {
    const int64_t first = call.first_page_offset[row];
    return call.window ? std::max(first, position - call.window + 1) : first;
  };
  std::vector<Item> decodes;
  std::vector<int64_t> extents;  // token slots of the pages that each decode reads
  int64_t total_extent = 0;
  for (int64_t row = 0; row < num_rows; row++) {
    const int64_t begin = call.query_start[row], end = std::min<int64_t>(call.query_start[row + 1], num_tokens);
    const int64_t length = call.seq_lens[row];
    if (begin >= end || length < end - begin) continue;
    const int64_t first = oldest_key(row, length - (end - begin)), offset = call.first_page_offset[row];
    const int64_t first_page = (first - offset) / call.tokens_per_page;
    const int64_t last_page = (length - 1 - offset) / call.tokens_per_page;
    if (last_page >= call.kv_indptr[row + 1] - call.kv_indptr[row]) {  // behind them are another request's
      work.bad_row = row, work.bad_page = kTooFewPages;
      return work;
    }
    for (int64_t i = call.kv_indptr[row] + first_page; i <= call.kv_indptr[row] + last_page; i++)
      if (call.kv_indices[i] < 0 || call.kv_indices[i] >= call.num_pages) {
        work.bad_row = row, work.bad_page = call.kv_indices[i];
        return work;
      }
    if (end - begin == 1) {
      decodes.push_back({int32_t(row), -1, begin, 1, first, length, nullptr});
      extents.push_back((last_page - first_page + 1) * call.tokens_per_page);
      total_extent += extents.back();
      work.num_decodes++;
      work.num_visible += length - first;
      continue;
    }
    const int64_t step = std::max<int64_t>(1, kTileRows / call.group);
    for (int64_t q = begin; q < end; q += step) {
      const int64_t count = std::min(step, end - q), position = length - (end - q);
      for (int64_t h = 0; h < call.kv_heads; h++)
        work.items.push_back({int32_t(row), int32_t(h), q, count, oldest_key(row, position), position + count, nullptr});
    }
  }
  work.fused = work.num_decodes && (work.num_decodes == 1 ? work.num_visible >= floors.min_tokens
                                                          : work.num_visible >= floors.min_tokens_per_request *
                                                                                    work.num_decodes);
  // Enough pieces that the last ones finish together, none so small that merging it costs more than reading it.
  const int64_t chunk = (std::max(kMinChunk, total_extent / (4 * threads) + 1) + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
  std::vector<int64_t> firsts;
  for (size_t i = 0; i < decodes.size(); i++) {
    Item item = decodes[i];
    const int64_t visible = item.end_key - item.first_key;
    const int64_t pieces = work.fused && threads > 1 ? (extents[i] + chunk - 1) / chunk : 1;
    if (pieces > 1) work.merges.push_back({item, int64_t(firsts.size()), pieces});
    const int64_t size = ((visible + pieces - 1) / pieces + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
    const int64_t last = item.end_key;
    for (int64_t piece = 0; piece < pieces; piece++) {
      item.end_key = pieces == 1 ? last : std::min(last, item.first_key + size);
      if (pieces > 1) firsts.push_back(int64_t(work.items.size()));
      work.items.push_back(item);
      work.num_chunks++;
      item.first_key = item.end_key;
    }
  }
  const int64_t size = partial_floats(call);
  work.workspace.resize(firsts.size() * size);
  for (size_t i = 0; i < firsts.size(); i++) work.items[firsts[i]].partial = work.workspace.data() + i * size;
  const auto cost = [&](const Item& item) {
    const int64_t keys = item.end_key - item.first_key;
    return keys * call.dim * (item.kv_head < 0 ? call.kv_heads : item.num_queries * call.group / 8 + 1);
  };
  for (const Item& item : work.items) work.cost += cost(item);
  std::stable_sort(work.items.begin(), work.items.end(),
                   [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
  return work;
}

}  // namespace paged
