// What the matrix products are told.
//
// For:      one description of a product, shared by its handler and the kernels of every instruction set.
// Not for:  XLA's types (product_handler.cc) or arithmetic (products.cc).
#pragma once

#include <cstdint>

namespace paged {

// y = x @ weights. Every element of y is one chain of multiply-adds in the order of the depth, whatever the
// rows beside it, the columns a thread takes or the tile it falls into: a row alone gives bit for bit what it gives in
// a batch.
struct Product {
  const float* x;       // [rows, depth]
  const void* weights;  // [depth, columns], float32 or bfloat16
  bool weights_are_bfloat16;
  float* y;  // [rows, columns]
  int64_t rows, depth, columns;
};

// Threads take columns in multiples of so many.
constexpr int64_t kProductColumns = 16;

// From so many rows on, arithmetic takes longer than reading weights.
constexpr int64_t kManyRows = 33;

// Calls that computed a product since the library was loaded.
int64_t num_products();

}  // namespace paged
