// Products of rows with a weight matrix on one core: compiled once per instruction set (PAGED_ISA,
// PAGED_VECTOR_BYTES).
//
// For:      reading each weight once from memory where rows are few; keeping the multipliers busy where they are many.
// Not for:  threads or XLA (product_handler.cc).
//
// Tiles of kHeight rows x some vectors of columns are held in registers over a block of the depth, then laid down in y
// and taken up again for the next block. Few rows wait for memory: while a tile is worked on, the next one's weights are
// fetched, spread over the rows, or the first of them would wait and the others would leave memory idle. Many rows wait
// for arithmetic: a panel of weights is packed once, so that all tiles of rows find it in the first cache.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

// Vectors of columns of the widest tile of so many rows, from one on.
constexpr int kWidest[] = {8, kSums / 3, kSums / 3, kSums / 4, kSums / 5, kSums / 6, kSums / 7, kSums / 8};

// Many rows are taken so many at a time, so that a block of x stays in the second cache, and a panel of weights is so
// deep that it stays in the first.
constexpr int64_t kRowsAtOnce = 512, kPackedBlock = 192;

constexpr int kLine = 64;

// Lines of memory that so many vectors take.
template <class Element>
constexpr int lines(int vectors) {
  return (vectors * kLanes * int(sizeof(Element)) + kLine - 1) / kLine;
}

// The tile's place in the product.
template <class Element>
struct Place {
  const float* x;  // its first row, at the block's first step
  int64_t depth;   // of x, its row stride
  const Element* weights;
  int64_t stride;  // of weights
  float* y;
  int64_t columns;  // of y, its row stride
  int64_t steps;
  bool first;         // of the blocks: sums start at zero
  const char* ahead;  // next tile's weights
  int64_t ahead_stride;
};

// Up to `count` < kLanes values, zeros beside them.
template <class Element>
PAGED_INLINE Vec load_part(const Element* from, int64_t count) {
  Element values[kLanes] = {};
  std::memcpy(values, from, count * sizeof(Element));
  return load(values);
}

PAGED_INLINE void store_part(float* to, Vec v, int64_t count) { std::memcpy(to, &v, count * sizeof(float)); }

// kRows x kWidth vectors; kFetch lines of each of the next tile's rows are fetched meanwhile. With `part`, less than a
// vector.
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
  const Element* weights = p.weights;
  const char* ahead = p.ahead;
  for (int64_t k = 0; k < p.steps; k++) {
#pragma GCC unroll 8
    for (int c = 0; c < kFetch; c++) __builtin_prefetch(ahead + c * kLine, 0, 2);
    Vec w[kWidth];
#pragma GCC unroll 8
    for (int c = 0; c < kWidth; c++) w[c] = kPart ? load_part(weights, part) : load(weights + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const float x = p.x[r * p.depth + k];
#pragma GCC unroll 8
      for (int c = 0; c < kWidth; c++) sums[r][c] += w[c] * x;
    }
    weights += p.stride;
    if (kFetch) ahead += p.ahead_stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 8
    for (int c = 0; c < kWidth; c++) {
      float* to = p.y + r * p.columns + c * kLanes;
      kPart ? store_part(to, sums[r][c], part) : store(to, sums[r][c]);
    }
}

// A tile of kRows x `width` vectors; `fetch` lines of the next one's rows are fetched meanwhile: kLines, which is all of
// the widest, or a share where several tiles of rows stand above each other.
template <class Element, int kRows, int kWidth, int kLines>
PAGED_INLINE void tile_of_width(const Place<Element>& p, int width, int fetch) {
  if constexpr (kWidth > 1)
    if (width < kWidth) return tile_of_width<Element, kRows, kWidth - 1, lines<Element>(kWidth - 1)>(p, width, fetch);
  if (2 * kRows < kHeight || fetch >= kLines) return tile<Element, kRows, kWidth, kLines>(p);
  if constexpr (2 * kRows >= kHeight) {
    if (fetch >= 2) return tile<Element, kRows, kWidth, std::min(2, kLines)>(p);
    if (fetch == 1) return tile<Element, kRows, kWidth, 1>(p);
    tile<Element, kRows, kWidth, 0>(p);
  }
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
  // Rows are spread evenly over tiles, and vectors of columns too: 9 are 5 and 4, not 8 and 1.
  const int64_t tiles = (rows + kHeight - 1) / kHeight, vectors = (end - first) / kLanes;
  const int64_t most = kWidest[(rows + tiles - 1) / tiles - 1], across = (vectors + most - 1) / most;
  const int64_t full = first + vectors * kLanes;
  const auto column_of = [&](int64_t i) { return first + i * vectors / across * kLanes; };
  // Narrow weights that several tiles of rows take are widened once.
  alignas(64) float widened[sizeof(Element) < 4 ? kBlock * kWidest[(kHeight + 1) / 2 - 1] * kLanes : 1];
  for (int64_t k = 0; k < depth; k += kBlock) {
    const int64_t steps = std::min<int64_t>(kBlock, depth - k);
    // Tiles of `width` vectors, one for each of the tiles of rows. A tile of one row less than the others is as wide.
    const auto column_of_tiles = [&](auto* from, int64_t stride, int64_t column, int64_t width, const Element* ahead) {
      using Held = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
      const int64_t ahead_lines = lines<Element>(int(width));
      for (int64_t t = 0, row = 0; t < tiles; t++) {
        const int64_t height = rows * (t + 1) / tiles - row, begin = t * ahead_lines / tiles;
        const Place<Held> p{product.x + row * depth + k,
                            depth,
                            from,
                            stride,
                            product.y + row * columns + column,
                            columns,
                            steps,
                            k == 0,
                            reinterpret_cast<const char*>(ahead) + begin * kLine,
                            columns * int64_t(sizeof(Element))};
        with_rows(int(height), [&](auto h) {
          constexpr int kRows = decltype(h)::value, kWidth = kWidest[kRows - 1];
          tile_of_width<Held, kRows, kWidth, lines<Element>(kWidth)>(p, int(width),
                                                                     int((t + 1) * ahead_lines / tiles - begin));
        });
        row += height;
      }
    };
    for (int64_t i = 0; i < across; i++) {
      const int64_t column = column_of(i), width = (column_of(i + 1) - column) / kLanes;
      const Element* const from = weights + k * columns + column;
      // The next tile may be a vector wider or narrower. Behind the last block none is ours: this one's is at hand.
      const Element* ahead = weights + k * columns + column_of(i + 1);
      if (i + 1 == across) ahead = weights + (k + kBlock < depth ? k + kBlock : k) * columns + first;
      if (sizeof(Element) < 4 && tiles > 1) {
        for (int64_t j = 0; j < steps; j++)
          for (int64_t c = 0; c < width; c++)
            store(widened + (j * width + c) * kLanes, load(from + j * columns + c * kLanes));
        column_of_tiles(static_cast<const float*>(widened), width * kLanes, column, width, ahead);
      } else {
        column_of_tiles(from, columns, column, width, ahead);
      }
    }
    for (int64_t t = 0, row = 0; full < end && t < tiles; t++) {
      const int64_t height = rows * (t + 1) / tiles - row;
      const Place<Element> p{product.x + row * depth + k,
                             depth,
                             weights + k * columns + full,
                             columns,
                             product.y + row * columns + full,
                             columns,
                             steps,
                             k == 0,
                             nullptr,
                             0};
      with_rows(int(height), [&](auto h) { tile<Element, decltype(h)::value, 1, 0, true>(p, end - full); });
      row += height;
    }
  }
}

// The same chains of multiply-adds, so the same bits, for many rows.
template <class Element>
void columns_of_many(const Product& product, int64_t first, int64_t end) {
  const Element* const weights = static_cast<const Element*>(product.weights);
  const int64_t depth = product.depth, columns = product.columns;
  constexpr int64_t kWidth = kWidest[kHeight - 1];
  const int64_t vectors = (end - first + kLanes - 1) / kLanes, across = (vectors + kWidth - 1) / kWidth;
  alignas(64) float packed[kPackedBlock * kWidth * kLanes];
  for (int64_t row = 0; row < product.rows; row += kRowsAtOnce) {
    const int64_t rows = std::min(kRowsAtOnce, product.rows - row), tiles = (rows + kHeight - 1) / kHeight;
    for (int64_t k = 0; k < depth; k += kPackedBlock) {
      const int64_t steps = std::min(kPackedBlock, depth - k);
      for (int64_t i = 0; i < across; i++) {
        const int64_t begin = i * vectors / across, width = (i + 1) * vectors / across - begin;
        const int64_t column = first + begin * kLanes, whole = std::min(width, (end - column) / kLanes);
        const int64_t part = whole < width ? (end - column) % kLanes : 0;
        for (int64_t j = 0; j < steps; j++) {
          const Element* const from = weights + (k + j) * columns + column;
          float* const to = packed + j * width * kLanes;
          for (int64_t c = 0; c < whole; c++) store(to + c * kLanes, load(from + c * kLanes));
          if (part) store(to + whole * kLanes, load_part(from + whole * kLanes, part));
        }
        for (int64_t t = 0, at = 0; t < tiles; t++) {
          const int64_t height = rows * (t + 1) / tiles - at;
          Place<float> p{product.x + (row + at) * depth + k,
                         depth,
                         packed,
                         width * kLanes,
                         product.y + (row + at) * columns + column,
                         columns,
                         steps,
                         k == 0,
                         nullptr,
                         0};
          with_rows(int(height), [&](auto h) {
            constexpr int kRows = decltype(h)::value;
            if (whole) tile_of_width<float, kRows, kWidest[kRows - 1], 0>(p, int(whole), 0);
            if (!part) return;
            p.weights += whole * kLanes;
            p.y += whole * kLanes;
            tile<float, kRows, 1, 0, true>(p, part);
          });
          at += height;
        }
      }
    }
  }
}

template <class Element>
void any_columns_of(const Product& product, int64_t first, int64_t end) {
  product.rows < kManyRows ? columns_of<Element>(product, first, end) : columns_of_many<Element>(product, first, end);
}

}  // namespace

void product(const Product& product, int64_t first, int64_t end) {
  if (product.weights_are_bfloat16)
    any_columns_of<uint16_t>(product, first, end);
  else
    any_columns_of<float>(product, first, end);
}

}  // namespace PAGED_ISA
}  // namespace paged
