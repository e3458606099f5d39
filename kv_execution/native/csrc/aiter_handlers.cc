// XLA FFI handlers that hand a step's arrays to AMD aiter's launchers, found in libraries at run time.
//
// For:      append, ragged attend and decode on ROCm; checking every shape first, since a launcher takes raw pointers.
// Not for:  arithmetic, building aiter, or choosing it (kv_execution/attention/aiter_backend.py).
//
// Each operation has two doors: the GPU's takes XLA's stream and device, the host's neither. The second is for tests:
// with a library of theirs in aiter's place, everything that is handed over can be looked at on a machine without a GPU.
#include <dlfcn.h>

#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "aiter_types.h"
#include "xla/ffi/api/ffi.h"

#define PAGED_EXPORT __attribute__((visibility("default")))

namespace ffi = xla::ffi;

namespace paged {
namespace {

constexpr int64_t kPartitionTokens = 256;
constexpr char kAppendSymbol[] =
    "_ZN5aiter23reshape_and_cache_flashER14aiter_tensor_tS1_S1_S1_S1_RKNSt7__cxx1112basic_stringIcSt11char_traitsIcE"
    "SaIcEEES1_S1_";
// The variable behind aiter's getCurrentHIPStream(), one for each thread and library.
constexpr char kStreamSymbol[] = "_ZZN5aiter6detail17threadLocalStreamEvE6stream";
constexpr char kPrefillSymbol[] =
    "_ZN5aiter17mha_batch_prefillE23fmha_batch_prefill_argsRKN7ck_tile13stream_configENSt7__cxx1112basic_stringIcSt11"
    "char_traitsIcESaIcEEEb9mask_enum9bias_enumb16quant_scale_enumb";

struct Loaded {
  void* library;
  void* function;
};
std::mutex g_mutex;
std::map<std::string, Loaded, std::less<>> g_loaded;

Loaded loaded(std::string_view name) {
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto found = g_loaded.find(name);
  return found == g_loaded.end() ? Loaded{} : found->second;
}

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("maxtext-paged: aiter: " + what); }

bool same(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

bool is_half(ffi::DataType type) { return type == ffi::F16 || type == ffi::BF16; }

// A pool's geometry, NHD, once it is known that a launcher can address it.
struct Pool {
  int32_t pages, page_size, heads, dim;
  int32_t page_stride() const { return page_size * heads * dim; }
  int32_t token_stride() const { return heads * dim; }
};

std::string check_pools(ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool, Pool& pool) {
  const auto shape = k_pool.dimensions();
  if (shape.size() != 4 || !same(v_pool.dimensions(), shape) || !is_half(k_pool.element_type()) ||
      v_pool.element_type() != k_pool.element_type())
    return "K and V pools must be [pages, tokens, heads, dim] of one type, bfloat16 or float16";
  if (int64_t(k_pool.size_bytes()) > std::numeric_limits<int32_t>::max())
    return "a pool of " + std::to_string(k_pool.size_bytes()) + " bytes: its kernels have 32-bit offsets";
  pool = {int32_t(shape[0]), int32_t(shape[1]), int32_t(shape[2]), int32_t(shape[3])};
  if (pool.pages < 1 || pool.page_size < 1 || pool.heads < 1 || pool.dim < 1) return "a pool without elements";
  return "";
}

std::string check_query(ffi::AnyBuffer query, ffi::AnyBuffer output, const Pool& pool, ffi::DataType type) {
  const auto shape = query.dimensions();
  if (shape.size() != 3 || query.element_type() != type || output.element_type() != type ||
      !same(output.dimensions(), shape))
    return "query and output must be [tokens, heads, dim] of the pools' type";
  if (shape[2] != pool.dim || shape[1] < 1 || shape[1] % pool.heads)
    return "query heads must be a multiple of the pools' KV heads, of their head_dim";
  if (int64_t(query.element_count()) > std::numeric_limits<int32_t>::max()) return "too many query elements";
  return "";
}

std::string check_rows(int64_t rows, ffi::Buffer<ffi::S32> indptr, ffi::Buffer<ffi::S32> last_page_len) {
  if (rows < 1 || int64_t(indptr.element_count()) != rows + 1 || int64_t(last_page_len.element_count()) != rows)
    return "page table arrays have the wrong length";
  return "";
}

template <class Buffer>
aiter_tensor_t tensor(Buffer& buffer, int device) {
  aiter_tensor_t made{};
  made.ptr = buffer.untyped_data();
  made.numel_ = buffer.element_count();
  const auto shape = buffer.dimensions();
  made.ndim = int(shape.size());
  int64_t stride = 1;
  for (int i = made.ndim - 1; i >= 0; i--) {
    made.shape[i] = shape[i];
    made.strides[i] = stride;
    stride *= shape[i];
  }
  switch (buffer.element_type()) {
    case ffi::F16: made.dtype_ = kAiterF16; break;
    case ffi::BF16: made.dtype_ = kAiterBF16; break;
    case ffi::F32: made.dtype_ = kAiterF32; break;
    default: made.dtype_ = kAiterI32;
  }
  made.device_id = device;
  return made;
}

template <class Call>
ffi::Error guarded(const char* what, Call call) {
  try {
    return call();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("maxtext-paged: aiter: ") + what + ": " + error.what());
  }
}

ffi::Error append(void* stream, int32_t device, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool, ffi::AnyBuffer key,
                  ffi::AnyBuffer value, ffi::Buffer<ffi::S32> slots, ffi::Buffer<ffi::F32> ones,
                  ffi::Result<ffi::AnyBuffer> k_out, ffi::Result<ffi::AnyBuffer> v_out) {
  Pool pool;
  if (const auto wrong = check_pools(k_pool, v_pool, pool); !wrong.empty()) return invalid("append: " + wrong);
  const auto shape = key.dimensions();
  if (shape.size() != 3 || !same(value.dimensions(), shape) || key.element_type() != k_pool.element_type() ||
      value.element_type() != k_pool.element_type() || shape[1] != pool.heads || shape[2] != pool.dim ||
      int64_t(slots.element_count()) != shape[0] || ones.element_count() < 1)
    return invalid("append: key and value must be [tokens, heads, dim] of the pools' type, with a slot each");
  if (k_out->untyped_data() != k_pool.untyped_data() || v_out->untyped_data() != v_pool.untyped_data())
    return ffi::Error::Internal("maxtext-paged: aiter: append: the pools are not written in place");
  const Loaded found = loaded("append");
  if (found.function == nullptr) return invalid("append: its library is not loaded");
  return guarded("append", [&] {
    // Looked up for each call: the variable is the calling thread's.
    *static_cast<void**>(dlsym(found.library, kStreamSymbol)) = stream;
    auto new_key = tensor(key, device), new_value = tensor(value, device), mapping = tensor(slots, device);
    auto k_cache = tensor(*k_out, device), v_cache = tensor(*v_out, device);
    auto k_scale = tensor(ones, device), v_scale = k_scale;
    reinterpret_cast<aiter::AppendFunction*>(found.function)(new_key, new_value, k_cache, v_cache, mapping, "auto",
                                                             k_scale, v_scale);
    return ffi::Error::Success();
  });
}

ffi::Error decode(void* stream, int32_t, ffi::AnyBuffer query, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool,
                  ffi::Buffer<ffi::S32> indptr, ffi::Buffer<ffi::S32> indices, ffi::Buffer<ffi::S32> last_page_len,
                  ffi::Buffer<ffi::F32> ones, ffi::Result<ffi::AnyBuffer> output, ffi::Result<ffi::AnyBuffer> workspace,
                  std::string_view kernel, float scale, int64_t max_seqlen_k) {
  Pool pool;
  auto wrong = check_pools(k_pool, v_pool, pool);
  if (wrong.empty()) wrong = check_query(query, *output, pool, k_pool.element_type());
  if (!wrong.empty()) return invalid("decode: " + wrong);
  const auto shape = query.dimensions();
  if (wrong = check_rows(shape[0], indptr, last_page_len); !wrong.empty()) return invalid("decode: " + wrong);
  if (max_seqlen_k < 1 || max_seqlen_k > std::numeric_limits<int32_t>::max() || ones.element_count() < 1)
    return invalid("decode: max_seqlen_k must be a positive 32-bit number");
  const int64_t parts = (max_seqlen_k + kPartitionTokens - 1) / kPartitionTokens;
  const int64_t needed = shape[0] * shape[1] * parts * (2 * 4 + shape[2] * 2);
  if (int64_t(workspace->size_bytes()) < needed)
    return invalid("decode: a workspace of " + std::to_string(workspace->size_bytes()) + " bytes, it needs " +
                   std::to_string(needed));
  const Loaded found = loaded(kernel);
  if (found.function == nullptr) return invalid("decode: " + std::string(kernel) + " is not loaded");
  return guarded("decode", [&] {
    reinterpret_cast<aiter::DecodeFunction*>(found.function)(
        output->untyped_data(), workspace->untyped_data(), query.untyped_data(), k_pool.untyped_data(),
        v_pool.untyped_data(), indptr.typed_data(), indices.typed_data(), last_page_len.typed_data(), nullptr, nullptr,
        ones.typed_data(), ones.typed_data(), nullptr, scale, 0.0f, int(shape[0]), pool.heads, int(shape[1]),
        int(parts), int(shape[1] * shape[2]), pool.page_stride(), pool.dim, pool.token_stride(), stream);
    return ffi::Error::Success();
  });
}

ffi::Error attend(void* stream, int32_t, ffi::AnyBuffer query, ffi::AnyBuffer k_pool, ffi::AnyBuffer v_pool,
                  ffi::Buffer<ffi::S32> query_start, ffi::Buffer<ffi::S32> indptr, ffi::Buffer<ffi::S32> indices,
                  ffi::Buffer<ffi::S32> last_page_len, ffi::Result<ffi::AnyBuffer> output, float scale) {
  Pool pool;
  auto wrong = check_pools(k_pool, v_pool, pool);
  if (wrong.empty()) wrong = check_query(query, *output, pool, k_pool.element_type());
  const int64_t rows = int64_t(query_start.element_count()) - 1;
  if (wrong.empty()) wrong = check_rows(rows, indptr, last_page_len);
  if (!wrong.empty()) return invalid("attend: " + wrong);
  const Loaded found = loaded("attend");
  if (found.function == nullptr) return invalid("attend: its library is not loaded");
  const auto shape = query.dimensions();
  fmha_batch_prefill_args args{};
  args.q_ptr = query.untyped_data();
  args.k_ptr = k_pool.untyped_data();
  args.v_ptr = v_pool.untyped_data();
  args.o_ptr = output->untyped_data();
  args.seqstart_q_ptr = query_start.untyped_data();
  args.seqlen_q = args.max_seqlen_q = int32_t(shape[0]);
  args.seqlen_k = pool.pages * pool.page_size;
  args.batch = int32_t(rows);
  args.hdim_q = args.hdim_v = pool.dim;
  args.nhead_q = int32_t(shape[1]);
  args.nhead_k = pool.heads;
  args.num_total_pages = pool.pages;
  args.page_block_size = pool.page_size;
  args.kv_memory_layout = kLinearPages;
  args.kv_lookup_table = kPageList;
  args.kv_indptr = indptr.untyped_data();
  args.kv_page_indices = indices.untyped_data();
  args.kv_last_page_lens = last_page_len.untyped_data();
  args.scale_s = scale;  // its own default would be 1 / sqrt(dim)
  args.scale_p = args.scale_o = 1.0f;
  args.stride_q = args.stride_o = int32_t(shape[1] * shape[2]);
  args.nhead_stride_q = args.nhead_stride_o = pool.dim;
  args.stride_k = args.stride_v = pool.token_stride();
  args.nhead_stride_k = args.nhead_stride_v = pool.dim;
  args.batch_stride_k = args.batch_stride_v = pool.page_stride();
  args.window_size_left = -1;
  args.window_size_right = 0;
  args.mask_type = int32_t(mask_enum::mask_bottom_right);
  ck_tile::stream_config config;
  config.stream_id_ = stream;
  return guarded("attend", [&] {
    const float time = reinterpret_cast<aiter::PrefillFunction*>(found.function)(
        args, config, k_pool.element_type() == ffi::BF16 ? "bf16" : "fp16", /*is_group_mode=*/true,
        mask_enum::mask_bottom_right, bias_enum::no_bias, /*has_lse=*/false, quant_scale_enum::no_scale,
        /*use_ext_asm=*/false);
    if (time < 0) return invalid("attend: it has no kernel for head_dim " + std::to_string(pool.dim));
    return ffi::Error::Success();
  });
}

}  // namespace
}  // namespace paged

extern "C" {

// Open a library and remember one of its functions. `what`: "append", "attend", or a decode kernel's own name.
// What is wrong, or null; the text lives until the thread's next call.
PAGED_EXPORT const char* maxtext_paged_aiter_load(const char* what, const char* path) {
  thread_local std::string wrong;
  const std::string name = what;
  const char* symbol = name == "append" ? paged::kAppendSymbol : name == "attend" ? paged::kPrefillSymbol : what;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* function = library == nullptr ? nullptr : dlsym(library, symbol);
  if (function == nullptr) {
    const char* error = dlerror();
    wrong = error == nullptr ? std::string(path) + " has no " + symbol : error;
    return wrong.c_str();
  }
  if (name == "append" && dlsym(library, paged::kStreamSymbol) == nullptr) {
    wrong = std::string(path) + " does not export the stream that it launches on: its kernels would not wait for XLA's";
    return wrong.c_str();
  }
  std::lock_guard<std::mutex> lock(paged::g_mutex);
  paged::g_loaded[name] = {library, function};
  return nullptr;
}

PAGED_EXPORT int maxtext_paged_aiter_ffi_api_major() { return XLA_FFI_API_MAJOR; }
PAGED_EXPORT int maxtext_paged_aiter_ffi_api_minor() { return XLA_FFI_API_MINOR; }

#define PAGED_DECLARE(name) PAGED_EXPORT XLA_FFI_Error* name(XLA_FFI_CallFrame*)
PAGED_DECLARE(maxtext_paged_aiter_append);
PAGED_DECLARE(maxtext_paged_aiter_append_host);
PAGED_DECLARE(maxtext_paged_aiter_decode);
PAGED_DECLARE(maxtext_paged_aiter_decode_host);
PAGED_DECLARE(maxtext_paged_aiter_attend);
PAGED_DECLARE(maxtext_paged_aiter_attend_host);
}

#define PAGED_GPU ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>()
#define PAGED_POOLS .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>()
#define PAGED_APPEND                                                                                                   \
  PAGED_POOLS.Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::F32>>()    \
      .Ret<ffi::AnyBuffer>()                                                                                           \
      .Ret<ffi::AnyBuffer>()
#define PAGED_LISTS .Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>().Arg<ffi::Buffer<ffi::S32>>()
#define PAGED_DECODE                                                                                                   \
  .Arg<ffi::AnyBuffer>() PAGED_POOLS PAGED_LISTS.Arg<ffi::Buffer<ffi::F32>>()                                          \
      .Ret<ffi::AnyBuffer>()                                                                                           \
      .Ret<ffi::AnyBuffer>()                                                                                           \
      .Attr<std::string_view>("kernel")                                                                                \
      .Attr<float>("scale")                                                                                            \
      .Attr<int64_t>("max_seqlen_k")
#define PAGED_ATTEND                                                                                                   \
  .Arg<ffi::AnyBuffer>() PAGED_POOLS.Arg<ffi::Buffer<ffi::S32>>() PAGED_LISTS.Ret<ffi::AnyBuffer>().Attr<float>("scale")

XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_aiter_append, paged::append, PAGED_GPU PAGED_APPEND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_aiter_decode, paged::decode, PAGED_GPU PAGED_DECODE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_aiter_attend, paged::attend, PAGED_GPU PAGED_ATTEND);

// The host's doors: a stream that is none, device 0.
static void* const kNoStream = reinterpret_cast<void*>(0x57);

static ffi::Error append_host(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer c, ffi::AnyBuffer d,
                              ffi::Buffer<ffi::S32> e, ffi::Buffer<ffi::F32> f, ffi::Result<ffi::AnyBuffer> g,
                              ffi::Result<ffi::AnyBuffer> h) {
  return paged::append(kNoStream, 0, a, b, c, d, e, f, g, h);
}
static ffi::Error decode_host(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer c, ffi::Buffer<ffi::S32> d,
                              ffi::Buffer<ffi::S32> e, ffi::Buffer<ffi::S32> f, ffi::Buffer<ffi::F32> g,
                              ffi::Result<ffi::AnyBuffer> h, ffi::Result<ffi::AnyBuffer> i, std::string_view j, float k,
                              int64_t l) {
  return paged::decode(kNoStream, 0, a, b, c, d, e, f, g, h, i, j, k, l);
}
static ffi::Error attend_host(ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer c, ffi::Buffer<ffi::S32> d,
                              ffi::Buffer<ffi::S32> e, ffi::Buffer<ffi::S32> f, ffi::Buffer<ffi::S32> g,
                              ffi::Result<ffi::AnyBuffer> h, float i) {
  return paged::attend(kNoStream, 0, a, b, c, d, e, f, g, h, i);
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_aiter_append_host, append_host, ffi::Ffi::Bind() PAGED_APPEND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_aiter_decode_host, decode_host, ffi::Ffi::Bind() PAGED_DECODE);
XLA_FFI_DEFINE_HANDLER_SYMBOL(maxtext_paged_aiter_attend_host, attend_host, ffi::Ffi::Bind() PAGED_ATTEND);
