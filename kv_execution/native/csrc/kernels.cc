// Paged attention on one core: compiled once per instruction set (PAGED_ISA, PAGED_VECTOR_BYTES).
//
// For:      a decode over a range of keys, a tile of queries over all they see, and the merge of decodes.
// Not for:  threads, the work list or XLA.
//
// Only keys of the item's own range are read. Everything is summed in float32, whatever the pool holds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "attention.h"

namespace paged {
namespace PAGED_ISA {

void product(const Product& product, int64_t first, int64_t end);  // products.cc

namespace {

#include "vectors.h"

constexpr int kBlock = kBlockKeys;
// Vectors held per row in the inner loops: what fits 32 registers, or 16.
constexpr int kWide = kLanes == 16 ? 4 : 2;
constexpr int kTileHeight = 6;

float minus_infinity() { return -__builtin_inff(); }

// This thread's scratch, grown and kept: XLA's threads live as long as the process. No std::vector in this file: its
// functions would be shared between the instruction-set builds, and the linker would pick one of them.
float* scratch(int64_t floats) {
  static thread_local float* memory = nullptr;
  static thread_local int64_t size = 0;
  if (size < floats) {
    std::free(memory);
    size = (floats + 15) / 16 * 16;
    memory = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
    if (!memory) std::abort();
  }
  return memory;
}

float bfloat16_to_float(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

uint16_t float_to_bfloat16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  if (f != f) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Query heads [head, head + count) of a token, scaled.
void read_query(const Call& call, int64_t token, int64_t head, int64_t count, float* to) {
  const int64_t from = (token * call.heads() + head) * call.dim, size = count * call.dim;
  for (int64_t i = 0; i < size; i++) {
    const float x = call.query_is_bfloat16 ? bfloat16_to_float(static_cast<const uint16_t*>(call.query)[from + i])
                                           : static_cast<const float*>(call.query)[from + i];
    to[i] = x * call.scale;
  }
}

// One head of one token: weighted values over their sum, with the head's sink in the sum. Zeros when nothing was seen.
void write_output(const Call& call, int64_t token, int64_t head, float maximum, float sum, const float* values) {
  float factor = 0;
  if (sum != 0) {
    float shift = maximum, total = sum, kept = 1;
    if (call.sinks) {
      shift = std::max(maximum, call.sinks[head]);
      if (shift == minus_infinity()) shift = 0;
      kept = maximum == minus_infinity() ? 1.0f : std::exp(maximum - shift);
      total = sum * kept + std::exp(call.sinks[head] - shift);
    }
    factor = kept / total;
  }
  const int64_t to = (token * call.heads() + head) * call.dim;
  for (int64_t d = 0; d < call.dim; d++) {
    const float x = sum != 0 ? values[d] * factor : 0.0f;
    if (call.query_is_bfloat16)
      static_cast<uint16_t*>(call.output)[to + d] = float_to_bfloat16(x);
    else
      static_cast<float*>(call.output)[to + d] = x;
  }
}

// Turns a block's scores, -inf where nothing may be seen, into weights, and brings the running maximum and sum up to
// date. Returns the factor for what was summed before.
PAGED_INLINE float weigh(float* scores, int padded, float soft_cap, float& maximum, float& sum) {
  if (soft_cap > 0)
    for (int i = 0; i < padded; i += kLanes) {
      const Vec s = load(scores + i);
      store(scores + i, select(s == splat(minus_infinity()), s, tanh_of(s * (1.0f / soft_cap)) * soft_cap));
    }
  Vec most = splat(minus_infinity());
  for (int i = 0; i < padded; i += kLanes) most = larger(most, load(scores + i));
  const float before = maximum;
  maximum = std::max(maximum, max_lanes(most));
  const float shift = maximum == minus_infinity() ? 0.0f : maximum;
  Vec added{};
#pragma GCC unroll 4
  for (int i = 0; i < padded; i += kLanes) {
    const Vec weight = exp_of(load(scores + i) - shift);
    store(scores + i, weight);
    added += weight;
  }
  const float factor = before == minus_infinity() ? 0.0f : before == maximum ? 1.0f : exp_of(splat(before - shift))[0];
  sum = sum * factor + sum_lanes(added);
  return factor;
}

// Elements of 8 bits have scales: a key's is put to its score and a value's to its weight, not to each element.
template <class Element>
constexpr bool kScaled = sizeof(Element) == 1;

template <class Element>
PAGED_INLINE void fetch(const Element* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(Element))) __builtin_prefetch(from + i, 0, 2);
}

// A block of one pool that is fetched while the one before it is worked on: spread over the arithmetic, or that would
// wait for it. Either each head fetches its own slice of every token, or whole tokens are fetched in the order of their
// addresses, a piece at each call: better where slices are too short for the core's own prefetcher to follow, and where
// several query heads' arithmetic lies between two slices.
template <class Element>
struct Ahead {
  static constexpr int64_t kPiece = kWide * kLanes > 64 / int(sizeof(Element)) ? kWide * kLanes : 64 / int(sizeof(Element));
  const Element* const* rows;
  int64_t row_size, last;  // elements of a token; tokens to fetch
  int pieces;              // of each call
  int64_t row = 0, at = 0;

  Ahead(const Element* const* rows, int count, int64_t row_size, int64_t calls)
      : rows(rows), row_size(row_size), last(count) {
    pieces = int((kBlock * ((row_size + kPiece - 1) / kPiece) + calls - 1) / calls);
  }

  PAGED_INLINE void next(Ahead& ahead) {
    for (int i = 0; i < ahead.pieces && ahead.row < ahead.last; i++) {
      fetch(ahead.rows[ahead.row] + ahead.at, kPiece);
      ahead.at += kPiece;
      if (ahead.at >= ahead.row_size) ahead.at = 0, ahead.row++;
    }
  }
};

// Scores of kLanes tokens for one query head: kLanes dot products whose lane sums are taken together.
template <class Element, int kDim>
PAGED_INLINE Vec score_tokens(const Element* const* rows, int64_t offset, const float* query, int64_t dim) {
  const int64_t size = kDim ? kDim : dim;
  Vec sums[kLanes] = {};
  int64_t d = 0;
  for (; d + kWide * kLanes <= size; d += kWide * kLanes) {
    Vec q[kWide];
#pragma GCC unroll 4
    for (int i = 0; i < kWide; i++) q[i] = load(query + d + i * kLanes);
#pragma GCC unroll 16
    for (int t = 0; t < kLanes; t++)
#pragma GCC unroll 4
      for (int i = 0; i < kWide; i++) sums[t] += load(rows[t] + offset + d + i * kLanes) * q[i];
  }
  for (; d < size; d += kLanes) {
    const Vec q = load(query + d);
#pragma GCC unroll 16
    for (int t = 0; t < kLanes; t++) sums[t] += load(rows[t] + offset + d) * q;
  }
  return sum_each<kLanes>(sums, 0, 1);
}

// Scores of kLanes / kHeads tokens for kHeads query heads: every key is loaded, and widened, once for all of them.
template <class Element, int kDim, int kHeads>
PAGED_INLINE void score_heads(const Element* const* rows, int64_t offset, const float* query, int64_t dim,
                              float (*scores)[kBlock], int j) {
  constexpr int kTokens = kLanes / kHeads;
  const int64_t size = kDim ? kDim : dim;
  Vec sums[kLanes] = {};
  for (int64_t d = 0; d < size; d += kLanes) {
    Vec key[kTokens];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; t++) key[t] = load(rows[t] + offset + d);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; h++) {
      const Vec q = load(query + h * dim + d);
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; t++) sums[h * kTokens + t] += key[t] * q;
    }
  }
  const Vec all = sum_each<kLanes>(sums, 0, 1);
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; h++)
    std::memcpy(scores[h] + j, reinterpret_cast<const float*>(&all) + h * kTokens, kTokens * sizeof(float));
}

// Adds count tokens' values, weighted, to kHeads query heads' sums over kVecs vectors from dimension d on. Meanwhile
// fetches ahead: whole tokens, or the same part of every stride-th token.
template <class Element, bool kWhole, int kHeads, int kVecs>
PAGED_INLINE void add_values(const Element* const* rows, Ahead<Element>& ahead, int phase, int stride, int64_t offset, int count, const float (*weights)[kBlock], const float* factors,
                             float* sums, int64_t dim, int64_t d) {
  Vec acc[kHeads][kVecs];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; i++) acc[h][i] = load(sums + h * dim + d + i * kLanes) * factors[h];
  for (int j = 0; j < count; j++) {
    if constexpr (kWhole)
      Ahead<Element>::next(ahead);
    else if (j % stride == phase)
      fetch(ahead.rows[j] + offset + d, kVecs * kLanes);
    Vec value[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; i++) value[i] = load(rows[j] + offset + d + i * kLanes);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; i++) acc[h][i] += value[i] * weights[h][j];
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; h++)
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; i++) store(sums + h * dim + d + i * kLanes, acc[h][i]);
}

// Row pointers of up to kBlock tokens, independent of the page size; the rest repeats the last one.
template <class Element>
struct Block {
  const Element *k[kBlock], *v[kBlock];
  const float *k_scales[kScaled<Element> ? kBlock : 1], *v_scales[kScaled<Element> ? kBlock : 1];  // [kv_heads] each
  int count = 0;

  void fill(const Call& call, int64_t row, int64_t first, int64_t end) {
    count = int(std::max<int64_t>(0, std::min<int64_t>(kBlock, end - first)));
    for (int j = 0; j < count;) {
      const int64_t offset = call.token_offset(row, first + j);
      const int64_t within = (first + j - call.first_page_offset[row]) % call.tokens_per_page;
      const int run = int(std::min<int64_t>(count - j, call.tokens_per_page - within));
      for (int i = 0; i < run; i++, j++) {
        k[j] = static_cast<const Element*>(call.k_pool) + offset + i * call.token_stride();
        v[j] = static_cast<const Element*>(call.v_pool) + offset + i * call.token_stride();
        if constexpr (kScaled<Element>) {
          const int64_t scale = offset / call.dim + i * call.kv_heads;
          k_scales[j] = call.k_scales + scale;
          v_scales[j] = call.v_scales + scale;
        }
      }
    }
    for (int j = count; count && j < kBlock; j++) {
      k[j] = k[count - 1], v[j] = v[count - 1];
      if constexpr (kScaled<Element>) k_scales[j] = k_scales[count - 1], v_scales[j] = v_scales[count - 1];
    }
  }
};

// Multiplies what stands for `padded` tokens by their scales for one KV head.
PAGED_INLINE void put_scales(float* numbers, int padded, const float* const* scales, int64_t kv_head) {
  alignas(64) float own[kBlock];
  for (int j = 0; j < padded; j++) own[j] = scales[j][kv_head];
  for (int j = 0; j < padded; j += kLanes) store(numbers + j, load(numbers + j) * load(own + j));
}

struct Heads {
  const float* query;  // [heads, dim] of the KV head's group, scaled
  float *maximum, *sum, *values;
};

// kHeads query heads of one KV head, from the group's `first` on, over one block.
template <class Element, int kDim, bool kWhole, int kHeads>
PAGED_INLINE void decode_heads(const Call& call, const Block<Element>& block, Ahead<Element>& ahead_k,
                               Ahead<Element>& ahead_v, int64_t first, int64_t offset, const Heads& heads) {
  const int64_t dim = kDim ? kDim : call.dim;
  const auto fetch_keys = [&](int j, int64_t head) {
    if constexpr (kWhole) {
      Ahead<Element>::next(ahead_k);
    } else {  // each of the group's heads its share of the slices
      for (int64_t t = kLanes * head / call.group; t < kLanes * (head + 1) / call.group; t++)
        fetch(ahead_k.rows[j + t] + offset, dim);
    }
  };
  const int padded = (block.count + kLanes - 1) / kLanes * kLanes;
  alignas(64) float weights[kHeads][kBlock];
  alignas(64) float widened[sizeof(Element) < 4 && kHeads > 1 ? kLanes * 256 : 1];
  for (int j = 0; j < padded; j += kLanes) {
    if constexpr (kHeads == 4 && kLanes == 16) {  // sums, keys and a query fit 32 registers
      for (int h = 0; h < kHeads; h++) {
        fetch_keys(j, first + h);
        score_heads<Element, kDim, kHeads>(block.k + j + 4 * h, offset, heads.query, dim, weights, j + 4 * h);
      }
    } else if constexpr (sizeof(Element) < 4 && kHeads > 1) {
      const float* rows[kLanes];
      for (int t = 0; t < kLanes; t++) {
        rows[t] = widened + t * dim;
        for (int64_t d = 0; d < dim; d += kLanes) store(widened + t * dim + d, load(block.k[j + t] + offset + d));
      }
      for (int h = 0; h < kHeads; h++) {
        fetch_keys(j, first + h);
        store(weights[h] + j, score_tokens<float, kDim>(rows, 0, heads.query + h * dim, dim));
      }
    } else {
      for (int h = 0; h < kHeads; h++) {
        fetch_keys(j, first + h);
        store(weights[h] + j, score_tokens<Element, kDim>(block.k + j, offset, heads.query + h * dim, dim));
      }
    }
  }
  float factors[kHeads];
  for (int h = 0; h < kHeads; h++) {
    if constexpr (kScaled<Element>) put_scales(weights[h], padded, block.k_scales, offset / dim);
    for (int j = block.count; j < padded; j++) weights[h][j] = minus_infinity();
    factors[h] = weigh(weights[h], padded, call.soft_cap, heads.maximum[h], heads.sum[h]);
    if constexpr (kScaled<Element>) put_scales(weights[h], padded, block.v_scales, offset / dim);
  }
  const int stride = int((call.group + 3) / 4), phase = int(first / 4);
  int64_t d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes)
    add_values<Element, kWhole, kHeads, kWide>(block.v, ahead_v, phase, stride, offset, block.count, weights, factors,
                                               heads.values, dim, d);
  for (; d < dim; d += kLanes)
    add_values<Element, kWhole, kHeads, 1>(block.v, ahead_v, phase, stride, offset, block.count, weights, factors,
                                           heads.values, dim, d);
}

template <class Element, bool kWhole, int kDim>
void decode_range(const Call& call, const Item& item, const float* query, float* maximum, float* sum, float* values) {
  const int64_t runs = call.kv_heads * ((call.group + 3) / 4);  // of decode_heads over a block
  const int64_t wide = kWide * kLanes, parts = call.dim / wide + call.dim % wide / kLanes;
  Block<Element> blocks[2];
  int now = 0;
  blocks[0].fill(call, item.row, item.first_key, item.end_key);
  for (int64_t key = item.first_key; key < item.end_key; key += kBlock, now ^= 1) {
    Block<Element>&block = blocks[now], &next = blocks[now ^ 1];
    next.fill(call, item.row, key + kBlock, item.end_key);
    const Block<Element>& ahead = next.count ? next : block;
    Ahead<Element> ahead_k(ahead.k, next.count, call.token_stride(), call.heads() * (kBlock / kLanes));
    Ahead<Element> ahead_v(ahead.v, next.count, call.token_stride(), runs * parts * kBlock);
    for (int64_t h = 0; h < call.kv_heads; h++) {
      const int64_t offset = h * call.dim;
      for (int64_t g = 0; g < call.group;) {
        const int64_t head = h * call.group + g, left = call.group - g;
        const Heads heads{query + head * call.dim, maximum + head, sum + head, values + head * call.dim};
        if (left >= 4) {
          decode_heads<Element, kDim, kWhole, 4>(call, block, ahead_k, ahead_v, g, offset, heads), g += 4;
        } else if (left == 3) {
          decode_heads<Element, kDim, kWhole, 3>(call, block, ahead_k, ahead_v, g, offset, heads), g += 3;
        } else if (left == 2) {
          decode_heads<Element, kDim, kWhole, 2>(call, block, ahead_k, ahead_v, g, offset, heads), g += 2;
        } else {
          decode_heads<Element, kDim, kWhole, 1>(call, block, ahead_k, ahead_v, g, offset, heads), g += 1;
        }
      }
    }
  }
}

template <class Element, bool kWhole>
void decode_range(const Call& call, const Item& item, const float* query, float* maximum, float* sum, float* values) {
  if (call.dim == 64) return decode_range<Element, kWhole, 64>(call, item, query, maximum, sum, values);
  if (call.dim == 128) return decode_range<Element, kWhole, 128>(call, item, query, maximum, sum, values);
  decode_range<Element, kWhole, 0>(call, item, query, maximum, sum, values);
}

template <class Element>
void decode_range(const Call& call, const Item& item, const float* query, float* maximum, float* sum, float* values) {
  if constexpr (sizeof(Element) > 1) {  // a head of bytes is never that long
    if (call.group == 1 && call.dim * int64_t(sizeof(Element)) >= 512)
      return decode_range<Element, false>(call, item, query, maximum, sum, values);
  }
  decode_range<Element, true>(call, item, query, maximum, sum, values);
}

// Calls `body` with a pointer, never read, of the type that the pools' elements have.
template <class Body>
PAGED_INLINE void with_element(const Call& call, const Body& body) {
  switch (call.pool_element) {
    case PoolElement::kFloat32: return body(static_cast<float*>(nullptr));
    case PoolElement::kBfloat16: return body(static_cast<uint16_t*>(nullptr));
    case PoolElement::kInt8: return body(static_cast<int8_t*>(nullptr));
    case PoolElement::kFloat8: return body(static_cast<Float8*>(nullptr));
  }
}

void decode(const Call& call, const Item& item) {
  const int64_t heads = call.heads(), dim = call.dim;
  float* query = scratch(heads * dim + partial_floats(call));
  read_query(call, item.first_query, 0, heads, query);
  float* maximum = item.partial ? item.partial : query + heads * dim;
  float *sum = maximum + heads, *values = sum + heads;
  std::fill(maximum, sum, minus_infinity());
  std::fill(sum, values + heads * dim, 0.0f);
  with_element(call, [&](auto* element) {
    decode_range<std::remove_pointer_t<decltype(element)>>(call, item, query, maximum, sum, values);
  });
  if (item.partial) return;
  for (int64_t h = 0; h < heads; h++)
    write_output(call, item.first_query, h, maximum[h], sum[h], values + h * dim);
}

void merge(const Call& call, const Item& item, const float* partials, int64_t count) {
  const int64_t heads = call.heads(), dim = call.dim, size = partial_floats(call);
  float* values = scratch(dim);
  for (int64_t h = 0; h < heads; h++) {
    float maximum = minus_infinity(), sum = 0;
    for (int64_t i = 0; i < count; i++) maximum = std::max(maximum, partials[i * size + h]);
    const float shift = maximum == minus_infinity() ? 0.0f : maximum;
    std::fill(values, values + dim, 0.0f);
    for (int64_t i = 0; i < count; i++) {
      const float* part = partials + i * size;
      // A part that is all NaN kept -inf as its maximum; its sum must show.
      const float factor = part[h] == minus_infinity() ? 1.0f : std::exp(part[h] - shift);
      sum += factor * part[heads + h];
      const float* from = part + 2 * heads + h * dim;
      for (int64_t d = 0; d < dim; d++) values[d] += factor * from[d];
    }
    write_output(call, item.first_query, h, maximum, sum, values);
  }
}

// c [kRows, kVecs * kLanes] (+)= a [kRows, depth] @ b [depth, kVecs * kLanes].
template <int kRows, int kVecs>
PAGED_INLINE void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c,
                           int64_t c_stride, int64_t depth, bool add) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; i++) acc[r][i] = add ? load(c + r * c_stride + i * kLanes) : Vec{};
  for (int64_t k = 0; k < depth; k++) {
    Vec row[kVecs];
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; i++) row[i] = load(b + k * b_stride + i * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
      for (int i = 0; i < kVecs; i++) acc[r][i] += row[i] * a[r * a_stride + k];
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; i++) store(c + r * c_stride + i * kLanes, acc[r][i]);
}

// c [kTileHeight, width] (+)= a [kTileHeight, depth] @ b [depth, width]; c as wide as b, width a multiple of kLanes.
void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* c, int64_t width, int64_t depth,
              bool add) {
  int64_t n = 0;
  for (; n + kWide * kLanes <= width; n += kWide * kLanes)
    multiply<kTileHeight, kWide>(a, a_stride, b + n, b_stride, c + n, b_stride, depth, add);
  for (; n < width; n += kLanes)
    multiply<kTileHeight, 1>(a, a_stride, b + n, b_stride, c + n, b_stride, depth, add);
}

// A block's keys as [dim, kBlock] and its values as [kBlock, dim], zeros behind the last one.
template <class Element>
void pack(const Call& call, const Block<Element>& block, int64_t kv_head, float* keys, float* values) {
  const int64_t dim = call.dim, offset = kv_head * dim;
  const auto widened = [&](const Element* from, const float* const* scales, int token) {
    if constexpr (kScaled<Element>)
      return load(from) * scales[token][kv_head];
    else
      return load(from);
  };
  for (int j = 0; j < kBlock; j += kLanes)
    for (int64_t d = 0; d < dim; d += kLanes) {
      Vec square[kLanes];
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; t++)
        square[t] = j + t < block.count ? widened(block.k[j + t] + offset + d, block.k_scales, j + t) : Vec{};
      transpose(square);
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; t++) store(keys + (d + t) * kBlock + j, square[t]);
    }
  for (int j = 0; j < block.count; j++)
    for (int64_t d = 0; d < dim; d += kLanes) store(values + j * dim + d, widened(block.v[j] + offset + d, block.v_scales, j));
}

template <class Element>
void tile_range(const Call& call, const Item& item) {
  const int64_t dim = call.dim, group = call.group, row = item.row;
  const int64_t real = item.num_queries * group, rows = (real + kTileHeight - 1) / kTileHeight * kTileHeight;
  // Position of the tile's first query; the request's last query stands at seq_lens - 1.
  const int64_t position = call.seq_lens[row] - (call.query_start[row + 1] - item.first_query);
  float* query = scratch(rows * (2 * dim + kBlock + 2) + 2 * kBlock * dim);
  float *output = query + rows * dim, *weights = output + rows * dim, *keys = weights + rows * kBlock;
  float *values = keys + kBlock * dim, *maximum = values + kBlock * dim, *sum = maximum + rows;
  std::fill(query + real * dim, query + rows * dim, 0.0f);
  std::fill(weights + real * kBlock, weights + rows * kBlock, 0.0f);
  std::fill(output, output + rows * dim, 0.0f);
  std::fill(maximum, maximum + rows, minus_infinity());
  std::fill(sum, sum + rows, 0.0f);
  for (int64_t i = 0; i < item.num_queries; i++)
    read_query(call, item.first_query + i, item.kv_head * group, group, query + i * group * dim);

  // Keys of the block from `key` on that the queries of rows [first, last] see: [from, to).
  const auto seen = [&](int64_t first, int64_t last, int64_t key, int64_t count) {
    const int64_t oldest = call.window ? position + first / group - call.window + 1 : 0;
    const int64_t from = std::min<int64_t>(kBlock, std::max<int64_t>(0, oldest - key));
    return std::make_pair(from, std::max(from, std::min(count, position + last / group + 1 - key)));
  };
  Block<Element> block;
  for (int64_t key = item.first_key; key < item.end_key; key += kBlock) {
    block.fill(call, row, key, item.end_key);
    pack(call, block, item.kv_head, keys, values);
    for (int64_t r = 0; r < rows; r += kTileHeight) {
      const int64_t to = seen(r, std::min(r + kTileHeight, real) - 1, key, block.count).second;
      multiply(query + r * dim, dim, keys, kBlock, weights + r * kBlock, (to + kLanes - 1) / kLanes * kLanes, dim, false);
    }
    for (int64_t r = 0; r < real; r++) {
      float* scores = weights + r * kBlock;
      const auto [from, to] = seen(r, r, key, block.count);
      std::fill(scores, scores + from, minus_infinity());
      std::fill(scores + to, scores + kBlock, minus_infinity());
      const float factor = weigh(scores, kBlock, call.soft_cap, maximum[r], sum[r]);
      if (factor != 1.0f)
        for (int64_t d = 0; d < dim; d += kLanes) store(output + r * dim + d, load(output + r * dim + d) * factor);
    }
    for (int64_t r = 0; r < rows; r += kTileHeight) {
      const auto [from, to] = seen(r, std::min(r + kTileHeight, real) - 1, key, block.count);
      if (from < to)
        multiply(weights + r * kBlock + from, kBlock, values + from * dim, dim, output + r * dim, dim, to - from, true);
    }
  }
  for (int64_t r = 0; r < real; r++)
    write_output(call, item.first_query + r / group, item.kv_head * group + r % group, maximum[r], sum[r],
                 output + r * dim);
}

void tile(const Call& call, const Item& item) {
  with_element(call, [&](auto* element) { tile_range<std::remove_pointer_t<decltype(element)>>(call, item); });
}

float read(const float* from, int64_t count) {
  Vec sums[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes)
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) sums[j] += load(from + i + j * kLanes);
  float total = 0;
  for (int j = 0; j < 8; j++) total += sum_lanes(sums[j]);
  return total;
}

#define PAGED_TEXT(x) #x
#define PAGED_NAME(x) PAGED_TEXT(x)

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {decode, tile, merge, read, product, PAGED_NAME(PAGED_ISA)};

}  // namespace PAGED_ISA
}  // namespace paged
