// What the paged kernels are told, and the entry points that every instruction-set build provides.
//
// For:      one description of a call, shared by the handlers, the work list and the kernels.
// Not for:  XLA's types (handlers.cc) or arithmetic (kernels.cc).
#pragma once

#include <cstdint>

#include "products.h"

namespace paged {

// What a pool's elements are. Those of 8 bits are read as element * scale, one scale for each token and head.
enum class PoolElement { kFloat32, kBfloat16, kInt8, kFloat8 };

// One attention call over the pools of one shard. All sizes are 64-bit: page * tokens_per_page * token_stride passes
// 2^31 in pools that people really use.
struct Call {
  const void* k_pool;  // [num_pages, tokens_per_page, kv_heads, dim]
  const void* v_pool;
  PoolElement pool_element;
  const float* k_scales;  // [num_pages, tokens_per_page, kv_heads]; null where elements have no scales
  const float* v_scales;
  int64_t num_pages, tokens_per_page, kv_heads, dim;
  int64_t group;  // query heads per KV head

  const void* query;  // [T, kv_heads * group, dim]
  void* output;       // as query
  bool query_is_bfloat16;

  const int32_t* query_start;         // [R + 1]
  const int32_t* seq_lens;            // [R]
  const int32_t* kv_indptr;           // [R + 1]
  const int32_t* kv_indices;          // [C]
  const int32_t* first_page_offset;   // [R]
  const float* sinks;                 // [heads] or null

  float scale;
  float soft_cap;   // 0: none
  int64_t window;   // 0: none

  int64_t heads() const { return kv_heads * group; }
  int64_t token_stride() const { return kv_heads * dim; }

  // Element offset, in a pool, of the token at `position` of request `row`.
  int64_t token_offset(int64_t row, int64_t position) const {
    const int64_t relative = position - first_page_offset[row];
    const int64_t page = kv_indices[kv_indptr[row] + relative / tokens_per_page];
    return (page * tokens_per_page + relative % tokens_per_page) * token_stride();
  }
};

// One piece of work. A decode covers all heads of one query over keys [first_key, end_key); a tile covers one KV head
// of queries [first_query, first_query + num_queries) over everything they see.
struct Item {
  int32_t row;
  int32_t kv_head;  // tiles only
  int64_t first_query, num_queries;
  int64_t first_key, end_key;
  float* partial;  // decode: where (maximum, sum, weighted values) go to be merged; null writes the output
};

// Floats of one decode's partial result: maximum [heads], sum [heads], weighted values [heads, dim].
inline int64_t partial_floats(const Call& call) { return call.heads() * (call.dim + 2); }

// Rows of the tile kernel's block of queries x heads, and keys of every block.
constexpr int64_t kTileRows = 96;
constexpr int64_t kBlockKeys = 64;

struct Kernels {
  void (*decode)(const Call&, const Item&);
  void (*tile)(const Call&, const Item&);
  // LSE merge of `count` consecutive partials of one decode into its output row.
  void (*merge)(const Call&, const Item&, const float* partials, int64_t count);
  // Sum of `count` floats: how fast one core can read, for benchmarks to compare with.
  float (*read)(const float* from, int64_t count);
  // Columns [first, end) of a matrix product (products.cc).
  void (*product)(const Product&, int64_t first, int64_t end);
  const char* name;
};

namespace baseline {
extern const Kernels kernels;
}
#ifdef PAGED_X86
namespace x86_64_v3 {
extern const Kernels kernels;
}
namespace x86_64_v4 {
extern const Kernels kernels;
}
#endif

}  // namespace paged
