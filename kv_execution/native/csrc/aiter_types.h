// The argument types of AMD aiter's torch-free launchers, as their binary interface has them.
//
// For:      calling into libraries that were built elsewhere, with a plain C++ compiler and no HIP header.
// Not for:  deciding arguments (aiter_handlers.cc) or finding libraries (aiter_library.py).
//
// Facts about aiter e4048607a5 (August 2026) with its Composable Kernel 15e12dd7f2. Both sides must agree on every
// field's place: a library of another version may be named only once the sizes below were compared with its headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>

// A strided array on a device, as `reshape_and_cache_flash` takes it, by reference.
struct aiter_tensor_t {
  void* ptr;
  size_t numel_;
  int ndim;
  int64_t shape[8], strides[8];  // in elements
  int dtype_;                    // kAiter...
  int device_id;
};
constexpr int kAiterF16 = 2, kAiterBF16 = 3, kAiterF32 = 4, kAiterI32 = 8;
static_assert(sizeof(aiter_tensor_t) == 160);

namespace ck_tile {
struct stream_config {
  void* stream_id_ = nullptr;
  bool time_kernel_ = false;
  int log_level_ = 0, cold_niters_ = 3, nrepeat_ = 10;
  bool is_gpu_timer_ = true, flush_cache_ = false;
  int rotating_count_ = 1;
};
static_assert(sizeof(stream_config) == 32);
}  // namespace ck_tile

enum class mask_enum : int { no_mask, mask_top_left, mask_bottom_right, window_generic };
enum class bias_enum : int { no_bias, elementwise_bias, alibi };
enum class quant_scale_enum : int { no_scale, pertensor, blockscale, kv_blockscale, mx };
constexpr int kLinearPages = 1, kPageList = 1;  // [page, token, head, dim] pools; one flat list of pages with offsets

// Of `mha_batch_prefill`, passed by value. Strides are in elements.
struct fmha_batch_prefill_args {
  const void *q_ptr, *k_ptr, *v_ptr, *bias_ptr, *q_descale_ptr, *k_descale_ptr, *v_descale_ptr;
  void *rand_val_ptr, *lse_ptr, *o_ptr;
  const void *seqstart_q_ptr, *sink_ptr;
  int32_t seqlen_q, seqlen_k, batch, max_seqlen_q, hdim_q, hdim_v, nhead_q, nhead_k;
  int32_t num_total_pages, page_block_size, kv_memory_layout, kv_lookup_table;
  void *kv_indptr, *kv_page_indices, *kv_last_page_lens, *seqlen_k_ptr;
  int32_t batch_stride_block_table;
  float scale_s, scale_p, scale_o, logits_soft_cap;
  int32_t stride_q, stride_k, stride_v, stride_bias, stride_randval, stride_o;
  int32_t nhead_stride_q, nhead_stride_k, nhead_stride_v, nhead_stride_bias, nhead_stride_randval, nhead_stride_lse,
      nhead_stride_o;
  int32_t batch_stride_q, batch_stride_k, batch_stride_v, batch_stride_bias, batch_stride_randval, batch_stride_lse,
      batch_stride_o;
  int32_t window_size_left, window_size_right, sink_size, mask_type;
  float p_drop;
  bool s_randval;
  std::variant<std::pair<uint64_t, uint64_t>, std::pair<const void*, const void*>> drop_seed_offset;
  int32_t nblock_stride_kv_block_descale = 0, nhead_stride_kv_block_descale = 0;
};
static_assert(sizeof(fmha_batch_prefill_args) == 336);

namespace aiter {
using AppendFunction = void(aiter_tensor_t& key, aiter_tensor_t& value, aiter_tensor_t& key_cache,
                            aiter_tensor_t& value_cache, aiter_tensor_t& slot_mapping,
                            const std::string& kv_cache_dtype, aiter_tensor_t& k_scale, aiter_tensor_t& v_scale);
using PrefillFunction = float(fmha_batch_prefill_args, const ck_tile::stream_config&, std::string dtype,
                              bool is_group_mode, mask_enum, bias_enum, bool has_lse, quant_scale_enum,
                              bool use_ext_asm);
using DecodeFunction = void(void* out, void* workspace, void* query, void* key_cache, void* value_cache, int* kv_indptr,
                            int* kv_page_indices, int* kv_last_page_lens, const float* alibi_slopes,
                            const float* q_scale, const float* k_scale, const float* v_scale,
                            const float* fp8_out_scale, float scale, float logits_soft_cap, int num_seqs,
                            int num_kv_heads, int num_heads, int max_num_partitions, int q_stride, int kv_block_stride,
                            int kv_head_stride, int kv_seq_stride, void* stream);
}  // namespace aiter
