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

ffi::Error multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weights, ffi::Buffer<ffi::S32> live,
                    ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t build) {
  const auto x_shape = x.dimensions(), weight_shape = weights.dimensions(), y_shape = y->dimensions();
  const auto type = weights.element_type();
  if (x_shape.size() != 2 || weight_shape.size() != 2 || y_shape.size() != 2 || x_shape[1] != weight_shape[0] ||
      y_shape[0] != x_shape[0] || y_shape[1] != weight_shape[1])
    return invalid("x, weights and y must be [rows, depth], [depth, columns] and [rows, columns]");
  if (live.element_count() != 1) return invalid("num_live must be one number");
  if (type != ffi::F32 && type != ffi::BF16) return invalid("weights must be float32 or bfloat16");
  if (build < 0) build = best_build();
  if (build >= kNumBuilds || !runs_here(int(build))) return invalid("no such instruction set on this machine");
  const int64_t rows = std::clamp<int64_t>(live.typed_data()[0], 0, x_shape[0]);
  const Product product{x.typed_data(), weights.untyped_data(), type == ffi::BF16, y->typed_data(),
                        rows,           x_shape[1],             weight_shape[1]};
  std::memset(product.y + rows * product.columns, 0, (x_shape[0] - rows) * product.columns * sizeof(float));
  if (rows == 0 || product.columns == 0) return ffi::Error::Success();
  if (product.depth == 0) {
    std::memset(product.y, 0, y->size_bytes());
    return ffi::Error::Success();
  }
  const int64_t blocks = (product.columns + kProductColumns - 1) / kProductColumns;
  const int64_t threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t bytes = product.depth * product.columns * (product.weights_are_bfloat16 ? 2 : 4);
  // As many pieces for each thread, so that all finish together.
  const int64_t each = (bytes - 1) / kPieceBytes / threads + 1;
  const int64_t wanted = bytes < kWorthAThread && rows < kManyRows ? 1 : each * threads;
  const int64_t piece = (blocks + wanted - 1) / wanted, pieces = (blocks + piece - 1) / piece;
  try {
    parallel_for(pool, pieces, threads, [&](int64_t i) {
      const int64_t first = i * piece * kProductColumns;
      kBuilds[build]->product(product, first, std::min(product.columns, first + piece * kProductColumns));
    });
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("maxtext-paged: product: ") + error.what());
  }
  g_products++;
  return ffi::Error::Success();
}

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* maxtext_paged_product(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_product, paged::multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("build"));
