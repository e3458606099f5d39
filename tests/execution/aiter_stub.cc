// Libraries in aiter's place: they write down what they are given, and compute attention from it, slowly, in double.
//
// For:      tests/execution/aiter_stub.py, which builds it; everything is read through the pointers and strides given.
// Not for:  how aiter computes.
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "aiter_types.h"

static std::ostringstream g_log;
static std::string g_taken;

extern "C" const char* stub_take_log() {
  g_taken = g_log.str();
  g_log.str("");
  return g_taken.c_str();
}

struct Bfloat16 {
  uint16_t bits;
  operator double() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  static Bfloat16 of(double value) {
    const float narrow = float(value);
    uint32_t wide;
    std::memcpy(&wide, &narrow, 4);
    if (std::isnan(narrow)) return {0x7fc0};
    return {uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
  }
};
struct Float16 {
  _Float16 value;
  operator double() const { return double(value); }
  static Float16 of(double value) { return {_Float16(float(value))}; }
};

// One query over keys `0..context - 1` of a list of pages.
template <class T>
void attend_one(const T* query, T* output, const T* keys, const T* values, const int* pages, int context, int page_size,
                int dim, int64_t page_stride, int64_t token_stride, double scale) {
  std::vector<double> scores(context), sum(dim);
  double most = -std::numeric_limits<double>::infinity(), total = 0;
  for (int t = 0; t < context; t++) {
    const T* key = keys + pages[t / page_size] * page_stride + (t % page_size) * token_stride;
    for (int d = 0; d < dim; d++) scores[t] += double(query[d]) * double(key[d]);
    scores[t] *= scale;
    most = std::fmax(most, scores[t]);
  }
  for (int t = 0; t < context; t++) {
    const T* value = values + pages[t / page_size] * page_stride + (t % page_size) * token_stride;
    const double weight = std::exp(scores[t] - most);
    total += weight;
    for (int d = 0; d < dim; d++) sum[d] += weight * double(value[d]);
  }
  for (int d = 0; d < dim; d++) output[d] = T::of(sum[d] / total);
}

static void log_tensor(const char* name, const aiter_tensor_t& tensor) {
  g_log << " " << name << "=" << tensor.dtype_ << "[";
  for (int i = 0; i < tensor.ndim; i++) g_log << (i ? "," : "") << tensor.shape[i];
  g_log << "]/[";
  for (int i = 0; i < tensor.ndim; i++) g_log << (i ? "," : "") << tensor.strides[i];
  g_log << "]#" << tensor.numel_ << "@" << tensor.device_id;
}

namespace aiter {
namespace detail {
inline void*& threadLocalStream() {
  thread_local void* stream = nullptr;
  return stream;
}
}  // namespace detail

void reshape_and_cache_flash(aiter_tensor_t& key, aiter_tensor_t& value, aiter_tensor_t& key_cache,
                             aiter_tensor_t& value_cache, aiter_tensor_t& slot_mapping,
                             const std::string& kv_cache_dtype, aiter_tensor_t& k_scale, aiter_tensor_t& v_scale) {
  g_log << "append";
  log_tensor("key", key);
  log_tensor("value", value);
  log_tensor("key_cache", key_cache);
  log_tensor("value_cache", value_cache);
  log_tensor("slot_mapping", slot_mapping);
  g_log << " kv_cache_dtype=" << kv_cache_dtype << " k_scale=" << *static_cast<float*>(k_scale.ptr)
        << " v_scale=" << *static_cast<float*>(v_scale.ptr) << " stream=" << detail::threadLocalStream() << " slots=";
  const int* slots = static_cast<int*>(slot_mapping.ptr);
  for (int64_t i = 0; i < slot_mapping.shape[0]; i++) g_log << (i ? "," : "") << slots[i];
  g_log << "\n";
  const int64_t page_size = key_cache.shape[1], width = 2 * key.shape[1] * key.shape[2];
  for (int64_t i = 0; i < key.shape[0]; i++) {
    if (slots[i] < 0) continue;  // as aiter does: a slot past the pool would be written
    const int64_t to = 2 * ((slots[i] / page_size) * key_cache.strides[0] + slots[i] % page_size * key_cache.strides[1]);
    std::memcpy(static_cast<char*>(key_cache.ptr) + to, static_cast<char*>(key.ptr) + 2 * i * key.strides[0], width);
    std::memcpy(static_cast<char*>(value_cache.ptr) + to, static_cast<char*>(value.ptr) + 2 * i * value.strides[0],
                width);
  }
}

template <class T>
void prefill(const fmha_batch_prefill_args& a) {
  const int *starts = static_cast<const int*>(a.seqstart_q_ptr), *indptr = static_cast<int*>(a.kv_indptr);
  const int *pages = static_cast<int*>(a.kv_page_indices), *last = static_cast<int*>(a.kv_last_page_lens);
  for (int row = 0; row < a.batch; row++) {
    const int listed = indptr[row + 1] - indptr[row], new_tokens = starts[row + 1] - starts[row];
    const int context = (listed - 1) * a.page_block_size + last[row];
    if (listed < 1) g_log << "attend: row " << row << " has no page\n";
    for (int i = 0; i < new_tokens; i++)
      for (int head = 0; head < a.nhead_q; head++) {
        const int64_t kv_head = head / (a.nhead_q / a.nhead_k), token = starts[row] + i;
        attend_one(static_cast<const T*>(a.q_ptr) + token * a.stride_q + head * a.nhead_stride_q,
                   static_cast<T*>(a.o_ptr) + token * a.stride_o + head * a.nhead_stride_o,
                   static_cast<const T*>(a.k_ptr) + kv_head * a.nhead_stride_k,
                   static_cast<const T*>(a.v_ptr) + kv_head * a.nhead_stride_v, pages + indptr[row],
                   context - new_tokens + i + 1, a.page_block_size, a.hdim_q, a.batch_stride_k, a.stride_k, a.scale_s);
      }
  }
}

float mha_batch_prefill(fmha_batch_prefill_args a, const ck_tile::stream_config& config, std::string dtype,
                        bool is_group_mode, mask_enum mask, bias_enum bias, bool has_lse, quant_scale_enum scale,
                        bool use_ext_asm) {
  g_log << "attend dtype=" << dtype << " group=" << is_group_mode << " mask=" << int(mask) << " bias=" << int(bias)
        << " lse=" << has_lse << " quant=" << int(scale) << " asm=" << use_ext_asm << " stream=" << config.stream_id_
        << " timed=" << config.time_kernel_ << " q=" << a.seqlen_q << "," << a.max_seqlen_q << " batch=" << a.batch
        << " dims=" << a.hdim_q << "," << a.hdim_v << " heads=" << a.nhead_q << "," << a.nhead_k
        << " pages=" << a.num_total_pages << "," << a.page_block_size << "," << a.kv_memory_layout << ","
        << a.kv_lookup_table << " scales=" << a.scale_s << "," << a.scale_p << "," << a.scale_o
        << " cap=" << a.logits_soft_cap << " token_strides=" << a.stride_q << "," << a.stride_k << "," << a.stride_v
        << "," << a.stride_o << " head_strides=" << a.nhead_stride_q << "," << a.nhead_stride_k << ","
        << a.nhead_stride_v << "," << a.nhead_stride_o << " page_strides=" << a.batch_stride_k << ","
        << a.batch_stride_v << " window=" << a.window_size_left << "," << a.window_size_right
        << " sink=" << a.sink_size << "," << (a.sink_ptr != nullptr) << " dropout=" << a.p_drop << "\n";
  if (a.hdim_q == 64 && dtype == "fp16") return -1;  // a geometry without a kernel
  dtype == "bf16" ? prefill<Bfloat16>(a) : prefill<Float16>(a);
  return 0;
}
}  // namespace aiter

template <class T>
void decode(int dim, void* out, void* workspace, void* query, void* keys, void* values, int* indptr, int* pages,
            int* last, const float* alibi, const float* q_scale, const float* k_scale, const float* v_scale,
            const float* out_scale, float scale, float cap, int rows, int kv_heads, int heads, int partitions,
            int q_stride, int page_stride, int head_stride, int token_stride, void* stream) {
  const int page_size = page_stride / token_stride;
  g_log << "decode alibi=" << (alibi != nullptr) << " q_scale=" << (q_scale != nullptr) << " k_scale=" << *k_scale
        << " v_scale=" << *v_scale << " out_scale=" << (out_scale != nullptr) << " scale=" << scale << " cap=" << cap
        << " rows=" << rows << " heads=" << heads << "," << kv_heads << " partitions=" << partitions
        << " strides=" << q_stride << "," << page_stride << "," << head_stride << "," << token_stride
        << " stream=" << stream << "\n";
  std::memset(workspace, 0xff, size_t(rows) * heads * partitions * (8 + 2 * dim));
  for (int row = 0; row < rows; row++) {
    const int listed = indptr[row + 1] - indptr[row];
    int context = (listed - 1) * page_size + last[row];
    if (listed < 1) {
      g_log << "decode: row " << row << " has no page\n";
      continue;
    }
    context = std::min(context, partitions * 256);  // what lies beyond is not looked at
    for (int head = 0; head < heads; head++) {
      const int64_t kv_head = head / (heads / kv_heads);
      attend_one(static_cast<T*>(query) + row * q_stride + head * dim, static_cast<T*>(out) + (row * heads + head) * dim,
                 static_cast<T*>(keys) + kv_head * head_stride, static_cast<T*>(values) + kv_head * head_stride,
                 pages + indptr[row], context, page_size, dim, page_stride, token_stride, scale);
    }
  }
}

#define DECODE(name, T, dim)                                                                                           \
  extern "C" void name(void* a, void* b, void* c, void* d, void* e, int* f, int* g, int* h, const float* i,            \
                       const float* j, const float* k, const float* l, const float* m, float n, float o, int p, int q, \
                       int r, int s, int t, int u, int v, int w, void* x) {                                            \
    decode<T>(dim, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x);                            \
  }
DECODE_KERNELS
