// The library's doors: the XLA FFI handlers of attention and a few plain C functions for ctypes.
//
// For:      checking shapes and types, choosing the instruction set, running the work list on XLA's threads.
// Not for:  arithmetic (kernels.cc) or cutting work (work_list.h).
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "attention.h"
#include "builds.h"
#include "parallel.h"
#include "products.h"
#include "work_list.h"
#include "xla/ffi/api/ffi.h"

#define PAGED_EXPORT __attribute__((visibility("default")))

namespace ffi = xla::ffi;

namespace paged {
namespace {

// Calls with decode rows by how those ran, and what they came to: fused, whole, chunks, merged rows, prefill tiles.
std::atomic<int64_t> g_counts[5];

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("maxtext-paged: " + what); }

bool is_activation_type(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; }

// int8, and uint8 for the bits of fp8, come with scales.
bool is_scaled_type(ffi::DataType type) { return type == ffi::S8 || type == ffi::U8; }

bool is_pool_type(ffi::DataType type) { return is_activation_type(type) || is_scaled_type(type); }

int64_t byte_width(ffi::DataType type) { return is_scaled_type(type) ? 1 : type == ffi::BF16 ? 2 : 4; }

PoolElement element_of(ffi::DataType type) {
  if (type == ffi::S8) return PoolElement::kInt8;
  if (type == ffi::U8) return PoolElement::kFloat8;
  return type == ffi::BF16 ? PoolElement::kBfloat16 : PoolElement::kFloat32;
}

constexpr char kPoolTypes[] = " K and V pools must be [pages, tokens, heads, dim] of one type, float32, bfloat16, int8 or "
                              "uint8 (the bits of float8_e4m3fn)";

bool same(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

template <class Buffer>
bool has_count(Buffer& buffer, int64_t count) {
  return int64_t(buffer.element_count()) == count;
}

void write_rows(char* pool, const char* rows, const int32_t* slots, int64_t num_tokens, int64_t num_slots,
                int64_t row_bytes) {
  for (int64_t i = 0; i < num_tokens; i++)
    if (slots[i] >= 0 && slots[i] < num_slots)
      std::memcpy(pool + slots[i] * row_bytes, rows + i * row_bytes, row_bytes);
}

ffi::Error append(ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool, ffi::AnyBuffer key, ffi::AnyBuffer value,
                  ffi::Buffer<ffi::S32> slots, ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  const auto shape = k_pool.dimensions();
  const auto type = k_pool.element_type();
  if (shape.size() != 4 || !same(v_pool.dimensions(), shape) || !is_pool_type(type) || v_pool.element_type() != type)
    return invalid(std::string("append:") + kPoolTypes);
  const int64_t num_tokens = slots.element_count(), row = shape[2] * shape[3];
  if (key.element_type() != type || value.element_type() != type || !has_count(key, num_tokens * row) ||
      !has_count(value, num_tokens * row))
    return invalid("append: key and value must be [tokens, heads, dim] of the pools' type");
  if (k_out->untyped_data() != k_pool.untyped_data() || v_out->untyped_data() != v_pool.untyped_data())
    return ffi::Error::Internal("maxtext-paged: append: the pools are not written in place");
  const int64_t row_bytes = row * byte_width(type), num_slots = shape[0] * shape[1];
  write_rows(static_cast<char*>(k_out->untyped_data()), static_cast<const char*>(key.untyped_data()),
             slots.typed_data(), num_tokens, num_slots, row_bytes);
  write_rows(static_cast<char*>(v_out->untyped_data()), static_cast<const char*>(value.untyped_data()),
             slots.typed_data(), num_tokens, num_slots, row_bytes);
  return ffi::Error::Success();
}

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool,
                  ffi::Buffer<ffi::F32> k_scales, ffi::Buffer<ffi::F32> v_scales, ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> seq_lens, ffi::Buffer<ffi::S32> kv_indptr,
                  ffi::Buffer<ffi::S32> kv_indices, ffi::Buffer<ffi::S32> first_page_offset,
                  ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> output, float scale, float soft_cap,
                  int64_t window, int64_t min_tokens, int64_t min_tokens_per_request, int64_t build) {
  const auto pool_shape = k_pool.dimensions(), query_shape = query.dimensions();
  const auto type = k_pool.element_type(), query_type = query.element_type();
  if (pool_shape.size() != 4 || !same(v_pool.dimensions(), pool_shape) || !is_pool_type(type) ||
      v_pool.element_type() != type)
    return invalid(std::string("attend:") + kPoolTypes);
  const int64_t num_scales = is_scaled_type(type) ? pool_shape[0] * pool_shape[1] * pool_shape[2] : 0;
  if (!has_count(k_scales, num_scales) || !has_count(v_scales, num_scales))
    return invalid("attend: scales must be [pages, tokens, heads] for int8 and uint8 pools, and none for others");
  if (query_shape.size() != 3 || !is_activation_type(query_type) || output->element_type() != query_type ||
      !same(output->dimensions(), query_shape))
    return invalid("attend: query and output must be [tokens, heads, dim] of one type, float32 or bfloat16");
  const int64_t num_tokens = query_shape[0], heads = query_shape[1], dim = query_shape[2];
  if (dim != pool_shape[3] || dim % 16 || dim < 16 || dim > 256)
    return invalid("attend: head_dim must be a multiple of 16 from 16 to 256, and the pools'");
  if (pool_shape[2] < 1 || heads % pool_shape[2]) return invalid("attend: query heads must be a multiple of KV heads");
  const int64_t num_rows = seq_lens.element_count();
  if (!has_count(query_start, num_rows + 1) || !has_count(kv_indptr, num_rows + 1) ||
      !has_count(first_page_offset, num_rows) || !(has_count(sinks, 0) || has_count(sinks, heads)))
    return invalid("attend: page table arrays or sinks have the wrong length");
  if (build < 0) build = best_build();
  if (build >= kNumBuilds || !runs_here(int(build))) return invalid("attend: no such instruction set on this machine");

  Call call{};
  call.k_pool = k_pool.untyped_data();
  call.v_pool = v_pool.untyped_data();
  call.pool_element = element_of(type);
  call.k_scales = num_scales ? k_scales.typed_data() : nullptr;
  call.v_scales = num_scales ? v_scales.typed_data() : nullptr;
  call.num_pages = pool_shape[0];
  call.tokens_per_page = pool_shape[1];
  call.kv_heads = pool_shape[2];
  call.dim = dim;
  call.group = heads / pool_shape[2];
  call.query = query.untyped_data();
  call.output = output->untyped_data();
  call.query_is_bfloat16 = query_type == ffi::BF16;
  call.query_start = query_start.typed_data();
  call.seq_lens = seq_lens.typed_data();
  call.kv_indptr = kv_indptr.typed_data();
  call.kv_indices = kv_indices.typed_data();
  call.first_page_offset = first_page_offset.typed_data();
  call.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  call.scale = scale;
  call.soft_cap = soft_cap;
  call.window = window;

  try {
    const int64_t threads = std::max<int64_t>(1, pool.num_threads());
    const WorkList work = plan_work(call, num_rows, num_tokens, threads, {min_tokens, min_tokens_per_request});
    if (work.bad_row >= 0) {
      const std::string row = "attend: row " + std::to_string(work.bad_row);
      if (work.bad_page == kTooFewPages) return invalid(row + " has fewer pages than its tokens take");
      return invalid(row + " names page " + std::to_string(work.bad_page) + " of a pool of " +
                     std::to_string(call.num_pages));
    }
    const int64_t row_bytes = heads * dim * (call.query_is_bfloat16 ? 2 : 4);
    const int64_t live = std::min<int64_t>(num_tokens, std::max(0, call.query_start[num_rows]));
    std::memset(static_cast<char*>(call.output) + live * row_bytes, 0, (num_tokens - live) * row_bytes);
    const Kernels& kernels = *kBuilds[build];
    // Waking a thread costs about what one core reads in that time.
    constexpr int64_t kWorthAThread = 1 << 17;
    const int64_t useful = std::min(threads, work.cost / kWorthAThread + 1);
    parallel_for(pool, work.items.size(), useful, [&](int64_t i) {
      const Item& item = work.items[i];
      item.kv_head < 0 ? kernels.decode(call, item) : kernels.tile(call, item);
    });
    parallel_for(pool, work.merges.size(), useful, [&](int64_t i) {
      const Merge& merge = work.merges[i];
      kernels.merge(call, merge.item, work.workspace.data() + merge.first * partial_floats(call), merge.count);
    });
    if (work.num_decodes) g_counts[work.fused ? 0 : 1]++;
    g_counts[2] += work.fused ? work.num_chunks : 0;
    g_counts[3] += work.merges.size();
    g_counts[4] += int64_t(work.items.size()) - work.num_chunks;
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("maxtext-paged: attend: ") + error.what());
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace paged

extern "C" PAGED_EXPORT XLA_FFI_Error* maxtext_paged_append(XLA_FFI_CallFrame*);
extern "C" PAGED_EXPORT XLA_FFI_Error* maxtext_paged_attend(XLA_FFI_CallFrame*);

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_append, paged::append,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_attend, paged::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window")
                                  .Attr<int64_t>("min_tokens")
                                  .Attr<int64_t>("min_tokens_per_request")
                                  .Attr<int64_t>("build"));

extern "C" {

// FFI API version of the headers this was built with.
PAGED_EXPORT int32_t maxtext_paged_ffi_api_major() { return XLA_FFI_API_MAJOR; }
PAGED_EXPORT int32_t maxtext_paged_ffi_api_minor() { return XLA_FFI_API_MINOR; }

// Instruction-set builds: how many, a name, whether this machine runs it, the one taken by default.
PAGED_EXPORT int32_t maxtext_paged_num_builds() { return paged::kNumBuilds; }
PAGED_EXPORT const char* maxtext_paged_build_name(int32_t build) {
  return paged::kBuilds[build]->name;
}
PAGED_EXPORT int32_t maxtext_paged_build_runs(int32_t build) { return paged::runs_here(build); }
PAGED_EXPORT int32_t maxtext_paged_best_build() { return paged::best_build(); }

// Copies the five counts of attend calls since the library was loaded, and that of products.
PAGED_EXPORT void maxtext_paged_counts(int64_t* to) {
  for (int i = 0; i < 5; i++) to[i] = paged::g_counts[i].load();
  to[5] = paged::num_products();
}

// Reads `count` floats with the default build, for benchmarks.
PAGED_EXPORT float maxtext_paged_read(const float* from, int64_t count) {
  return paged::kBuilds[paged::best_build()]->read(from, count);
}

// One token row written to a pool of any extent, as append does it: for tests of offsets past 2^32.
PAGED_EXPORT void maxtext_paged_write_row(char* pool, const char* row, int32_t slot, int64_t num_slots, int64_t row_bytes) {
  paged::write_rows(pool, row, &slot, 1, num_slots, row_bytes);
}

}  // extern "C"
