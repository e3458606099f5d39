// The XLA FFI handler of matrix products.
//
// For:      checking shapes and types, choosing the instruction set, spreading columns over XLA's threads.
// Not for:  arithmetic (products.cc).
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "builds.h"
#include "parallel.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace paged {

namespace {
std::atomic<int64_t> g_products;
}  // namespace

int64_t num_products() { return g_products.load(); }

namespace {

// Waking a thread costs about what one core reads in that time; so does a piece's first tile, which nobody fetched.
constexpr int64_t kWorthAThread = 1 << 17, kPieceBytes = 1 << 19;

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("maxtext-paged: product: " + what); }

// [rows, depth] x [depth, columns] of these shapes, live rows alone; false where they do not fit each other.
bool describe(const ffi::AnyBuffer::Dimensions& x_shape, const float* x, ffi::AnyBuffer& weights,
              const ffi::AnyBuffer::Dimensions& y_shape, float* y, int64_t live, Product& product) {
  const auto weight_shape = weights.dimensions();
  if (x_shape.size() != 2 || weight_shape.size() != 2 || y_shape.size() != 2 || x_shape[1] != weight_shape[0] ||
      y_shape[0] != x_shape[0] || y_shape[1] != weight_shape[1])
    return false;
  product = {x, weights.untyped_data(), weights.element_type() == ffi::BF16, y, std::clamp<int64_t>(live, 0, x_shape[0]),
             x_shape[1], weight_shape[1]};
  return true;
}

bool widths(const ffi::AnyBuffer& weights) {
  return weights.element_type() == ffi::F32 || weights.element_type() == ffi::BF16;
}

// The columns of a product in pieces for threads. As many pieces for each thread, so that all finish together.
struct Pieces {
  int64_t width, count, threads, columns;

  Pieces(const Product& product, int64_t pool_threads) : columns(product.columns) {
    threads = std::max<int64_t>(1, pool_threads);
    const int64_t bytes = product.depth * columns * (product.weights_are_bfloat16 ? 2 : 4);
    const int64_t blocks = (columns + kProductColumns - 1) / kProductColumns;
    const int64_t each = (bytes - 1) / kPieceBytes / threads + 1;
    const int64_t wanted = bytes < kWorthAThread && product.rows < kManyRows ? 1 : each * threads;
    const int64_t piece = (blocks + wanted - 1) / wanted;
    width = piece * kProductColumns;
    count = (blocks + piece - 1) / piece;
  }

  template <class Body>
  void run(ffi::ThreadPool& pool, const Body& body) const {
    parallel_for(pool, count, threads,
                 [&](int64_t i) { body(i * width, std::min(columns, (i + 1) * width)); });
  }
};

// Every row that is computed by nobody is zero.
void clear_padding(float* y, int64_t live, int64_t rows, int64_t columns) {
  std::memset(y + live * columns, 0, (rows - live) * columns * sizeof(float));
}

ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weights, ffi::Buffer<ffi::S32> live,
                    ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t build) {
  if (live.element_count() != 1) return invalid("num_live must be one number");
  Product product;
  if (!describe(x.dimensions(), x.typed_data(), weights, y->dimensions(), y->typed_data(), live.typed_data()[0], product))
    return invalid("x, weights and y must be [rows, depth], [depth, columns] and [rows, columns]");
  if (!widths(weights)) return invalid("weights must be float32 or bfloat16");
  if (build < 0) build = best_build();
  if (build >= kNumBuilds || !runs_here(int(build))) return invalid("no such instruction set on this machine");
  clear_padding(product.y, product.rows, x.dimensions()[0], product.columns);
  if (product.rows == 0 || product.columns == 0) return ffi::Error::Success();
  if (product.depth == 0) {
    std::memset(product.y, 0, y->size_bytes());
    return ffi::Error::Success();
  }
  try {
    Pieces(product, pool.num_threads()).run(pool, [&](int64_t first, int64_t end) {
      kBuilds[build]->product(product, first, end);
    });
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("maxtext-paged: product: ") + error.what());
  }
  g_products++;
  return ffi::Error::Success();
}

// y = (activation(x @ gate) * (x @ up)) @ down; `hidden` and `factors` are where the two products are laid down.
ffi::Error gated_mlp(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer gate, ffi::AnyBuffer up,
                     ffi::AnyBuffer down, ffi::Buffer<ffi::S32> live, ffi::Result<ffi::Buffer<ffi::F32>> y,
                     ffi::Result<ffi::Buffer<ffi::F32>> hidden, ffi::Result<ffi::Buffer<ffi::F32>> factors,
                     int64_t activation, int64_t build) {
  if (live.element_count() != 1) return invalid("num_live must be one number");
  const int64_t rows = live.typed_data()[0];
  Product first_product, second_product, last_product;
  if (!describe(x.dimensions(), x.typed_data(), gate, hidden->dimensions(), hidden->typed_data(), rows, first_product) ||
      !describe(x.dimensions(), x.typed_data(), up, factors->dimensions(), factors->typed_data(), rows, second_product) ||
      !describe(hidden->dimensions(), hidden->typed_data(), down, y->dimensions(), y->typed_data(), rows, last_product) ||
      first_product.columns != second_product.columns)
    return invalid("x, gate, up, down and y must be [rows, emb], [emb, mlp] twice, [mlp, emb] and [rows, emb]");
  if (!widths(gate) || !widths(up) || !widths(down)) return invalid("weights must be float32 or bfloat16");
  if (activation != int64_t(Activation::kSilu) && activation != int64_t(Activation::kGelu))
    return invalid("no such activation");
  if (build < 0) build = best_build();
  if (build >= kNumBuilds || !runs_here(int(build))) return invalid("no such instruction set on this machine");
  clear_padding(last_product.y, last_product.rows, x.dimensions()[0], last_product.columns);
  if (first_product.depth == 0 || last_product.depth == 0 || last_product.columns == 0)
    return invalid("a gated MLP of nothing");
  if (last_product.rows == 0) return ffi::Error::Success();
  const Gate both{first_product.y, second_product.y, first_product.rows, first_product.columns, Activation(activation)};
  const Kernels& kernels = *kBuilds[build];
  try {
    Pieces(first_product, pool.num_threads()).run(pool, [&](int64_t first, int64_t end) {
      kernels.product(first_product, first, end);
      kernels.product(second_product, first, end);
      kernels.gate(both, first, end);
    });
    Pieces(last_product, pool.num_threads()).run(pool, [&](int64_t first, int64_t end) {
      kernels.product(last_product, first, end);
    });
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("maxtext-paged: product: ") + error.what());
  }
  g_products += 3;
  return ffi::Error::Success();
}

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* maxtext_paged_product(XLA_FFI_CallFrame*);
extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* maxtext_paged_gated_mlp(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_product, paged::multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("build"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_gated_mlp, paged::gated_mlp,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("build"));
