// Products of few rows with a weight matrix on one core: compiled once per instruction set (PAGED_ISA,
// PAGED_VECTOR_BYTES).
//
// For:      reading each weight once from memory, whatever the number of rows.
// Not for:  threads or XLA (product_handler.cc).
//
// Tiles of kHeight rows x some vectors of columns are held in registers over kBlock steps of the depth, then laid down
// in y and taken up again for the next block. While a tile is worked on, the next one's weights are fetched: spread
// over the rows, or the first of them would wait for memory and the others would leave it idle.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "attention.h"
#include "products.h"

namespace paged {
namespace PAGED_ISA {

void product(const Product& product, int64_t first, int64_t end);

namespace {

#include "vectors.h"

// Registers for sums: 24 of 32, or 12 of 16.
constexpr int kSums = kLanes == 16 ? 24 : 12;
constexpr int kHeight = kLanes == 16 ? 8 : 4;
constexpr int kBlock = 32;

// Vectors of columns of a full tile of so many rows.
constexpr int full_width(int rows) { return std::min(8, kSums / rows); }

// The tile's place in the product.
template <class Element>
struct Place {
  const float* x;  // its first row, at the block's first step
  int64_t depth;   // of x, its row stride
  const Element* weights;
  int64_t columns;  // of weights and y, their row stride
  float* y;
  int64_t steps;
  bool first;  // of the blocks: sums start at zero
  const Element* ahead;  // next tile's weights
};

// Up to `count` < kLanes values, zeros beside them.
template <class Element>
PAGED_INLINE Vec load_part(const Element* from, int64_t count) {
  Element values[kLanes] = {};
  std::memcpy(values, from, count * sizeof(Element));
  return load(values);
}

PAGED_INLINE void store_part(float* to, Vec v, int64_t count) { std::memcpy(to, &v, count * sizeof(float)); }

// kRows x kWidth vectors; kFetch vectors of each of the next tile's rows are fetched meanwhile. With `part`, less than
// a vector.
template <class Element, int kRows, int kWidth, int kFetch, bool kPart = false>
void tile(const Place<Element>& p, int64_t part = 0) {
  Vec sums[kRows][kWidth];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kWidth; c++) {
      const float* from = p.y + r * p.columns + c * kLanes;
      sums[r][c] = p.first ? Vec{} : kPart ? load_part(from, part) : load(from);
    }
  const Element *weights = p.weights, *ahead = p.ahead;
  for (int64_t k = 0; k < p.steps; k++) {
#pragma GCC unroll 8
    for (int c = 0; c < kFetch; c++) __builtin_prefetch(ahead + c * kLanes, 0, 2);
    Vec w[kWidth];
#pragma GCC unroll 8
    for (int c = 0; c < kWidth; c++) w[c] = kPart ? load_part(weights, part) : load(weights + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const float x = p.x[r * p.depth + k];
#pragma GCC unroll 8
      for (int c = 0; c < kWidth; c++) sums[r][c] += w[c] * x;
    }
    weights += p.columns;
    if (kFetch) ahead += p.columns;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kWidth; c++) {
      float* to = p.y + r * p.columns + c * kLanes;
      kPart ? store_part(to, sums[r][c], part) : store(to, sums[r][c]);
    }
}

// A full tile's rows, `fetch` vectors of which it fetches for the next: all, or its share with the rows beside it.
template <class Element, int kRows, int kWidth>
PAGED_INLINE void full_tile(const Place<Element>& p, int fetch) {
  if (fetch >= kWidth) return tile<Element, kRows, kWidth, kWidth>(p);
  if (fetch >= 2) return tile<Element, kRows, kWidth, std::min(2, kWidth)>(p);
  if (fetch == 1) return tile<Element, kRows, kWidth, 1>(p);
  tile<Element, kRows, kWidth, 0>(p);
}

// What is left of a panel beside its full tiles: columns [0, count).
template <class Element, int kRows>
void narrow_tiles(Place<Element> p, int64_t count) {
  const auto step = [&](int64_t columns) {
    p.weights += columns, p.y += columns, count -= columns;
  };
  if constexpr (full_width(kRows) > 4)
    for (; count >= 4 * kLanes; step(4 * kLanes)) tile<Element, kRows, 4, 0>(p);
  if constexpr (full_width(kRows) > 2)
    for (; count >= 2 * kLanes; step(2 * kLanes)) tile<Element, kRows, 2, 0>(p);
  for (; count >= kLanes; step(kLanes)) tile<Element, kRows, 1, 0>(p);
  if (count) tile<Element, kRows, 1, 0, true>(p, count);
}

// Calls body(integral_constant<rows>) for a number of rows known at run time.
template <int kRows = kHeight, class Body>
PAGED_INLINE void with_rows(int rows, const Body& body) {
  if constexpr (kRows == 1)
    body(std::integral_constant<int, 1>{});
  else if (rows == kRows)
    body(std::integral_constant<int, kRows>{});
  else
    with_rows<kRows - 1>(rows, body);
}

template <class Element>
void columns_of(const Product& product, int64_t first, int64_t end) {
  const Element* const weights = static_cast<const Element*>(product.weights);
  const int64_t rows = product.rows, depth = product.depth, columns = product.columns;
  // Rows are spread evenly over the tiles: 9 are 5 and 4, not 8 and 1.
  const int64_t tiles = (rows + kHeight - 1) / kHeight, most = (rows + tiles - 1) / tiles;
  const int width = full_width(int(most));
  const int64_t step = width * kLanes, full = first + (end - first) / step * step;
  for (int64_t k = 0; k < depth; k += kBlock) {
    const auto place = [&](int64_t row, int64_t column, const Element* ahead) {
      return Place<Element>{product.x + row * depth + k, depth, weights + k * columns + column, columns,
                            product.y + row * columns + column, std::min<int64_t>(kBlock, depth - k), k == 0, ahead};
    };
    for (int64_t column = first; column < full; column += step) {
      const bool last = column + step >= full;
      const Element* const ahead = weights + (last ? (k + kBlock) * columns + first : k * columns + column + step);
      const bool fetch = !last || k + kBlock < depth;
      for (int64_t t = 0, row = 0; t < tiles; t++) {
        const int64_t height = rows * (t + 1) / tiles - row;
        const int64_t begin = t * width / tiles, share = fetch ? (t + 1) * width / tiles - begin : 0;
        with_rows(int(height), [&](auto h) {
          constexpr int kRows = decltype(h)::value;
          const Place<Element> p = place(row, column, ahead + begin * kLanes);
          // A tile of one row less than the others is as wide as they are.
          constexpr int kWidth = full_width(kRows), kTaller = full_width(std::min(kRows + 1, kHeight));
          if (width == kWidth)
            full_tile<Element, kRows, kWidth>(p, int(share));
          else if constexpr (2 * kRows >= kHeight)
            full_tile<Element, kRows, kTaller>(p, int(share));
        });
        row += height;
      }
    }
    for (int64_t t = 0, row = 0; full < end && t < tiles; t++) {
      const int64_t height = rows * (t + 1) / tiles - row;
      with_rows(int(height), [&](auto h) {
        narrow_tiles<Element, decltype(h)::value>(place(row, full, nullptr), end - full);
      });
      row += height;
    }
  }
}

}  // namespace

void product(const Product& product, int64_t first, int64_t end) {
  if (product.weights_are_bfloat16)
    columns_of<uint16_t>(product, first, end);
  else
    columns_of<float>(product, first, end);
}

}  // namespace PAGED_ISA
}  // namespace paged
